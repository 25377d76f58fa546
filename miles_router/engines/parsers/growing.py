"""Incremental parsing: the part of a message that more text cannot change. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from miles_router.engines.parsers.reading import CallFormat, ParsedCalls, Tools, partial_mark_length, tool_calls
from miles_router.engines.parsers.thinking import ReasoningFormat


class GrowingText(NamedTuple):
    """An incremental parser for the text of an answer.

    Attributes:
        thinking: the format of reasoning; None if reasoning stays in the content.
        in_reasoning: whether the text begins inside reasoning, which the prompt opened.
        calls: the format of tool calls; None if calls stay in the content.
        call_id: returns the id of a call, from the function's name and the call's index.
    """

    thinking: ReasoningFormat | None
    in_reasoning: bool
    calls: CallFormat | None
    tools: Tools
    call_id: Callable[[str, int], str]

    def message(self, text: str) -> tuple[dict[str, Any], str]:
        """Return the certain part of the message, and the text behind its reasoning.

        Raises:
            PARSE_ERRORS: one of these, if a call cannot be read.
        """
        reasoning, rest = "", text
        if self.thinking is not None:
            split = self.thinking.split_certain(text, thinking=self.in_reasoning)
            reasoning, rest = split.reasoning, split.rest or ""
        content, calls = self._read(rest)
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        if calls:
            message["tool_calls"] = tool_calls(calls, self.call_id)
        return message, rest

    def _read(self, text: str) -> ParsedCalls:
        """Return the content in front of the first call, and the complete calls."""
        if self.calls is None:
            return ParsedCalls(text, [])
        at = text.find(self.calls.begin)
        if at < 0:
            return ParsedCalls(text[: len(text) - partial_mark_length(text, self.calls.begin)], [])
        end = text.rfind(self.calls.end)
        calls = self.calls.read(text[: end + len(self.calls.end)], self.tools).calls if end > at else []
        return ParsedCalls(text[:at], calls)
