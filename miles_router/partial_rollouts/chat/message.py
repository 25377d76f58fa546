"""The message in the whole text of a choice that was sampled in parts."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from miles_router.engines.chat_legs import separates_reasoning, tools_of
from miles_router.engines.facts import Facts
from miles_router.engines.parsers import Parsers, reasoning_marks
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

    async def read(
        self, answer: Mapping[str, Any], began: Mapping[str, Any], facts: Facts, questions: EngineQuestions
    ) -> ReadMessage:
        """The message.

        Args:
            answer: the whole of it, in the form of `/generate`.
            began: the message that the engine made of its first part.
            facts: of that engine.

        Raises:
            CannotResume: nothing there can read it.
        """
        text, reasoning, calls = answer["text"], "", list[Any]()
        if facts.reasoning_parser and separates_reasoning(self._fields):
            reasoning, text = await _reasoning(text, began, facts.reasoning_parser, questions)
        normal, tools = text, tools_of(self._fields)
        if facts.tool_call_parser and tools:
            text, calls = await questions.parse_calls(text, tools, facts.tool_call_parser)
        message = {**began, "content": text, "reasoning_content": reasoning or None}
        message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(call, facts),
                    "index": place,
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["parameters"]},
                }
                for place, call in enumerate(calls)
            ]
        return ReadMessage(message, normal)

    def _call_id(self, call: Mapping[str, Any], facts: Facts) -> str:
        """As the engine names it (SGLang 0.5.23, `_process_tool_call_id`): Kimi K2's template reads the names."""
        if facts.tool_call_parser != "kimi_k2":
            return f"call_{uuid.uuid4().hex[:24]}"
        before = sum(len(message.get("tool_calls") or ()) for message in self._fields["messages"])
        return f"functions.{call['name']}:{before + call['tool_index']}"


async def _reasoning(text: str, began: Mapping[str, Any], parser: str, questions: EngineQuestions) -> tuple[str, str]:
    """The reasoning in a text, and the rest. The engine's parser does not know here whether the prompt had opened the
    reasoning; how the message began tells."""
    begin, end = reasoning_marks(parser)
    separated = await questions.separate_reasoning(text, parser)
    if (began.get("reasoning_content") and not separated[0]) or (end in separated[1] and begin not in text):
        return await questions.separate_reasoning(begin + text, parser)
    return separated
