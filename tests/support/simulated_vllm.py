"""A simulated vLLM worker (0.32.0) with the traps of the real one, on a real port.

It samples what its noise says, so that a seed that is sent again repeats itself; its logprobs depend on the tokens
before, the weights and the adapter alone, so that every answer can be scored again. `/health` is always 200. Fields
that it does not know it leaves out without a word.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import io
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from miles_router.serving.server import listen
from miles_router.testing.worker.model.constrained import spelled, stop_id, text_matching
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.running_router import serving

LAYERS, EXPERTS, TOP, CONTEXT = 2, 8, 2, 4096
#: Sampling parameters that may be null: those that have no value of their own by default.
NULLABLE = {"seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias"}
LIKELY = (20, 21, 22)  # as top logprobs have it, wherever they rank
SEEDS = itertools.count(1)


class Refused(Exception):
    """What it refuses: a status, and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


@dataclass(eq=False)
class Sample:
    """One sample as it grows."""

    prompt: list[int]
    params: Mapping[str, Any]
    noise: str
    adapter: str
    name: str
    ids: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    sent: int = 0
    text: str = ""
    script: list[int] | None = None
    finish: str | None = None
    reason: int | str | None = None


class SimulatedVLLM:
    """One worker.

    Args:
        tokenizer: a directory with `tokenizer.json`.
        experts: as started with `--enable-return-routed-experts`; so with the others.
        config: changes of what `/server_info` says, by part.
    """

    def __init__(
        self,
        tokenizer: str,
        *,
        raw_logprobs: bool = False,
        scale_out: bool = True,
        controlled: bool = True,
        experts: bool = False,
        sleep_mode: bool = False,
        latency_s: float = 0.002,
        keep_alive_s: int = 5,
        names_ids: bool = False,
        config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.url = ""
        self.latency_s = latency_s
        #: The bodies of what generated, and all other requests that were posted, by path.
        self.sampled: list[dict[str, Any]] = []
        self.told: list[tuple[str, Any]] = []
        self.version = "default"
        self.adapters: dict[str, str] = {}
        #: The core hangs; the next stream fails inside; the first answer to `/server_info` waits for this.
        self.hung = self.paused = self.preempted = False
        self.fails_next = False
        self.info_ready = asyncio.Event()
        self.info_ready.set()
        self.salts: dict[tuple[int, ...], set[str | None]] = {}
        self._tokenizer = DirectoryTokenizer(tokenizer)
        self._raw, self._scale_out, self._controlled, self._experts = raw_logprobs, scale_out, controlled, experts
        self._weights, self._keep_alive_s = "default", keep_alive_s
        self._names_ids = names_ids
        self._seed, self._count = next(SEEDS), itertools.count()
        self._running: list[Sample] = []
        self._turned = asyncio.Event()
        self._config: dict[str, Any] = {
            "model_config": {
                "model": "a-model",
                "tokenizer": tokenizer,
                "seed": self._seed,
                "logprobs_mode": "raw_logprobs" if raw_logprobs else "processed_logprobs",
                "enable_sleep_mode": sleep_mode,
            },
            "cache_config": {"num_gpu_blocks": 100, "block_size": 16},
            "parallel_config": {"data_parallel_size": 1, "_api_process_count": 1},
            "structured_outputs_config": {"reasoning_parser": "qwen3"},
            "aux_output_config": {"enable_return_routed_experts": experts},
            "additional_config": {"tool_call_parser": "hermes", "return_tokens_as_token_ids": names_ids},
            "lora_config": {},
            "instance_id": self._seed,
        }
        for part, changed in (config or {}).items():
            self._config[part] = {**self._config[part], **changed}

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[SimulatedVLLM]:
        """Serve it as vLLM is served: idle connections end after `keep_alive_s`."""
        open_, core = self._routes()
        routes = [*open_, *(core if self._controlled else ())]
        app = Starlette(routes=[Route(path, self._endpoint(act), methods=[method]) for method, path, act in routes])
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=self._keep_alive_s,
        )
        async with serving(config, listen("127.0.0.1", port)) as (_, self.url):
            yield self

    def _routes(self) -> tuple[list[Any], list[Any]]:
        return [
            ("GET", "/version", lambda _: {"version": "0.32.0"}),
            ("GET", "/health", lambda _: None),
            ("GET", "/v1/models", self._models),
            ("POST", "/tokenize", lambda asked: {"tokens": self._tokenizer.encode(asked["prompt"])}),
            ("POST", "/detokenize", lambda asked: {"prompt": self._tokenizer.decode(asked["tokens"])}),
            ("GET", "/inference/v1/generate", self._unusable),
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/inference/v1/abort_requests", self._abort),
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._complete),
            ("POST", "/v1/load_lora_adapter", self._load),
            ("POST", "/v1/unload_lora_adapter", lambda asked: self.adapters.pop(asked["lora_name"]) and None),
        ], [
            ("GET", "/server_info", self._info),
            ("GET", "/weight_info", self._core(lambda _: {"weight_version": self.version})),
            ("GET", "/is_paused", self._core(lambda _: {"is_paused": self.paused})),
            ("POST", "/pause", self._core(self._pause)),
            ("POST", "/resume", self._core(self._resume)),
            ("POST", "/abort_requests", self._abort_of_all),
            ("POST", "/reset_prefix_cache", self._core(lambda _: {"success": self.preempted or not self._running})),
            ("POST", "/update_weight_version", self._core(self._name_version)),
            ("POST", "/collective_rpc", self._core(self._reload)),
            ("POST", "/sleep", self._core(lambda _: {"status": "sleeping"})),
            ("POST", "/wake_up", self._core(lambda _: {"status": "awake"})),
            ("GET", "/get_world_size", lambda _: {"world_size": 1}),
            ("POST", "/init_weight_transfer_engine", self._core(lambda _: {"message": "initialized"})),
            ("POST", "/start_weight_update", self._core(lambda _: {"message": "started"})),
            ("POST", "/update_weights", self._core(lambda _: {"message": "updated"})),
            ("POST", "/finish_weight_update", self._core(self._name_version)),
        ]

    def _endpoint(self, act: Callable[[Any], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await request.body()
            asked = {**request.query_params, **(orjson.loads(body) if body else {})}
            if request.method == "POST" and act not in (self._generate, self._chat, self._complete):
                self.told.append((request.url.path + ("?" + request.url.query) * bool(request.url.query), asked))
            if "x-request-id" in request.headers:
                asked["request_id"] = request.headers["x-request-id"]  # it wins
            try:
                said = act(asked)
                said = await said if asyncio.iscoroutine(said) else said
            except Refused as refused:
                return Response(orjson.dumps(refused.body), refused.status, media_type="application/json")
            if isinstance(said, Response):
                return said
            return Response(b"" if said is None else orjson.dumps(said), media_type="application/json")

        return answer

    def _core(self, act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def answered(asked: Any) -> Any:
            await self._until(lambda: not self.hung)
            return act(asked)

        return answered

    async def _until(self, may: Callable[[], bool]) -> None:
        while not may():
            await self._turned.wait()

    @property
    def generating(self) -> bool:
        return bool(self._running)

    def _turn(self) -> None:
        """Something has changed that others wait for."""
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    def hang(self, *, hung: bool = True) -> None:
        """Have its core stand still, or go on."""
        self.hung = hung
        self._turn()

    def _unusable(self, asked: Any) -> Any:
        raise Refused(405, "Method Not Allowed") if self._scale_out else Refused(403, "Scale-out is disabled")

    async def _info(self, asked: Any) -> Any:
        await self.info_ready.wait()
        assert asked["config_format"] == "json"
        return {"vllm_config": self._config, "vllm_env": {}, "system_env": {}}

    def _models(self, asked: Any) -> Any:
        cards = [{"id": "a-model", "root": "a-model", "parent": None}]
        cards += [{"id": name, "root": path, "parent": "a-model"} for name, path in self.adapters.items()]
        return {"data": [{**card, "owned_by": "vllm", "max_model_len": CONTEXT} for card in cards]}

    # Control

    def _pause(self, asked: Any) -> Any:
        self.paused = True
        self.preempted = asked.get("clear_cache", "true") == "true"  # keys and values are computed anew later
        if asked.get("mode", "abort") == "abort":
            self._end(self._running)
        return {"status": "paused"}

    def _resume(self, asked: Any) -> Any:
        self.paused = self.preempted = False
        self._turn()
        return {"status": "resumed"}

    def _end(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.finish = sample.finish or "abort"
        self._turn()

    def _abort(self, asked: Any) -> Any:
        self._end([sample for sample in self._running if sample.name in asked["request_ids"]])

    def _abort_of_all(self, asked: Any) -> Any:
        names = asked.get("request_ids")
        self._end([sample for sample in self._running if not names or sample.name in names])
        return {"status": "aborted", "aborted": len(names or self._running)}

    def _name_version(self, asked: Any) -> Any:
        self.version = asked.get("new_version", asked.get("weight_version", self.version))
        return {"success": True}

    def _reload(self, asked: Any) -> Any:
        self._weights = asked.get("kwargs", {}).get("weights_path", self._weights)
        return {"results": [None]}

    def _load(self, asked: Any) -> Any:
        if asked["lora_name"] in self.adapters:
            raise Refused(400, "already loaded")
        self.adapters[asked["lora_name"]] = asked["lora_path"]

    # Sampling

    @property
    def lengths(self) -> list[int]:
        return [len(sample.ids) for sample in self._running]

    def _chat(self, asked: Any) -> Any:
        self.sampled.append(asked)
        model = asked.get("model", "a-model")
        if model != "a-model" and model not in self.adapters:
            raise Refused(404, f"The model `{model}` does not exist.")
        message = {"role": "assistant", "content": "Hi", "reasoning": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": f"chatcmpl-{asked.get('request_id', 'x')}", "model": model, "choices": [choice]}

    async def _complete(self, asked: Any) -> Any:
        """A whole completion, which names no weights."""
        usual = {"max_tokens": 16, "logprobs": 0, "temperature": 1, "ignore_eos": False}
        params = {name: asked.get(name, value) for name, value in usual.items()}
        prompt = asked["prompt"] if isinstance(asked["prompt"], list) else self._tokenizer.encode(asked["prompt"])
        name = f"cmpl-{asked.get('request_id') or next(self._count)}-0"
        given = {"stream": False, "token_ids": prompt, "sampling_params": params, "engine_name": name}
        told = await self._generate({**asked, **given})
        (choice,) = told["choices"]
        content = choice["logprobs"]["content"]
        logprobs = {
            "token_logprobs": [each["logprob"] for each in content],
            "tokens": [each["token"] for each in content],
            "top_logprobs": None,
            "text_offset": [],
        }
        ids = {"token_ids": choice["token_ids"], "prompt_token_ids": prompt}
        shown = {name: choice[name] for name in ("index", "text", "finish_reason", "stop_reason")}
        usage = {**told["usage"], "total_tokens": sum(filter(None, told["usage"].values()))}
        return {
            "id": "cmpl-x",
            "object": "text_completion",
            "choices": [{**shown, **ids, "logprobs": logprobs}],
            "usage": usage,
        }

    async def _generate(self, asked: Any) -> Any:
        self.sampled.append(asked)
        prompt, model = asked["token_ids"], asked.get("model", "a-model")
        given = asked["sampling_params"].items()
        params = {name: value for name, value in given if value is not None or name not in NULLABLE}
        name = asked.get("engine_name", f"generate-tokens-{asked.get('request_id') or next(self._count)}")
        if not self._scale_out:
            raise Refused(403, "Scale-out is disabled")
        if model != "a-model" and model not in self.adapters:
            raise Refused(404, f"The model `{model}` does not exist.")
        late = None
        if len(prompt) >= CONTEXT:
            raise Refused(
                400, f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of {CONTEXT}."
            )
        if not prompt or max(prompt) >= self._tokenizer.vocab_size:
            late = Refused(400, "Token id out of vocabulary")
        elif params.get("max_tokens") == 0 or params.get("stop") == [""] or None in params.values():
            raise Refused(400, "max_tokens must be at least 1, and nothing null")
        salt = asked.get("cache_salt")
        if salt is not None and (len(salt) > 128 or "/" in salt):
            raise Refused(400, "cache_salt")
        self.salts.setdefault(tuple(prompt), set()).add(salt)
        count, seed = params.get("n", 1), params.get("seed")
        noises = [f"{seed + n}" if seed is not None else f"{self._seed}.{next(self._count)}" for n in range(count)]
        samples = [Sample(prompt, params, noise, self.adapters.get(model, ""), name) for noise in noises]
        for sample in samples:
            sample.script = self._script(sample)
        if asked.get("stream"):
            return StreamingResponse(self._events(samples, asked, late), media_type="text/event-stream")
        if late is not None:
            raise late
        async for _ in self._sample(samples):
            pass
        said = {"request_id": name, "usage": self._usage(samples), "prompt_logprobs": self._of_prompt(samples[0])}
        return {**said, "choices": [self._choice(place, each, asked) for place, each in enumerate(samples)]}

    async def _events(self, samples: list[Sample], asked: Any, late: Refused | None) -> AsyncIterator[bytes]:
        if late is not None:  # status 200 all the same
            yield b"data: " + orjson.dumps(late.body).replace(b":", b": ") + b"\n\ndata: [DONE]\n\n"
            return
        async for place, sample in self._sample(samples):
            said = {"request_id": sample.name, "usage": None, "choices": [self._choice(place, sample, asked)]}
            yield b"data: " + orjson.dumps(said) + b"\n\n"
            if self.fails_next and len(sample.ids) > 2:
                self.fails_next = False
                yield b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\ndata: [DONE]\n\n'
                return
        yield b"data: " + orjson.dumps({"choices": [], "usage": self._usage(samples)}) + b"\n\ndata: [DONE]\n\n"

    async def _sample(self, samples: list[Sample]) -> AsyncIterator[tuple[int, Sample]]:
        """Sample a token of each in turn; what is paused waits, and is no news of its own."""
        self._running += samples
        left = dict(enumerate(samples))
        try:
            while left:
                for place, sample in [*left.items()]:
                    await self._until(functools.partial(self._may_go_on, sample))
                    if not sample.finish:
                        await asyncio.sleep(self.latency_s)
                    if not sample.finish and (self.paused or self.hung):
                        continue
                    if not sample.finish:
                        self._step(sample)
                    if sample.finish:
                        del left[place]
                    yield place, sample
        finally:
            self._running = [each for each in self._running if each not in samples]

    def _may_go_on(self, sample: Sample) -> bool:
        return sample.finish is not None or not (self.hung or self.paused)

    def _script(self, sample: Sample) -> list[int] | None:
        """Ids of a text that a constraint allows, cut otherwise than the tokenizer would."""
        pattern = sample.params.get("structured_outputs", {}).get("regex")
        if pattern is None:
            return None
        source = random.Random(sample.noise)
        return [*spelled(text_matching(pattern, source), self._tokenizer, source), stop_id(self._tokenizer)]

    def _step(self, sample: Sample) -> None:
        params, place = sample.params, len(sample.ids)
        forced = next((int(token) for token, bias in (params.get("logit_bias") or {}).items() if bias >= 100), None)
        drawn = int.from_bytes(hashlib.sha256(f"{sample.noise} {place}".encode()).digest()[:4], "big")
        if sample.script is not None:
            forced = sample.script[place]
        token = forced if forced is not None else 3 + drawn % (self._tokenizer.size - 16)
        sample.ids.append(token)
        sample.versions.append(self.version)
        whole = self._tokenizer.decode(sample.ids, skip_special_tokens=True)
        stop = next((each for each in params.get("stop") or () if each in whole), None)
        if token in params.get("stop_token_ids", ()):
            sample.finish, sample.reason = "stop", token
        elif token in self._tokenizer.eos_token_ids and not (params.get("ignore_eos") and sample.script is None):
            sample.finish = "stop"
        elif stop is not None:
            sample.finish, sample.reason = "stop", stop
        elif len(sample.ids) >= params.get("max_tokens", CONTEXT - len(sample.prompt)):
            sample.finish = "length"

    def _choice(self, index: int, sample: Sample, asked: Any) -> dict[str, Any]:
        """What is new of a sample, or all of a whole answer."""
        begin, end = sample.sent, len(sample.ids)
        ids, ended = sample.ids[begin:], sample.finish is not None
        sample.sent = end
        text = self._text(sample)
        new, sample.text = text[len(sample.text) :], text
        spans = [
            {"version": version, "start": each[0], "end": each[-1] + 1}
            for version, group in itertools.groupby(range(end), key=lambda place: sample.versions[place])
            for each in [[*group]]
        ]
        wanted = range(begin, end) if "logprobs" in sample.params else ()
        logprobs = [self._entry(sample, place) for place in wanted]
        return {
            "index": index,
            "finish_reason": sample.finish,
            "stop_reason": sample.reason,
            "token_ids": ids,
            "text": new,
            "logprobs": {"content": logprobs} if "logprobs" in sample.params else None,
            "weight_versions": spans if ended else None,
            "routed_experts": self._rows(sample) if ended and sample.ids and self._experts else None,
        }

    def _text(self, sample: Sample) -> str:
        ids = sample.ids[:-1] if sample.finish == "stop" and not isinstance(sample.reason, str) else sample.ids
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if isinstance(sample.reason, str):
            return text[: text.index(sample.reason)]
        held = 0 if sample.finish else max(map(len, sample.params.get("stop") or [""]))
        kept = text if sample.finish else text.rstrip("\N{REPLACEMENT CHARACTER}")
        return kept[: max(len(sample.text), len(kept) - held)]

    def _entry(self, sample: Sample, place: int) -> dict[str, Any]:
        temperature = 1.0 if self._raw else sample.params.get("temperature", 1.0) or 1.0
        context = [*sample.prompt, *sample.ids[:place]]
        own = sample.ids[place]
        likely = [token for token in LIKELY if token != own][: max(0, sample.params["logprobs"] - 1)]
        each = {token: self._score(context, token, sample.adapter) / temperature for token in (own, *likely)}
        told = [{"token": self._named(token), "logprob": score, "bytes": []} for token, score in each.items()]
        return {**told[0], "top_logprobs": told}

    def _named(self, token: int) -> str:
        return f"token_id:{token}" if self._names_ids else self._tokenizer.decode([token])

    def _score(self, context: Sequence[int], token: int, adapter: str) -> float:
        told = f"{self._weights} {adapter} {context} {token}".encode()
        return -0.01 - int.from_bytes(hashlib.sha256(told).digest()[:2], "big") / 6553.6

    def _of_prompt(self, sample: Sample) -> list[Any] | None:
        if "prompt_logprobs" not in sample.params:
            return None
        if not sample.ids:  # it was aborted before it was computed
            return [None]
        ids = sample.prompt
        scores = [self._score(ids[:place], token, sample.adapter) for place, token in enumerate(ids)]
        texts = [self._tokenizer.decode([token]) for token in ids]
        each = [
            {str(token): {"logprob": score, "rank": 1, "decoded_token": text}}
            for token, score, text in zip(ids, scores, texts, strict=True)
        ]
        return [None, *each[1:]]

    def _usage(self, samples: Sequence[Sample]) -> dict[str, Any]:
        sampled = sum(len(sample.ids) for sample in samples)
        return {"prompt_tokens": len(samples[0].prompt), "completion_tokens": sampled, "prompt_tokens_details": None}

    def _rows(self, sample: Sample) -> str:
        start = sample.params.get("routed_experts_prompt_start", 0)
        assert start <= len(sample.prompt)
        ids = [*sample.prompt, *sample.ids][start:-1]
        places = np.arange(LAYERS)[:, None] * 3 + np.arange(TOP)
        rows = (np.array(ids, int)[:, None, None] + places) % EXPERTS
        file = io.BytesIO()
        np.save(file, rows.astype("u1"))
        return base64.b64encode(file.getvalue()).decode()
