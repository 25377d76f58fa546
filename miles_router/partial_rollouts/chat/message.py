"""The message in the whole text of a choice that was sampled in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from miles_router.engines.facts import Facts
from miles_router.engines.openai.legs import call_id, looks_for_calls, separates_reasoning, tools_of
from miles_router.engines.openai.unfinished import with_unfinished
from miles_router.engines.parsers import UNREAD, Parsers, ReadCall, reasoning_marks
from miles_router.engines.parsers.growing import GrowingText
from miles_router.engines.parsers.local import tools_by_name
from miles_router.engines.parsers.reading import CallFormat, tool_calls
from miles_router.engines.parsers.thinking import ReasoningFormat
from miles_router.errors import RouterError
from miles_router.partial_rollouts.generation import CannotResume
from miles_router.partial_rollouts.questions import EngineQuestions

logger = logging.getLogger(__name__)


class ReadMessage(NamedTuple):
    """A message, and the text that its content and its calls stand in."""

    message: dict[str, Any]
    text: str


class MessageReader:
    """Reads texts of the answers to one request. They are read whole, never in halves."""

    def __init__(self, parsers: Parsers, fields: Mapping[str, Any]) -> None:
        self._parsers = parsers
        self._fields = fields
        self._tools = tools_of(fields)
        self._by_name = tools_by_name(self._tools)

    async def read(
        self,
        answer: Mapping[str, Any],
        began: Mapping[str, Any],
        facts: Facts,
        questions: EngineQuestions,
        *,
        stream: bool = False,
    ) -> ReadMessage:
        """The message.

        Args:
            answer: the whole of it, in the form of `/generate`.
            began: the message that the engine made of its first part.
            facts: of that engine.
            stream: a call that the answer ends within is part of it, as far as it goes.

        Raises:
            CannotResume: nothing there can read it.
        """
        read = await self._read(answer, began, facts, questions)
        if not stream or answer["meta_info"]["finish_reason"]["type"] == "stop":
            return read
        message = with_unfinished(read.message, answer["text"], self._fields, self._parsers, facts)
        return read._replace(message=message)

    async def _read(
        self, answer: Mapping[str, Any], began: Mapping[str, Any], facts: Facts, questions: EngineQuestions
    ) -> ReadMessage:
        if self._parsers.mode == "local":
            return self._locally(answer["text"], began, facts)
        try:
            return await self._by_engine(answer["text"], began, facts, questions)
        except (CannotResume, RouterError) as error:
            if self._parsers.mode != "hybrid":
                raise
            logger.warning("parsed_locally", extra={"fields": {"reason": str(error)}})
            return self._locally(answer["text"], began, facts)

    async def _by_engine(
        self, text: str, began: Mapping[str, Any], facts: Facts, questions: EngineQuestions
    ) -> ReadMessage:
        reasoning = ""
        if separates_reasoning(self._fields, facts):
            reasoning, text = await _separated(text, began, facts.reasoning_parser or "", questions)
        if not looks_for_calls(self._fields, facts):
            return ReadMessage(self._message(began, reasoning, text, (), facts), text)
        content, found = await questions.parse_calls(text, self._tools, facts.tool_call_parser or "")
        calls = [ReadCall(call["name"], call["parameters"]) for call in found]
        return ReadMessage(self._message(began, reasoning, content, calls, facts), text)

    def _locally(self, text: str, began: Mapping[str, Any], facts: Facts) -> ReadMessage:
        (thinking, format_), reasoning = self._formats(facts), ""
        try:
            if thinking is not None:
                split = thinking.whole(text, thinking=_opened(text, began, facts.reasoning_parser or ""))
                reasoning, text = split.reasoning, split.rest or ""
            content, calls = (text, []) if format_ is None else format_.read(text, self._by_name)
        except UNREAD as error:
            raise CannotResume(f"no local parser can read it: {error}") from error
        return ReadMessage(self._message(began, reasoning, content, calls, facts), text)

    def _formats(self, facts: Facts) -> tuple[ReasoningFormat | None, CallFormat | None]:
        """How reasoning and calls are read here, if the engine takes them out of the text.

        Raises:
            CannotResume: nothing here knows how.
        """
        thinking = self._parsers.thinking(facts) if separates_reasoning(self._fields, facts) else None
        calls = self._parsers.calls(facts) if looks_for_calls(self._fields, facts) else None
        if thinking is None and separates_reasoning(self._fields, facts):
            raise CannotResume(f"no local parser for {facts.reasoning_parser}")
        if calls is None and looks_for_calls(self._fields, facts):
            raise CannotResume(f"no local parser for {facts.tool_call_parser}")
        return thinking, calls

    def growing(self, began: Mapping[str, Any], facts: Facts) -> GrowingText | None:
        """Reads the text as it comes on; None where nothing here can."""
        try:
            thinking, calls = self._formats(facts)
        except CannotResume:
            return None
        within = bool(began.get("reasoning_content"))
        if thinking is not None and not within and not began.get("content"):
            return None  # how it began does not show yet
        names: dict[int, str] = {}
        return GrowingText(
            thinking,
            within,
            calls,
            self._by_name,
            lambda name, place: names.setdefault(place, call_id(name, place, self._fields, facts)),
        )

    def _message(
        self, began: Mapping[str, Any], reasoning: str, content: str, calls: Sequence[ReadCall], facts: Facts
    ) -> dict[str, Any]:
        message = {**began, "content": content, "reasoning_content": reasoning or None}
        message.pop("tool_calls", None)
        return {**message, "tool_calls": tool_calls(calls, self._names(facts))} if calls else message

    def _names(self, facts: Facts) -> Callable[[str, int], str]:
        return partial(call_id, fields=self._fields, facts=facts)


def _opened(text: str, began: Mapping[str, Any], parser: str) -> bool:
    """Whether the prompt had begun the reasoning of a text; how the message began tells, or how the reasoning ends."""
    begin, end = reasoning_marks(parser)
    return bool(began.get("reasoning_content")) or (not began.get("content") and end in text and begin not in text)


async def _separated(text: str, began: Mapping[str, Any], parser: str, questions: EngineQuestions) -> tuple[str, str]:
    """The reasoning in a text, and the rest. The engine's parser does not know here whether the prompt had opened the
    reasoning; how the message began tells."""
    begin, end = reasoning_marks(parser)
    separated = await questions.separate_reasoning(text, parser)
    if (began.get("reasoning_content") and not separated[0]) or (end in separated[1] and begin not in text):
        return await questions.separate_reasoning(begin + text, parser)
    return separated
