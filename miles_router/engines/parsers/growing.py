"""A message as its text grows: what is certain of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from miles_router.engines.parsers.reading import CallFormat, ReadCalls, Tools, overlap, tool_calls
from miles_router.engines.parsers.thinking import ReasoningFormat


class GrowingText(NamedTuple):
    """Reads the text of an answer that goes on.

    Attributes:
        thinking: how its reasoning is written; None where none is taken out of it.
        within: whether it begins within its reasoning.
        calls: how its tool calls are; None likewise.
        call_id: names a call, of a function and in its place.
    """

    thinking: ReasoningFormat | None
    within: bool
    calls: CallFormat | None
    tools: Tools
    call_id: Callable[[str, int], str]

    def message(self, text: str) -> tuple[dict[str, Any], str]:
        """What is certain of the message, and the text that its content and its calls stand in.

        Raises:
            Unparsable: a call cannot be read.
        """
        reasoning, rest = "", text
        if self.thinking is not None:
            split = self.thinking.growing(text, thinking=self.within)
            reasoning, rest = split.reasoning, split.rest or ""
        content, calls = self._read(rest)
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        if calls:
            message["tool_calls"] = tool_calls(calls, self.call_id)
        return message, rest

    def _read(self, text: str) -> ReadCalls:
        """The content in front of the first call, and the calls that are complete."""
        if self.calls is None:
            return ReadCalls(text, [])
        at = text.find(self.calls.begin)
        if at < 0:
            return ReadCalls(text[: len(text) - overlap(text, self.calls.begin)], [])
        end = text.rfind(self.calls.end)
        calls = self.calls.read(text[: end + len(self.calls.end)], self.tools).calls if end > at else []
        return ReadCalls(text[:at], calls)
