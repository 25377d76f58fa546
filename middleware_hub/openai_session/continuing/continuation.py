"""From a held turn and the messages behind it to the ids that the engine is given.

    held      ... sampled ids, the last of them a stop token or not
    tail      what the template writes behind such an answer: its end, what is appended, the prompt for the next
    given     the tail without what the sampled ids say already

A stop token that the tail begins with is in the sampled ids: what is left is given (a line break behind `<|im_end|>`).
It may be the answer's end or, with GLM's `<|user|>` and `<|observation|>`, the beginning of the next message. A stop
token that the template does not write there (gpt-oss' `<|return|>`, GLM's `<|user|>` in front of a tool's result) is
dropped, and the tail given. Behind an answer that was cut (length, abort, stop string) the whole tail is given.

Nothing that the engine sampled is rendered or encoded, so it cannot drift. That tails are the same whatever came before
is proved at the start, and for shapes and settings not seen before when they first come (proof.py).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.openai_session.continuing.endings import AnswerShape, Ending, NotAppendOnly, behind, shared
from middleware_hub.openai_session.continuing.families import for_family
from middleware_hub.openai_session.continuing.probes import shape_of
from middleware_hub.openai_session.continuing.proof import AT_THE_START, Proof, prove
from middleware_hub.openai_session.continuing.proof_file import ProofFile
from middleware_hub.openai_session.continuing.roles import Roles
from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer, from_tokenizer
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.prompting import Context
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from middleware_hub.tokenizing.encoding import InexactTokenizer
from miles_router.trajectory.pieces import Tokens

__all__ = ["Continuation", "Extension", "HeldEnd", "NotAppendOnly", "build"]

logger = logging.getLogger(__name__)

#: Endings kept, by shape of the answer, tools and template settings.
MAX_ENDINGS = 64
#: Bytes of tools and settings whose endings are kept.
MAX_KEPT_CONTEXT = 1 << 18
#: Messages that are written behind an answer: a template takes some 20 microseconds for each.
MAX_APPENDED = 4096


class HeldEnd(NamedTuple):
    """How a held turn ends: its last sampled token, whether that is a stop token, and the shape of its answer."""

    last_id: int | None
    ended: bool
    tool_calls: tuple[tuple[str | None, str | None], ...] = ()
    reasoning: bool = False

    @classmethod
    def of(cls, turn: Turn) -> HeldEnd:
        """The end of a turn of a chat."""
        calls = turn.answer.get("tool_calls") or ()
        return cls(
            last_id=turn.last_id,
            ended=turn.ended_itself,
            tool_calls=tuple((call.get("id"), call["function"]["name"]) for call in calls),
            reasoning=bool(turn.answer.get("reasoning_content")),
        )


class Extension(NamedTuple):
    """How many sampled tokens the engine is not given again (0 or 1), and the ids that are given behind the rest."""

    drop: int
    ids: Tokens


class Continuation:
    """The ids behind held turns, for one model."""

    def __init__(
        self, renderer: Renderer, proof: Proof, encoder: AsyncEncoder, beginning: Renderer | None = None
    ) -> None:
        self.proof = proof
        self._beginning = beginning or renderer
        #: Of the template that the engine renders with.
        self.roles = Roles(self._beginning)
        self.is_special = renderer.is_special
        self.renderer = renderer
        self._encoder = encoder
        self._endings = proof.endings
        self._kept_ending = functools.lru_cache(maxsize=MAX_ENDINGS)(self._endings.measure)

    def readable(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
        """Return the messages of a beginning as the engine takes them, and where arguments of calls were wrapped."""
        return self._beginning.readable(messages)

    def same_id(self, held: object, sent: object) -> bool:
        """Return whether the template cannot tell two ids of a call apart."""
        return self.renderer.same_id(held, sent) and self._beginning.same_id(held, sent)

    @property
    def writes_ids(self) -> bool:
        """Whether the template writes the ids of calls."""
        return self.renderer.writes_ids or self._beginning.writes_ids

    async def beginning(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any],
        *,
        goes_on: bool = False,
    ) -> Tokens:
        """The ids that the engine makes of a conversation that continues nothing; `goes_on`: the answer goes on from
        the last message.

        Raises:
            CannotRender: it refuses these messages.
            TextTooLong: they are too long.
        """
        renderer = self._beginning
        messages, _ = renderer.readable(messages)
        before = messages[:-1] if goes_on else renderer.as_taken(messages)
        text = renderer.render(before, tools, generation_prompt=True, template_kwargs=template_kwargs)
        ids = await self._encoder.encode_rendered(text)
        if not goes_on:
            return ids
        begun = await self._encoder.encode_rendered(str(messages[-1].get("content") or ""))
        return np.concatenate([ids, begun])

    async def text_tokens(self, text: str) -> int:
        """How many ids the engine makes of a text.

        Raises:
            TextTooLong: it is too long.
        """
        return len((await self._encoder.encode_whole(text)).ids)

    async def after(
        self,
        turn: HeldEnd,
        appended: Sequence[Message],
        context: Context,
    ) -> Extension:
        """What follows a held turn, up to and with the prompt for the next answer.

        Raises:
            NotAppendOnly: it cannot be given exactly.
            TextTooLong: it is too long.
        """
        if len(appended) > MAX_APPENDED:
            raise NotAppendOnly(f"more than {MAX_APPENDED} messages are appended")
        answer = AnswerShape(turn.tool_calls, turn.reasoning)
        try:
            appended = self.renderer.as_taken(appended)
            self.proof.require(shape_of(answer, appended, context.tools), context.template_kwargs)
            tail = self._endings.tail(answer, appended, context)
            given = self._given(turn, answer, tail, context)
            ids = await self._encoder.encode_behind(given.text, given.token)
            return Extension(given.drop, ids)
        except (CannotRender, InexactTokenizer) as error:
            raise NotAppendOnly(str(error)) from None

    def _ending(self, answer: AnswerShape, context: Context) -> Ending:
        large = len(context.key) > MAX_KEPT_CONTEXT
        return self._endings.measure(answer, context) if large else self._kept_ending(answer, context)

    def _given(self, turn: HeldEnd, answer: AnswerShape, tail: str, context: Context) -> Given:
        alike = AnswerShape(
            tuple((f"call_{place}", "function") for place in range(len(answer.calls))), answer.reasoning
        )
        try:
            return given_behind(tail, self._ending(alike, context), turn, self.renderer)
        except NotAppendOnly:
            if not answer.calls:
                raise
        # What the template writes behind a call's arguments may repeat its id or name.
        return given_behind(tail, self._endings.measure(answer, context), turn, self.renderer)


class Given(NamedTuple):
    """How many sampled ids to drop, the text to give, and the token it stands behind, if that is known."""

    drop: int
    text: str
    token: int | None


def given_behind(tail: str, ending: Ending, turn: HeldEnd, renderer: Renderer) -> Given:
    """What of a tail is to be given behind what was sampled.

    Raises:
        NotAppendOnly: the answer's end would have to be written, and cannot be told from that of a tool call.
    """
    text = behind(tail, ending)
    last = turn.last_id if turn.ended else None
    stop = renderer.spelling(last) if last is not None else ""
    if text is None:
        end = len(shared(tail, ending)) + len(stop)  # a stop token may begin the next message, too
        place = tail.rfind(stop, 0, end) if renderer.is_added(last) else -1
        if place < 0:
            raise NotAppendOnly("an answer with tool calls does not end with a token that the template ends it with")
        return Given(0, tail[place + len(stop) :], last)
    if last is None:
        return Given(0, text, None)
    if stop and renderer.begins_with(text.lstrip(), last):
        return Given(0, text.lstrip()[len(stop) :], last)
    if stop and ending.rest and ending.rest.endswith(stop):  # the token that ends the calls
        return Given(0, text, last)
    return Given(1, text, None)


def build(tokenizer: Any, tito_model: str | None, encoder: AsyncEncoder | None = None) -> Continuation:
    """The continuation of a model, proved. Without an encoder it has one of its own.

    Raises:
        ConfigError: there is no chat template or no such family, or not even a user's message can be appended.
    """
    renderer = for_family(tokenizer, tito_model) if tito_model else from_tokenizer(tokenizer)
    file = ProofFile(renderer.subject)
    known = file.read(len(AT_THE_START))
    proof = prove(renderer, known)
    if known is None:
        file.write(list(proof.refusals.values()))
    logger.info("continuation_proved", extra={"fields": {**proof.describe(), "before": known is not None}})
    beginning = from_tokenizer(tokenizer) if tito_model and tokenizer.chat_template else renderer
    return Continuation(renderer, proof, encoder or AsyncEncoder(tokenizer, longest=sys.maxsize), beginning)
