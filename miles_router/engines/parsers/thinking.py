"""Parses reasoning in front of an answer: `<think>` ... `</think>`, or up to a tool call. Pure.

Source: SGLang 0.5.23, `BaseReasoning...`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from miles_router.engines.parsers.reading import partial_mark_length


class Split(NamedTuple):
    """The reasoning in a text, and the rest of the text.

    Attributes:
        rest: None while the text may still be inside its reasoning.
        open_call: an incomplete call, which is in neither part.
    """

    reasoning: str
    rest: str | None
    open_call: str = ""


class ReasoningFormat(Protocol):
    """The format in which a family writes reasoning.

    Both methods raise `Unparsable` if the result of the engine's parser is not certain. `thinking`: whether the prompt
    opened the reasoning.
    """

    def split(self, text: str, *, thinking: bool) -> Split:
        """Split a complete text."""
        ...

    def split_certain(self, text: str, *, thinking: bool) -> Split:
        """Split the certain part of a text that continues."""
        ...


class Thinking(NamedTuple):
    """Reasoning between two marks. The mark `call` of a tool call ends the reasoning too."""

    begin: str = "<think>"
    end: str = "</think>"
    call: str = ""

    def split(self, text: str, *, thinking: bool) -> Split:
        if not thinking and self.begin not in text:
            return Split("", text)
        while text.startswith(self.begin):
            text = text[len(self.begin) :]
        reasoning, end, rest = text.partition(self.end)
        if not end and self.call and self.call in text:
            at = text.index(self.call)
            return Split(text[:at], text[at:])
        return Split(reasoning, rest)

    def split_certain(self, text: str, *, thinking: bool) -> Split:
        if text.startswith(self.begin):
            thinking, text = True, text[len(self.begin) :]
        elif self.begin.startswith(text):
            return Split("", None)
        if not thinking:
            return Split("", text)
        ends = [at for mark in (self.end, self.call) if mark and (at := text.find(mark)) >= 0]
        if ends:
            at = min(ends)
            return Split(text[:at], text[at:].removeprefix(self.end))
        held = max(partial_mark_length(text, mark) for mark in (self.end, self.call, self.begin))
        return Split(text[: len(text) - held], None)
