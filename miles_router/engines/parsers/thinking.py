"""Reasoning in front of an answer: `<think>` ... `</think>`, or up to a tool call (SGLang 0.5.23, `BaseReasoning...`).
Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from miles_router.engines.parsers.reading import overlap


class Split(NamedTuple):
    """The reasoning in a text, and the rest of it; None while it is not certain that there is one. `begun`: a call
    that is not complete, and stands in neither."""

    reasoning: str
    rest: str | None
    begun: str = ""


class ReasoningFormat(Protocol):
    """How a family writes reasoning. `thinking`: the prompt has opened it.

    Raises:
        Unparsable: with either, how the engine would read the text is not known.
    """

    def whole(self, text: str, *, thinking: bool) -> Split:
        """Of a text that is over."""
        ...

    def growing(self, text: str, *, thinking: bool) -> Split:
        """Of a text that goes on: what it says for certain."""
        ...


class Thinking(NamedTuple):
    """How a family writes its reasoning; `call` is the mark of a tool call that ends it, too."""

    begin: str = "<think>"
    end: str = "</think>"
    call: str = ""

    def whole(self, text: str, *, thinking: bool) -> Split:
        """See `ReasoningFormat`."""
        if not thinking and self.begin not in text:
            return Split("", text)
        while text.startswith(self.begin):
            text = text[len(self.begin) :]
        reasoning, end, rest = text.partition(self.end)
        if not end and self.call and self.call in text:
            at = text.index(self.call)
            return Split(text[:at], text[at:])
        return Split(reasoning, rest)

    def growing(self, text: str, *, thinking: bool) -> Split:
        """See `ReasoningFormat`."""
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
        held = max(overlap(text, mark) for mark in (self.end, self.call, self.begin))
        return Split(text[: len(text) - held], None)
