"""The message in the whole text of a choice that was sampled in parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_parts import looks_for_calls, separates_reasoning, tools_of
from miles_router.engines.openai.text_reader import ReadMessage, TextReader
from miles_router.engines.openai.unfinished import with_unfinished
from miles_router.engines.parsers import ParsedCall, Parsers, reasoning_marks
from miles_router.engines.parsers.growing import GrowingText
from miles_router.errors import RouterError
from miles_router.generation.generation import CannotResume
from miles_router.generation.questions import EngineQuestions

logger = logging.getLogger(__name__)


class MessageReader:
    """Reads texts of the answers to one request. They are read whole, never in halves."""

    def __init__(self, parsers: Parsers, fields: Mapping[str, Any]) -> None:
        self._parsers = parsers
        self._fields = fields
        self._tools = tools_of(fields)

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
            return ReadMessage(self._reader(facts).message(began, reasoning, text, ()), text)
        content, found = await questions.parse_calls(text, self._tools, facts.tool_call_parser or "")
        calls = [ParsedCall(call["name"], call["parameters"]) for call in found]
        return ReadMessage(self._reader(facts).message(began, reasoning, content, calls), text)

    def _locally(self, text: str, began: Mapping[str, Any], facts: Facts) -> ReadMessage:
        opened = _opened(text, began, facts.reasoning_parser or "")
        try:
            return self._reader(facts).read(text, began, opened=opened)
        except UnreadableAnswer as error:
            raise CannotResume(str(error)) from error

    def _reader(self, facts: Facts) -> TextReader:
        return TextReader(self._fields, self._parsers, facts)

    def growing(self, began: Mapping[str, Any], facts: Facts) -> GrowingText | None:
        """Reads the text as it comes on; None where nothing here can."""
        within = bool(began.get("reasoning_content"))
        if separates_reasoning(self._fields, facts) and not within and not began.get("content"):
            return None  # how it began does not show yet
        return self._reader(facts).growing(opened=within)


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
