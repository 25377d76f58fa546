"""Auxiliary requests to engines for resumed generations: tokens, texts, expert rows, end tokens, defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from miles_router import tasks
from miles_router.asgi.exchange import Exchange
from miles_router.asgi.replies import OK
from miles_router.asgi.wire import RawHeaders
from miles_router.engines.answers import ABORT, GenerateAnswer, UnreadableAnswer
from miles_router.engines.engine import Engine
from miles_router.engines.facts import Facts
from miles_router.engines.known import USUAL
from miles_router.engines.models import ADAPTER
from miles_router.engines.paths import GENERATE
from miles_router.engines.questions import Answer, EngineQuestion
from miles_router.engines.rows import RowFields, rows_from_start
from miles_router.errors import ConfigError, UnsupportedByEngine
from miles_router.generation.generation import CannotResume

if TYPE_CHECKING:
    from miles_router.middlewares.router import Router

logger = logging.getLogger(__name__)

MAX_ANSWER = 1 << 30
MAX_ID = 1 << 31
GAP = 4096  # no tokenizer has this many consecutive ids without text
PATIENCE = 60.0  # timeout in seconds of requests that are answered without generating
ATTEMPTS = 10  # for the router's own generations, which a pause may abort too
CERTAIN = 10_000.0  # a `logit_bias` that forces a token


@dataclass
class EndTokens:
    """Token ids that end a generation of an engine's model, and ids known not to. No engine reports them."""

    ends: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)


@dataclass
class VocabularyBounds:
    """The known bounds of an engine's tokenizer: ids below `size` belong to it, ids from `padding` on do not."""

    size: int = 0
    padding: int = MAX_ID


class EngineQuestions:
    """A client for auxiliary requests about a generation, with the API key of its client.

    It asks the worker that sampled the generation, or another if that one takes no requests. Results are cached in the
    engine's facts.

    Args:
        exchange: of the generation, which may be aborted.
        headers: of the client's request.
    """

    def __init__(self, router: Router, exchange: Exchange, headers: RawHeaders) -> None:
        self.exchange = exchange
        self._router = router
        self._url: str | None = None  # of the worker to ask
        self._facts = Facts()  # of that worker
        self._headers = [(b"content-type", b"application/json")]
        self._headers += [pair for pair in headers if pair[0] == b"authorization"]

    def ask(self, url: str | None, facts: Facts) -> None:
        """Set the worker for the next requests, and its known facts."""
        self._url, self._facts = url, facts

    # Texts and tokens

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids of a `/generate` prompt, with special tokens added.

        Raises:
            CannotResume: the engine refuses or its answer is invalid. The same holds for the other methods.
        """
        question = await self._prepare(lambda engine: engine.ask_prompt_tokens(text))
        return (
            list(self._checkpoint_tokenizer()(text)["input_ids"]) if question is None else await self._answer(question)
        )

    async def render(self, chat: Mapping[str, Any]) -> list[int]:
        """Return the prompt ids that the engine's chat template renders."""
        return await self._require(await self._prepare(lambda engine: engine.ask_chat_tokens(chat)), "render a chat")

    async def detokenize(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of ids, as `/generate` returns it.

        A model with a padded vocabulary can sample ids beyond the tokenizer's last. SGLang shows them as id 0 (0.5.23,
        `DetokenizerManager._clamp_decode_ids`), but `/v1/detokenize` omits them. The checkpoint's tokenizer, used for
        engines without detokenization, omits them too.
        """
        if await self._prepare(lambda engine: engine.ask_texts([], skip_special_tokens=True)) is None:
            return await self._texts(ids, skip_special_tokens=skip_special_tokens)
        bounds = await self._learn_bounds({token for each in ids for token in each})
        shown = [[token if token < bounds.size else 0 for token in each] for each in ids]
        return await self._texts(shown, skip_special_tokens=skip_special_tokens)

    async def spell(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of ids with special tokens: the text in which engines look for stop strings."""
        return await self._texts(ids, skip_special_tokens=False)

    # Parsers

    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Return the reasoning in a complete answer, and the rest."""
        question = await self._prepare(lambda engine: engine.ask_reasoning(text, parser))
        return await self._require(question, "separate reasoning")

    async def parse_calls(self, text: str, tools: Sequence[Any], parser: str) -> tuple[str, list[Any]]:
        """Return a complete answer without its tool calls, and the calls with `name` and `parameters`."""
        question = await self._prepare(lambda engine: engine.ask_calls(text, tools, parser))
        return await self._require(question, "read tool calls")

    async def _learn_bounds(self, ids: Iterable[int]) -> VocabularyBounds:
        """Return bounds that classify all these ids. Ids that have text, and all ids below them, belong to the
        tokenizer."""
        bounds = self._facts.learned(VocabularyBounds)
        while unknown := sorted(token for token in ids if bounds.size <= token < bounds.padding):
            last = await self._last_spelled(unknown)
            if last is None:
                last = await self._last_spelled(range(unknown[0] + 1, unknown[0] + GAP))
            bounds = self._facts.learned(VocabularyBounds)  # another engine may have answered
            if last is None:
                bounds.padding = unknown[0]
            else:
                bounds.size = last + 1
        return bounds

    async def _last_spelled(self, ids: Sequence[int]) -> int | None:
        texts = await self._texts([[token] for token in ids], skip_special_tokens=False)
        return max((token for token, text in zip(ids, texts, strict=True) if text), default=None)

    async def _texts(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        question = await self._prepare(lambda engine: engine.ask_texts(ids, skip_special_tokens=skip_special_tokens))
        if question is None:
            decode = self._checkpoint_tokenizer().decode
            return [decode(list(each), skip_special_tokens=skip_special_tokens) for each in ids]
        return await self._answer(question)

    async def _prepare(self, ask: Callable[[Engine], EngineQuestion[Answer] | None]) -> EngineQuestion[Answer] | None:
        """Create a request with `ask` for the current engine; None if the engine has no such path."""
        if self._facts.endpoints is None and self._url is not None:
            self._facts = await self._router.fleet.facts(self._url)
        question = ask(self._facts.engine or USUAL)
        return None if question is None or self._facts.answers(question.path) is False else question

    async def _answer(self, question: EngineQuestion[Answer]) -> Answer:
        answer = question.read(await self._post(question.path, question.body))
        if answer is None:
            raise CannotResume(f"the worker's answer to {question.path} does not fit the request")
        return answer

    async def _require(self, question: EngineQuestion[Answer] | None, what: str) -> Answer:
        if question is None:
            raise CannotResume(f"the worker cannot {what}")
        return await self._answer(question)

    def _checkpoint_tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer, for engines without tokenization.

        Raises:
            CannotResume: there is no checkpoint.
        """
        try:
            return self._router.tokenizer
        except ConfigError as error:
            raise CannotResume(f"the worker cannot tokenize, and the router has no tokenizer: {error}") from error

    # The model

    async def rows(self, fields: RowFields, ids: Sequence[int], start: int, adapter: object = None) -> str:
        """Return the rows of a sequence from token `start` on, in base64; empty if the engine has none.

        `adapter` is the LoRA adapter under which the sequence is computed.

        Raises:
            UnreadableAnswer: the rows do not fit the tokens.
        """
        sampling = {"max_new_tokens": 0, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": sampling, **fields.request(start)}
        answer = await self._generate(body if adapter is None else {**body, ADAPTER: adapter})
        rows = answer["meta_info"].get(fields.rows.name) or ""
        if answer["meta_info"].get("prompt_tokens") != len(ids) or answer["output_ids"] or not isinstance(rows, str):
            raise CannotResume("the worker returned the rows of other tokens than requested")
        return rows_from_start(fields, rows, len(ids) - 1, start)

    @property
    def end_tokens(self) -> Collection[int]:
        """The known end tokens."""
        return self._facts.learned(EndTokens).ends

    async def is_end(self, token: int) -> bool:
        """Return whether this token ends a generation. The engine is forced to sample it once, and the result is
        cached. If the engine does not support that, the checkpoint decides."""
        known = self._facts.learned(EndTokens)
        if token not in known.ends and token not in known.others:
            sampling = {"max_new_tokens": 1, "ignore_eos": False, "logit_bias": {str(token): CERTAIN}}
            try:
                answer = await self._generate({"input_ids": [token], "sampling_params": sampling})
            except UnsupportedByEngine:
                (known.ends if token in self._checkpoint_ends() else known.others).add(token)
                return token in known.ends
            except CannotResume as error:
                logger.warning("end_token_unknown", extra={"fields": {"token": token, "reason": str(error)}})
                return False
            if answer["output_ids"] == [token]:
                known = self._facts.learned(EndTokens)  # another engine may have answered
                stopped = answer["meta_info"]["finish_reason"]["type"] == "stop"
                (known.ends if stopped else known.others).add(token)
        return token in known.ends

    def _checkpoint_ends(self) -> set[int]:
        """Return the end tokens of the checkpoint.

        Raises:
            CannotResume: there is no checkpoint.
        """
        named = self._router.generation_config.get("eos_token_id")
        listed = named if isinstance(named, list) else [named]
        return {each for each in [*listed, self._checkpoint_tokenizer().eos_token_id] if isinstance(each, int)}

    async def _generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            answer = _object(GENERATE, *await self._send(GENERATE, request))
            try:
                read = GenerateAnswer.read({"text": "", **answer}, logprobs=False)
            except UnreadableAnswer as error:
                raise CannotResume(f"a worker's answer cannot be read: {error}") from error
            if read.finish != ABORT:
                return answer
            if self.exchange.routing.aborted:
                raise CannotResume("the generation was aborted")
        raise CannotResume(f"{ATTEMPTS} requests in a row about the generation were aborted")

    # What engines say of themselves

    async def incremental(self, facts: Facts) -> bool:
        """Return whether an engine streams only new tokens. If it does not report it, the first worker that does
        decides; without any, the answer is SGLang's default, False."""
        reported = await self._first_reported(lambda each: each.incremental_streaming, facts)
        if reported is None:
            logger.warning("incremental_streaming_unknown")
        return bool(reported)

    async def defaults(self, facts: Facts) -> Mapping[str, Any]:
        """Return the engine's default sampling parameters. If it reports none, the first worker that does decides."""
        return await self._first_reported(lambda each: each.preferred_sampling_params, facts) or {}

    async def _first_reported(self, of: Callable[[Facts], Answer | None], facts: Facts) -> Answer | None:
        if (own := of(facts)) is not None:
            return own
        others = map(of, await self._router.fleet.all_facts())
        return next((each for each in others if each is not None), None)

    # The wire

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return _object(path, *await tasks.within(PATIENCE, self._send(path, body), name=f"ask {path}"))
        except TimeoutError:
            raise CannotResume(f"the worker did not answer {path} within {PATIENCE:.0f} s") from None

    async def _send(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        async with self._router.forward(
            "POST",
            path,
            headers=self._headers,
            body=orjson.dumps(body),
            routing=self.exchange.routing,
            preferred=self._url,
        ) as forwarded:
            if forwarded.worker.url != self._url:
                self.ask(forwarded.worker.url, await self._router.fleet.facts(forwarded.worker.url))
            return forwarded.reply.status, await forwarded.reply.read_all(MAX_ANSWER)


def _object(path: str, status: int, data: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer.

    Raises:
        CannotResume: the answer is a refusal, or not a JSON object.
    """
    if status != OK:
        raise CannotResume(f"the worker answered {path} with status {status}")
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise CannotResume(f"the worker's answer to {path} is not a JSON object")
    return answer
