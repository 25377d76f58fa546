"""Generations that outlive a pause, or the loss of their worker: cut, kept, carried on, and answered as one.

The innermost layer of the stack while `--partial-rollout resume` or `--resume-on-worker-loss` is set, for `/generate`.
What a pause cut off is sent again after continue, to any worker, as `input_ids` = prompt + what was sampled, with the
rest of the budget. The client sees one answer, or one stream. What cannot be carried on exactly is returned as the
engine gave it: `finish_reason` `abort`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken
from miles_router.events import LAST_EVENT, EventReader, event, payload
from miles_router.exchange import Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.headers import first
from miles_router.inflight import InFlight
from miles_router.joining import UNFINISHED, cut, join, straddling
from miles_router.middleware import ASGIApp
from miles_router.router import Router
from miles_router.tasks import together
from miles_router.watch import Watch

logger = logging.getLogger(__name__)

PATH = "/generate"
OK = 200
MAX_ANSWER = 1 << 30
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's `SamplingParams`
#: Sampling that depends on the output so far, which an engine that is given it as prompt no longer counts as output.
STATEFUL = ("regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "custom_params")
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
#: Fields of a request that may hold one value for each prompt.
PER_PROMPT = ("sampling_params", "return_logprob", "top_logprobs_num", "token_ids_logprob", "lora_path", "rid")
#: Fields about the prompt, which the first part has answered.
OF_THE_PROMPT = ("text", "input_tokens", "logprob_start_len")


class Enough(Exception):
    """Raised into a stream that is not wanted any further; its worker stops generating."""


class CannotResume(RouterError):
    """A generation that cannot be carried on exactly; it is returned as it is."""


@dataclass
class Part:
    """One generation of a request: what was asked, and what has come so far."""

    index: int
    request: Mapping[str, Any]  # for this generation alone
    streamed_index: bool
    answer: dict[str, Any] | None = None  # of the goes before this one, joined
    current: dict[str, Any] | None = None  # of this go, cumulative
    incremental: bool = False
    done: bool = False
    prompt: list[int] = field(default_factory=list)

    @property
    def params(self) -> Mapping[str, Any]:
        return self.request.get("sampling_params") or {}

    @property
    def stops(self) -> list[str]:
        stop = self.params.get("stop") or []
        return [stop] if isinstance(stop, str) else list(stop)

    def so_far(self) -> dict[str, Any] | None:
        """Everything that has come, joined."""
        if self.current is None:
            return self.answer
        return dict(self.current) if self.answer is None else join(self.answer, self.current)

    def next_go(self) -> None:
        """What has come becomes what was before."""
        self.answer, self.current = self.so_far(), None

    def absorb(self, answer: dict[str, Any]) -> None:
        """One event of this go: everything so far, or (`--incremental-streaming-output`) what is new."""
        known = self.current
        if known is None or len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]:
            self.current = answer
            return
        self.incremental = True
        meta = dict(answer["meta_info"])
        for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            if meta.get(name) is not None:
                meta[name] = [*(known["meta_info"].get(name) or ()), *meta[name]]
        ids = [*known["output_ids"], *answer["output_ids"]]
        self.current = {**answer, "text": known["text"] + answer["text"], "output_ids": ids, "meta_info": meta}


def split(body: Mapping[str, Any]) -> list[Part]:
    """The generations a request asks for, in the order of their answers (prompt-major, `n` each)."""
    text, ids = body.get("text"), body.get("input_ids", body.get("input_tokens"))
    batch = isinstance(text, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
    source: Any = text if text is not None else ids
    prompts = list(source) if batch else [source]
    parts: list[Part] = []
    for place, prompt in enumerate(prompts):
        own = {name: _own(body, name, place, len(prompts) if batch else None) for name in PER_PROMPT if name in body}
        params = dict(own.get("sampling_params") or {})
        samples = params.pop("n", 1)
        if samples != 1:
            own.pop("rid", None)
        request = {**body, **own, "sampling_params": params, ("text" if text is not None else "input_ids"): prompt}
        request.pop("input_tokens", None)
        indexed = batch or samples != 1
        parts += [Part(len(parts) + sample, request, indexed) for sample in range(samples)]
    return parts


def _own(body: Mapping[str, Any], name: str, place: int, prompts: int | None) -> Any:
    value = body[name]
    if prompts is None:
        return value
    if name == "rid" and isinstance(value, str):
        return f"{value}_{place}"
    return value[place] if isinstance(value, list) and len(value) == prompts else value


class PartialRollouts:
    """The layer. `resume_cut`: carry on what a pause cut; `resume_lost`: carry on streams whose worker was lost."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        in_flight: InFlight,
        resume_cut: bool = True,
        resume_lost: bool = False,
    ) -> None:
        self.app = app
        self.in_flight = in_flight
        self.router = router
        self.resume_cut = resume_cut
        self.resume_lost = resume_lost
        self.resumed = 0
        self.returned = 0
        router.statistics["partial_rollouts"] = lambda: {"resumed": self.resumed, "returned": self.returned}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; anything but a well-formed `/generate` passes."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        try:
            parsed = exchange.loads(body)
            parts = split(parsed)
            stream = bool(parsed.get("stream"))
        except (RouterError, AttributeError, KeyError, TypeError, ValueError, IndexError):
            await self.app(scope, replay(body, receive), send)  # the engine says what is wrong with it
            return
        self.in_flight.enter(exchange, body)
        try:
            await (_Stream if stream else _Whole)(self, scope, receive, send, exchange, parts).run(body)
        finally:
            self.in_flight.leave(exchange)


class _Run:
    """One request on its way."""

    def __init__(
        self,
        layer: PartialRollouts,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        parts: list[Part],
    ) -> None:
        self.layer = layer
        self.router = layer.router
        self.gate = layer.router.gate
        self.scope = scope
        self.receive = receive
        self.send = send
        self.exchange = exchange
        self.parts = parts
        self.pauses = self.gate.pauses

    def was_cut(self, answer: Mapping[str, Any]) -> bool:
        """Whether a pause ended this generation: it was aborted, by nobody's wish, while the fleet was paused."""
        self.exchange.rids.add(str(answer["meta_info"].get("id")))
        finish = answer["meta_info"].get("finish_reason") or {}
        if finish.get("type") != "abort" or self.exchange.aborted or not self.layer.resume_cut:
            return False
        if finish.get("status_code") is not None or finish.get("err_type") is not None:
            return False  # the engine's own failure
        return self.gate.closed or self.gate.pauses != self.pauses

    async def continuation(self, part: Part) -> bytes:
        """The request that carries `part` on.

        Raises:
            CannotResume: not exactly.
        """
        sampled = part.answer["output_ids"] if part.answer is not None else []
        if not sampled:  # it had only queued
            return orjson.dumps(dict(part.request))
        stateful = [name for name in STATEFUL if part.params.get(name)]
        stateful += [name for name, neutral in PENALTIES.items() if part.params.get(name, neutral) != neutral]
        if stateful:
            raise CannotResume(f"sampling with {stateful[0]} depends on the output so far")
        if not part.prompt:
            part.prompt = await self._prompt_ids(part)
        params = {**part.params}
        budget = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        if budget is not None:  # null: as much as fits
            params["max_new_tokens"] = budget - len(sampled)
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(sampled))
        request = {name: value for name, value in part.request.items() if name not in OF_THE_PROMPT}
        request |= {"input_ids": [*part.prompt, *sampled], "sampling_params": params}
        if request.get("return_routed_experts"):
            request["routed_experts_start_len"] = len(part.prompt) + len(sampled) - 1
        return orjson.dumps(request)

    async def _prompt_ids(self, part: Part) -> list[int]:
        ids = part.request.get("input_ids")
        if ids is not None:
            return list(ids)
        tokens = (await self._worker("/v1/tokenize", {"prompt": part.request["text"]}))["tokens"]
        counted = part.answer["meta_info"].get("prompt_tokens") if part.answer is not None else len(tokens)
        if len(tokens) != counted:
            raise CannotResume("the worker's tokenizer does not give the prompt it had")
        return list(tokens)

    async def _worker(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask a worker's own tokenizer."""
        headers = [(b"content-type", b"application/json")]
        async with self.router.forward("POST", path, headers=headers, body=orjson.dumps(body)) as forwarded:
            data = await forwarded.reply.read_all(MAX_ANSWER)
        if forwarded.reply.status != OK:
            raise CannotResume(f"{path} answered {forwarded.reply.status}")
        return orjson.loads(data)

    async def ask(self, body: bytes, send: Send) -> None:
        """Send a request through the layers inside."""
        self.pauses = self.gate.pauses
        await self.layer.app(with_body(self.scope, body), replay(body, self.receive), send)

    async def may_go_on(self) -> bool:
        """Wait until the fleet goes on; False if the request was aborted meanwhile."""
        if self.gate.closed and not self.exchange.aborted:
            with Watch(self.receive, 0):
                await self.gate.wait(self.exchange)
        return not self.exchange.aborted

    async def mend(self, part: Part, joined: dict[str, Any], boundary: int) -> dict[str, Any]:
        """Put right what joining cannot know: a character cut in two, and a stop string across the cut."""
        assert part.answer is not None
        if part.answer["text"].endswith(UNFINISHED):
            joined = {**joined, "text": await self._whole_text(part, joined)}
        found = straddling(joined["text"], boundary, part.stops)
        if found is None:
            return joined
        at, stop = found
        tokens = await self._tokens_up_to(part, joined, stop, at)
        text = joined["text"][: at + len(stop)] if part.params.get("no_stop_trim") else joined["text"][:at]
        start = part.request.get("routed_experts_start_len") or 0
        return cut(joined, tokens, text, {"type": "stop", "matched": stop}, experts_start=start)

    async def _whole_text(self, part: Part, joined: Mapping[str, Any]) -> str:
        finish = joined["meta_info"].get("finish_reason") or {}
        ids, matched = joined["output_ids"], finish.get("matched")
        if isinstance(matched, int) and not part.params.get("no_stop_trim"):
            ids = ids[:-1]
        text: str = (await self._detokenize(part, [ids]))[0]
        if isinstance(matched, str):
            at = text.rfind(matched)
            text = text[: at + len(matched)] if part.params.get("no_stop_trim") else text[:at]
        return text

    async def _tokens_up_to(self, part: Part, joined: Mapping[str, Any], stop: str, at: int) -> int:
        """How many tokens it takes to spell the stop string at `at`."""
        assert part.answer is not None
        begin, end = len(part.answer["output_ids"]), len(joined["output_ids"])
        lengths = range(begin + 1, min(end, begin + 4 * len(stop) + 4) + 1)
        texts = await self._detokenize(part, [joined["output_ids"][:length] for length in lengths])
        reached = (length for length, text in zip(lengths, texts, strict=True) if stop in text[at:])
        return next(reached, end)

    async def _detokenize(self, part: Part, ids: Sequence[Sequence[int]]) -> list[str]:
        skip = part.params.get("skip_special_tokens", True)
        answer = await self._worker("/v1/detokenize", {"tokens": list(ids), "skip_special_tokens": skip})
        return list(answer["text"])

    def give_up(self, part: Part, error: RouterError) -> None:
        """Say that a part is returned as it is."""
        self.layer.returned += 1
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("generation_not_resumed", extra={"fields": fields})
        part.done = True


class _Whole(_Run):
    """A request whose answer comes in one piece."""

    async def run(self, body: bytes) -> None:
        start, data = await self._answered(body)
        status, answers = start["status"], _answers(data)
        if status != OK or answers is None or len(answers) != len(self.parts):
            await self._send_on(start, data)
            return
        changed = False
        for part, answer in zip(self.parts, answers, strict=True):
            part.current = answer
            changed = changed or self.was_cut(answer)
        if not changed:
            await self._send_on(start, data)
            return
        await together([self._carry_on(part) for part in self.parts], name="carry on")
        merged = [part.so_far() for part in self.parts]
        whole = orjson.dumps(merged if self.parts[0].streamed_index or data.lstrip()[:1] == b"[" else merged[0])
        await self._send_on(start, whole)

    async def _carry_on(self, part: Part) -> None:
        assert part.current is not None
        while self.was_cut(part.so_far() or {}):
            part.next_go()
            assert part.answer is not None
            try:
                if not await self.may_go_on():
                    return
                start, data = await self._answered(await self.continuation(part))
                answers = _answers(data)
                if start["status"] != OK or not answers:
                    raise CannotResume(f"the worker answered {start['status']}")
                joined = join(part.answer, answers[0])
                part.answer = await self.mend(part, joined, len(part.answer["text"]))
            except ClientDisconnected:
                raise
            except RouterError as error:
                self.give_up(part, error)
                return
            self.layer.resumed += 1

    async def _answered(self, body: bytes) -> tuple[Message, bytes]:
        """One whole answer; under `resume_lost` one that was cut by the loss of its worker is asked for again."""
        lost = 0
        while True:
            collected = _Collector()
            try:
                await self.ask(body, collected.send)
            except UpstreamBroken:
                lost += 1
                if not self.layer.resume_lost or lost > self.router.config.max_retries:
                    raise
                continue
            assert collected.start is not None
            return collected.start, b"".join(collected.parts)

    async def _send_on(self, start: Message, data: bytes) -> None:
        headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(data)).encode("ascii")))
        await self.send({**start, "headers": headers})
        await self.send({"type": "http.response.body", "body": data})


class _Collector:
    """Keeps a reply."""

    def __init__(self) -> None:
        self.start: Message | None = None
        self.parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.parts.append(message.get("body", b""))


class _Stream(_Run):
    """A request whose answers come event by event."""

    async def run(self, body: bytes) -> None:
        go = _Go(self, self.parts, opening=True)
        try:
            await self.ask(body, go.send)
        except UpstreamBroken:
            if not self.layer.resume_lost or not go.streaming:
                raise
        if not go.streaming:
            return
        await together([self._carry_on(part) for part in self.parts if not part.done], name="carry on")
        await self.send({"type": "http.response.body", "body": LAST_EVENT, "more_body": False})

    async def _carry_on(self, part: Part) -> None:
        lost = 0  # in a row, without a token: what ends every worker it meets must not meet them all
        while not part.done:
            part.next_go()
            try:
                if not await self.may_go_on():
                    break
                go = _Go(self, [part], opening=False)
                try:
                    await self.ask(await self.continuation(part), go.send)
                except Enough:
                    pass
                except UpstreamBroken:
                    lost = 0 if part.current is not None and part.current["output_ids"] else lost + 1
                    if not self.layer.resume_lost or lost >= self.router.config.max_retries:
                        raise
            except ClientDisconnected:
                raise
            except RouterError as error:
                self.give_up(part, error)
                break
            self.layer.resumed += 1
        else:
            return
        if part.answer is None or part.answer["meta_info"].get("finish_reason") is None:
            raise UpstreamBroken("the worker was lost and the generation not carried on")  # it must not look complete
        await self.emit(part, part.answer)

    async def emit(self, part: Part, answer: Mapping[str, Any]) -> None:
        """Give one event to the client."""
        shown = {**answer, "index": part.index} if part.streamed_index else answer
        await self.send({"type": "http.response.body", "body": event(shown), "more_body": True})


class _Go:
    """One stream of a worker's, on its way to the client."""

    def __init__(self, run: _Stream, parts: list[Part], *, opening: bool) -> None:
        self.run = run
        self.parts = parts
        self.opening = opening
        self.streaming = False
        self._events = EventReader()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = first(message["headers"], b"content-type") or b""
            self.streaming = message["status"] == OK and kind.startswith(b"text/event-stream")
            if not self.opening:
                if not self.streaming:
                    raise CannotResume(f"the worker answered {message['status']}")
                return
            await self.run.send(message)
        elif not self.streaming:
            await self.run.send(message)
        else:
            for each in self._events.feed(message.get("body", b"")):
                await self._event(each)

    async def _event(self, raw: bytes) -> None:
        answer = payload(raw)
        if answer is None:
            if raw != LAST_EVENT:
                await self._foreign(raw)
            return
        part = self.parts[answer.get("index", 0)] if self.opening else self.parts[0]
        part.absorb(answer)
        assert part.current is not None
        if self.run.was_cut(part.current):
            return
        finished = answer["meta_info"].get("finish_reason") is not None
        part.done = finished
        if part.answer is None:
            await self.run.send({"type": "http.response.body", "body": raw, "more_body": True})
        else:
            await self._carried_on(part, answer, finished=finished)

    async def _foreign(self, raw: bytes) -> None:
        """An event that is no answer, an error say: the client's, unless it answers a request of ours."""
        if not self.opening:
            raise CannotResume("the worker refused to carry it on")
        for part in self.parts:
            part.done = True
        await self.run.send({"type": "http.response.body", "body": raw, "more_body": True})

    async def _carried_on(self, part: Part, answer: Mapping[str, Any], *, finished: bool) -> None:
        assert part.answer is not None
        joined = part.so_far()
        assert joined is not None
        mended = joined
        if finished or straddling(joined["text"], len(part.answer["text"]), part.stops):
            mended = await self.run.mend(part, joined, len(part.answer["text"]))
        stopped = mended is not joined and mended["meta_info"]["finish_reason"] is not None
        if part.incremental and not stopped and not finished:
            counts = {"completion_tokens": mended["meta_info"]["completion_tokens"]}
            meta = {**answer["meta_info"], **counts, "id": part.answer["meta_info"].get("id")}
            mended = {**answer, "meta_info": meta}
        elif part.incremental:
            mended = _delta(part, mended)
        await self.run.emit(part, mended)
        if stopped and not finished:
            part.done = True
            raise Enough


def _delta(part: Part, joined: Mapping[str, Any]) -> dict[str, Any]:
    """The last event of an incremental stream: what is new in it, and the account of the whole."""
    assert part.answer is not None
    return {**joined, "text": joined["text"][len(part.answer["text"]) :], "output_ids": []}


def _answers(data: bytes) -> list[dict[str, Any]] | None:
    """The answers in a reply, or None if it holds something else."""
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    answers = parsed if isinstance(parsed, list) else [parsed]
    return answers if all(isinstance(each, dict) and "output_ids" in each for each in answers) else None
