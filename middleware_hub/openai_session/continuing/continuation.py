"""Compute the ids of the prompt that continues a recorded turn with appended messages.

    held      ... sampled ids; the last one may be a stop token
    tail      the text that the template writes behind such an answer: its end, the appended messages, the next prompt
    given     the tail without the part that the sampled ids contain already

If the tail begins with the sampled stop token, only the rest is given (a line break behind `<|im_end|>`). That stop
token may end the answer or, with GLM's `<|user|>` and `<|observation|>`, begin the next message. A stop token that the
template does not write there (gpt-oss' `<|return|>`, GLM's `<|user|>` in front of a tool's result) is dropped, and the
whole tail is given. The whole tail is also given behind an answer that was cut (length, abort, stop string).

Sampled ids are never rendered or encoded again, so they cannot drift. proof.py proves that tails do not depend on the
history: for common shapes at the start, for other shapes and settings when they first occur.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from middleware_hub.openai_session.continuing.endings import (
    AnswerShape,
    Ending,
    NotAppendOnly,
    common_start,
    strip_call_end,
)
from middleware_hub.openai_session.continuing.families import for_family
from middleware_hub.openai_session.continuing.probes import CALLING, CONTENT, TOOLS, Shape, probe_of, shape_of
from middleware_hub.openai_session.continuing.proof import PROVED_AT_START, Proof, prove
from middleware_hub.openai_session.continuing.proof_file import ProofFile
from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer, from_tokenizer
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Context, Turn
from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from middleware_hub.tokenizing.encoding import InexactTokenizer
from miles_router.trajectory.pieces import Tokens

DEVELOPER = "developer"
#: The separator between an instruction and a user's text that are joined in one message.
JOINT = "\n\n"
#: Roles that SGLang accepts in upper or lower case (0.5.23, `ChatCompletionMessageGenericParam`).
ANY_CASE = frozenset(("system", "assistant", "tool", "function", DEVELOPER, "latest_reminder", "root"))
MAX_KEPT = 4096  # the longest roles and settings, in characters, whose results are cached


class Roles:
    """The roles that a model's template writes, found by rendering probe messages."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._cached_dropped = functools.lru_cache(maxsize=1024)(self._find_dropped)

    def with_known_roles(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[int]]:
        """Return chat messages with roles that the template knows, and for each its index in `messages`.

        A `developer` message becomes a `system` message where the template writes one; otherwise its text joins the
        user's. The result for a message depends only on the messages before it and on the next one, so later turns read
        it the same way.
        """
        if all(message["role"] in ("user", "assistant", "tool", "system") for message in messages):
            return messages, range(len(messages))
        found: list[Message] = []
        places: list[int] = []
        instructions: list[Any] = []  # contents of developer messages, for the user's message behind them
        for place, message in enumerate(messages):
            role = message["role"].lower() if message["role"].lower() in ANY_CASE else message["role"]
            behind = messages[place + 1]["role"].lower() if place + 1 < len(messages) else None
            if role == DEVELOPER and not self.takes_system(found, alone=behind in (None, "assistant")):
                instructions.append(message.get("content"))
                if behind in (DEVELOPER, "user"):
                    continue
                role, message = "user", {"role": "user", "content": None}
                if found and found[-1]["role"] == "user":
                    message = found.pop()
                    places.pop()
                    instructions.insert(0, message.get("content"))
            elif instructions:
                instructions.append(message.get("content"))
            if instructions:
                message, instructions = {**message, "content": _joined(instructions)}, []
            role = "system" if role == DEVELOPER else role
            found.append(message if role == message["role"] else {**message, "role": role})
            places.append(place)
        return found, places

    def first_dropped(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]
    ) -> int | None:
        """Return the index of the first message that the template does not write. None if it writes all messages, or
        refuses them with an error."""
        labels = tuple(map(_label, messages))
        if labels[-1:] == ("assistant",):
            labels = (*labels[:-1], "user")  # as SGLang renders it (`Renderer.as_engine_reads`)
        settings = orjson.dumps(template_kwargs, option=orjson.OPT_SORT_KEYS)
        small = sum(map(len, labels)) + len(settings) <= MAX_KEPT
        return (self._cached_dropped if small else self._find_dropped)(labels, bool(tools), settings)

    @functools.cached_property
    def system_first(self) -> bool:
        """Whether the template writes a system message in front of a user's."""
        return self.takes_system()

    def takes_system(self, before: Sequence[Message] = (), *, alone: bool = False) -> bool:
        """Return whether the template writes a system message behind `before`. With `alone`, no user's message follows
        it."""
        labels = (*map(_label, before), "system", *(() if alone else ("user",)))
        try:
            return self._first_missing(labels, tools=False, settings=b"{}") is None
        except CannotRender:
            return False

    def _find_dropped(self, labels: tuple[str, ...], tools: bool, settings: bytes) -> int | None:
        try:
            return self._first_missing(labels, tools=tools, settings=settings)
        except CannotRender:
            return None

    def _first_missing(self, labels: tuple[str, ...], *, tools: bool, settings: bytes) -> int | None:
        """Return the index of the first role whose message the template does not write, or None.

        Raises:
            CannotRender: the template refuses these roles.
        """
        _, probes = probe_of(Shape(labels))
        if not probes:
            return None
        text = self._renderer.render(
            probes, TOOLS if tools else None, generation_prompt=True, template_kwargs=orjson.loads(settings)
        )
        written = {*CONTENT.findall(text)}
        places = (place for place, label in enumerate(labels) if label != CALLING)
        return next((place for place in places if probes[place]["content"] not in written), None)


def _label(message: Message) -> str:
    return CALLING if message.get("tool_calls") else str(message["role"])


def _joined(contents: Sequence[Any]) -> Any:
    """Join contents: to a text, or to a list of parts if one of them is a list."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return JOINT.join(given)
    return [
        part
        for content in given
        for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
    ]


__all__ = ["Continuation", "Extension", "HeldEnd", "NotAppendOnly", "build"]

logger = logging.getLogger(__name__)

#: Endings in the cache, by shape of the answer, tools and template settings.
MAX_ENDINGS = 64
#: The largest tools and settings, in bytes, whose endings are cached.
MAX_KEPT_CONTEXT = 1 << 18
#: The most messages that are appended to an answer: a template takes some 20 microseconds for each.
MAX_APPENDED = 4096


class HeldEnd(NamedTuple):
    """The end of a recorded turn: its last sampled token, whether that is a stop token, and the shape of its answer."""

    last_id: int | None
    ended: bool
    tool_calls: tuple[tuple[str | None, str | None], ...] = ()
    reasoning: bool = False

    @classmethod
    def of(cls, turn: Turn) -> HeldEnd:
        """Return the end of a chat turn."""
        calls = turn.answer.get("tool_calls") or ()
        return cls(
            last_id=turn.last_id,
            ended=turn.ended_itself,
            tool_calls=tuple((call.get("id"), call["function"]["name"]) for call in calls),
            reasoning=bool(turn.answer.get("reasoning_content")),
        )


class Extension(NamedTuple):
    """The number of sampled tokens that the next prompt omits at the end (0 or 1), and the ids that follow."""

    drop: int
    ids: Tokens


class Continuation:
    """A computer of prompt ids for one model.

    Args:
        renderer: writes the messages that continue a turn.
        beginning: writes conversations that continue nothing, with the engine's own template; `renderer` by default.
    """

    def __init__(
        self, renderer: Renderer, proof: Proof, encoder: AsyncEncoder, beginning: Renderer | None = None
    ) -> None:
        self.proof = proof
        self._beginning = beginning or renderer
        #: The roles that the engine's own template writes.
        self.roles = Roles(self._beginning)
        self.is_special = renderer.is_special
        self.renderer = renderer
        self._encoder = encoder
        self._endings = proof.endings
        self._cached_ending = functools.lru_cache(maxsize=MAX_ENDINGS)(self._endings.measure)

    def readable(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
        """Return messages in a form that the engine's template accepts, and the places of arguments that were
        wrapped."""
        return self._beginning.readable(messages)

    def same_id(self, held: object, sent: object) -> bool:
        """Return whether the templates cannot distinguish two ids of a tool call."""
        return self.renderer.same_id(held, sent) and self._beginning.same_id(held, sent)

    @property
    def writes_ids(self) -> bool:
        """Whether a template writes the ids of tool calls."""
        return self.renderer.writes_ids or self._beginning.writes_ids

    async def beginning(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any],
        *,
        continues_final: bool = False,
    ) -> Tokens:
        """Return the ids that the engine makes of a conversation that continues no turn. With `continues_final`, the
        answer continues the text of the last message.

        Raises:
            CannotRender: the template refuses the messages.
            TextTooLong: the messages are too long.
        """
        renderer = self._beginning
        messages, _ = renderer.readable(messages)
        before = messages[:-1] if continues_final else renderer.as_engine_reads(messages)
        text = renderer.render(before, tools, generation_prompt=True, template_kwargs=template_kwargs)
        ids = await self._encoder.encode_rendered(text)
        if not continues_final:
            return ids
        begun = await self._encoder.encode_rendered(str(messages[-1].get("content") or ""))
        return np.concatenate([ids, begun])

    async def text_tokens(self, text: str) -> int:
        """Return how many ids the engine makes of a text.

        Raises:
            TextTooLong: the text is too long.
        """
        return len((await self._encoder.encode_whole(text)).ids)

    async def after(
        self,
        turn: HeldEnd,
        appended: Sequence[Message],
        context: Context,
    ) -> Extension:
        """Return the ids that follow a recorded turn, up to and including the prompt for the next answer.

        Raises:
            NotAppendOnly: the messages cannot be appended exactly.
            TextTooLong: the appended text is too long.
        """
        if len(appended) > MAX_APPENDED:
            raise NotAppendOnly(f"more than {MAX_APPENDED} messages are appended")
        answer = AnswerShape(turn.tool_calls, turn.reasoning)
        try:
            appended = self.renderer.as_engine_reads(appended)
            self.proof.require(shape_of(answer, appended, context.tools), context.template_kwargs)
            tail = self._endings.tail(answer, appended, context)
            given = self._given(turn, answer, tail, context)
            ids = await self._encoder.encode_behind(given.text, given.token)
            return Extension(given.drop, ids)
        except (CannotRender, InexactTokenizer) as error:
            raise NotAppendOnly(str(error)) from None

    def _ending(self, answer: AnswerShape, context: Context) -> Ending:
        large = len(context.key) > MAX_KEPT_CONTEXT
        return self._endings.measure(answer, context) if large else self._cached_ending(answer, context)

    def _given(self, turn: HeldEnd, answer: AnswerShape, tail: str, context: Context) -> Given:
        generic = AnswerShape(
            tuple((f"call_{place}", "function") for place in range(len(answer.calls))), answer.reasoning
        )
        try:
            return text_to_give(tail, self._ending(generic, context), turn, self.renderer)
        except NotAppendOnly:
            if not answer.calls:
                raise
        # The template may repeat the id or name of a call behind its arguments.
        return text_to_give(tail, self._endings.measure(answer, context), turn, self.renderer)


class Given(NamedTuple):
    """The number of sampled ids to drop, the text to append, and the token in front of that text, if known."""

    drop: int
    text: str
    token: int | None


def text_to_give(tail: str, ending: Ending, turn: HeldEnd, renderer: Renderer) -> Given:
    """Return the part of a tail that follows the sampled ids.

    Raises:
        NotAppendOnly: the answer's end has to be written, but cannot be separated from the end of a tool call.
    """
    text = strip_call_end(tail, ending)
    last = turn.last_id if turn.ended else None
    stop = renderer.spelling(last) if last is not None else ""
    if text is None:
        end = len(common_start(tail, ending)) + len(stop)  # a stop token may also begin the next message
        place = tail.rfind(stop, 0, end) if renderer.is_added(last) else -1
        if place < 0:
            raise NotAppendOnly("an answer with tool calls does not end with a token that the template ends it with")
        return Given(0, tail[place + len(stop) :], last)
    if last is None:
        return Given(0, text, None)
    if stop and renderer.begins_with(text.lstrip(), last):
        return Given(0, text.lstrip()[len(stop) :], last)
    if stop and ending.rest and ending.rest.endswith(stop):  # this stop token ends the calls
        return Given(0, text, last)
    return Given(1, text, None)


def build(tokenizer: Any, tito_model: str | None, encoder: AsyncEncoder | None = None) -> Continuation:
    """Return the proved continuation for a model. Without `encoder`, a private one is created.

    Raises:
        ConfigError: there is no chat template or no such family, or the template cannot append a user's or tool's
            message.
    """
    renderer = for_family(tokenizer, tito_model) if tito_model else from_tokenizer(tokenizer)
    file = ProofFile(renderer.subject)
    known = file.read(len(PROVED_AT_START))
    proof = prove(renderer, known)
    if known is None:
        file.write(list(proof.refusals.values()))
    logger.info("continuation_proved", extra={"fields": {**proof.describe(), "before": known is not None}})
    beginning = from_tokenizer(tokenizer) if tito_model and tokenizer.chat_template else renderer
    return Continuation(renderer, proof, encoder or AsyncEncoder(tokenizer, longest=sys.maxsize), beginning)
