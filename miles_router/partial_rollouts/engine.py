"""What is asked of workers beside the generation itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from miles_router.asgi.exchange import Exchange
from miles_router.asgi.headers import RawHeaders
from miles_router.errors import RouterError
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts.joining import EXPERTS

logger = logging.getLogger(__name__)

OK = 200
MAX_ANSWER = 1 << 30
MAX_ID = 1 << 31
GAP = 4096  # no tokenizer has this many tokens in a row that spell nothing
PATIENCE = 60.0  # seconds for a question that is answered at once
ATTEMPTS = 10  # at a generation of ours, which a pause may cut like any other
CERTAIN = 10_000.0  # a `logit_bias` that leaves no other token a chance


class CannotResume(RouterError):
    """A generation that cannot be carried on exactly; it is returned as it is."""


@dataclass
class Known:
    """What has been learned of the workers."""

    incremental: bool | None = None
    defaults: Mapping[str, Any] | None = None
    ends: set[int] = field(default_factory=set)  # tokens that the model ends with,
    others: set[int] = field(default_factory=set)  # and such as it does not
    size: int = 0  # ids before this one are the tokenizer's,
    padding: int = MAX_ID  # and from this one on they are not


class Engine:
    """Asks any routable worker, on behalf of one generation and with its client's key."""

    def __init__(self, router: Router, known: Known, exchange: Exchange, headers: RawHeaders) -> None:
        self.exchange = exchange
        self._router = router
        self._known = known
        self._headers = [(b"content-type", b"application/json")]
        self._headers += [pair for pair in headers if pair[0] == b"authorization"]

    async def tokenize(self, text: str) -> list[int]:
        """A prompt's tokens, special ones added, as `/generate` gets them.

        Raises:
            CannotResume: the worker refuses. So with all of these.
        """
        return await self._list("/v1/tokenize", {"prompt": text}, "tokens")

    async def detokenize(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each, as `/generate` shows it. Ids behind the tokenizer's last, which a model with a padded
        vocabulary samples, it shows as id 0 (SGLang 0.5.23, `DetokenizerManager._clamp_decode_ids`);
        `/v1/detokenize` shows nothing of them."""
        await self._learn_size({token for each in ids for token in each})
        shown = [[token if token < self._known.size else 0 for token in each] for each in ids]
        return await self._texts(shown, skip_special_tokens=skip_special_tokens)

    async def spell(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each as the engine looks for stop strings in it: with special tokens."""
        return await self._texts(ids, skip_special_tokens=False)

    async def _learn_size(self, ids: Iterable[int]) -> None:
        """Know which of these are the tokenizer's: those that spell something, and those before them."""
        while unknown := sorted(token for token in ids if self._known.size <= token < self._known.padding):
            last = await self._last_spelled(unknown)
            if last is None:
                last = await self._last_spelled(range(unknown[0] + 1, unknown[0] + GAP))
            if last is None:
                self._known.padding = unknown[0]
            else:
                self._known.size = last + 1

    async def _last_spelled(self, ids: Sequence[int]) -> int | None:
        texts = await self._texts([[token] for token in ids], skip_special_tokens=False)
        return max((token for token, text in zip(ids, texts, strict=True) if text), default=None)

    async def _texts(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        body = {"tokens": list(ids), "skip_special_tokens": skip_special_tokens}
        texts = await self._list("/v1/detokenize", body, "text")
        if len(texts) != len(ids):
            raise CannotResume("/v1/detokenize answered for another number of sequences")
        return texts

    async def _list(self, path: str, body: Mapping[str, Any], field: str) -> list[Any]:
        found = (await self._ask(path, body)).get(field)
        if not isinstance(found, list):
            raise CannotResume(f"{path} answered without {field}")
        return found

    async def experts(self, ids: Sequence[int], start: int) -> str:
        """The routed experts of a sequence from token `start` on: base64, as the worker spells them; empty if it has
        none to give."""
        sampling = {"max_new_tokens": 0, "ignore_eos": True}
        request = {"input_ids": list(ids), "sampling_params": sampling, "return_routed_experts": True}
        answer = await self._generate({**request, "routed_experts_start_len": start})
        if answer["meta_info"].get("prompt_tokens") != len(ids) or answer["output_ids"]:
            raise CannotResume("the worker gave the experts of other tokens than were asked for")
        return str(answer["meta_info"].get(EXPERTS) or "")

    @property
    def end_tokens(self) -> Collection[int]:
        """Those that are known."""
        return self._known.ends

    async def is_end(self, token: int) -> bool:
        """Whether the model ends with this token. No worker names its end tokens, so one is made to sample this one,
        once and for all."""
        ends, others = self._known.ends, self._known.others
        if token not in ends and token not in others:
            sampling = {"max_new_tokens": 1, "ignore_eos": False, "logit_bias": {str(token): CERTAIN}}
            try:
                answer = await self._generate({"input_ids": [token], "sampling_params": sampling})
            except CannotResume as error:
                logger.warning("end_token_unknown", extra={"fields": {"token": token, "reason": str(error)}})
                return False
            if answer["output_ids"] == [token]:
                finish = answer["meta_info"].get("finish_reason") or {}
                (ends if finish.get("type") == "stop" else others).add(token)
        return token in ends

    async def incremental(self) -> bool:
        """Whether workers stream only what is new (`--incremental-streaming-output`); by SGLang's default they do
        not, and one that does not say is taken for one that does not."""
        if self._known.incremental is None:
            try:
                self._known.incremental = bool((await self._ask("/server_info")).get("incremental_streaming_output"))
            except CannotResume as error:
                logger.warning("incremental_streaming_unknown", extra={"fields": {"reason": str(error)}})
                return False
        return self._known.incremental

    async def defaults(self) -> Mapping[str, Any]:
        """The sampling parameters that workers assume where a request names none (`--preferred-sampling-params`)."""
        if self._known.defaults is None:
            try:
                self._known.defaults = (await self._ask("/model_info")).get("preferred_sampling_params") or {}
            except CannotResume:
                return {}
        return self._known.defaults

    async def _generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            await self._router.gate.wait(self.exchange.flight)
            answer = _object("/generate", *await self._send("/generate", request))
            meta = answer.get("meta_info")
            if not isinstance(meta, dict) or not isinstance(answer.get("output_ids"), list):
                break
            if (meta.get("finish_reason") or {}).get("type") != "abort":
                return answer
            if self.exchange.flight.aborted:
                raise CannotResume("it was aborted")
        raise CannotResume("no worker answers what has to be known for it")

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return _object(path, *await asyncio.wait_for(self._send(path, body), PATIENCE))
        except asyncio.TimeoutError:
            raise CannotResume(f"{path} was not answered") from None

    async def _send(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        method, data = ("GET", b"") if body is None else ("POST", orjson.dumps(body))
        sent = self._router.forward(method, path, headers=self._headers, body=data, flight=self.exchange.flight)
        async with sent as forwarded:
            return forwarded.reply.status, await forwarded.reply.read_all(MAX_ANSWER)


def _object(path: str, status: int, data: bytes) -> dict[str, Any]:
    """What an answer says.

    Raises:
        CannotResume: it says no, or nothing that can be understood.
    """
    if status != OK:
        raise CannotResume(f"{path} answered {status}")
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise CannotResume(f"{path} answered something that is no JSON object")
    return answer
