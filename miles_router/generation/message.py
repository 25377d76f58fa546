"""A reader that parses the message from the complete text of a choice that was sampled in several attempts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_of
from miles_router.engines.openai.chat_parts import looks_for_calls, separates_reasoning
from miles_router.engines.openai.text_reader import ReadMessage, TextReader
from miles_router.engines.openai.unfinished import with_unfinished
from miles_router.engines.parsers import ParsedCall, Parsers, reasoning_marks
from miles_router.engines.parsers.growing import GrowingText
from miles_router.errors import RouterError
from miles_router.generation.generation import CannotResume
from miles_router.generation.questions import EngineQuestions

logger = logging.getLogger(__name__)


class MessageReader:
    """A parser of the answer texts of one request. A text is always parsed as a whole, never in parts."""

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
        """Return the message.

        Args:
            answer: the complete answer, in the form of `/generate`.
            began: the message that the engine parsed from the first part.
            facts: of that engine.
            stream: include a tool call that is incomplete at the end of the answer.

        Raises:
            CannotResume: neither the engine nor the router can parse the text.
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
            return self._read_locally(answer["text"], began, facts)
        try:
            return await self._read_by_engine(answer["text"], began, facts, questions)
        except (CannotResume, RouterError) as error:
            if self._parsers.mode != "hybrid":
                raise
            logger.warning("parsed_locally", extra={"fields": {"reason": str(error)}})
            return self._read_locally(answer["text"], began, facts)

    async def _read_by_engine(
        self, text: str, began: Mapping[str, Any], facts: Facts, questions: EngineQuestions
    ) -> ReadMessage:
        reasoning = ""
        if separates_reasoning(self._fields, facts):
            reasoning, text = await _split_reasoning(text, began, facts.reasoning_parser or "", questions)
        if not looks_for_calls(self._fields, facts):
            return ReadMessage(self._reader(facts).message(began, reasoning, text, ()), text)
        content, found = await questions.parse_calls(text, self._tools, facts.tool_call_parser or "")
        calls = [ParsedCall(call["name"], call["parameters"]) for call in found]
        return ReadMessage(self._reader(facts).message(began, reasoning, content, calls), text)

    def _read_locally(self, text: str, began: Mapping[str, Any], facts: Facts) -> ReadMessage:
        opened = _prompt_opened_reasoning(text, began, facts.reasoning_parser or "")
        try:
            return self._reader(facts).read(text, began, opened=opened)
        except UnreadableAnswer as error:
            raise CannotResume(str(error)) from error

    def _reader(self, facts: Facts) -> TextReader:
        return TextReader(self._fields, self._parsers, facts)

    def growing(self, began: Mapping[str, Any], facts: Facts) -> GrowingText | None:
        """Return a parser for the text of a stream; None if the text cannot be parsed in a stream."""
        within = bool(began.get("reasoning_content"))
        if separates_reasoning(self._fields, facts) and not within and not began.get("content"):
            return None  # unknown yet whether it begins with reasoning
        return self._reader(facts).growing(opened=within)


def _prompt_opened_reasoning(text: str, began: Mapping[str, Any], parser: str) -> bool:
    """Return whether the prompt had opened the reasoning, judged by the first part's message or by the end of the
    reasoning."""
    begin, end = reasoning_marks(parser)
    return bool(began.get("reasoning_content")) or (not began.get("content") and end in text and begin not in text)


async def _split_reasoning(
    text: str, began: Mapping[str, Any], parser: str, questions: EngineQuestions
) -> tuple[str, str]:
    """Return the reasoning in a text, and the rest. The engine's parser cannot know here whether the prompt had opened
    the reasoning. The first part's message shows it."""
    begin, end = reasoning_marks(parser)
    separated = await questions.separate_reasoning(text, parser)
    if (began.get("reasoning_content") and not separated[0]) or (end in separated[1] and begin not in text):
        return await questions.separate_reasoning(begin + text, parser)
    return separated
