"""The raw text of a chat answer, read here as the engine's own parsers would (SGLang 0.5.23). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.legs import call_id, looks_for_calls, separates_reasoning, tools_of
from miles_router.engines.openai.rest import deltas_behind
from miles_router.engines.parsers import UNREAD, Parsers
from miles_router.engines.parsers.growing import GrowingText
from miles_router.engines.parsers.local import tools_by_name
from miles_router.engines.parsers.reading import ReadCall, tool_calls

#: A text is read anew, all of it, once it has grown by this part: read with every token, it would cost its square.
FINENESS = 256


class ReadMessage(NamedTuple):
    """A message, and the text that its content and its calls stand in."""

    message: dict[str, Any]
    text: str


class TextReader:
    """Reads texts of the answers to one request.

    Args:
        fields: the request.
        facts: of the engine whose parsers would read them.
    """

    def __init__(self, fields: Mapping[str, Any], parsers: Parsers, facts: Facts) -> None:
        self._fields = fields
        self._facts = facts
        self._tools = tools_by_name(tools_of(fields))
        self._separates, self._looks = separates_reasoning(fields, facts), looks_for_calls(fields, facts)
        self._thinking = parsers.thinking(facts) if self._separates else None
        self._calls = parsers.calls(facts) if self._looks else None

    @property
    def missing(self) -> str | None:
        """Return the name of the engine's parser that nothing here can stand in for; None where there is none."""
        if self._separates and self._thinking is None:
            return self._facts.reasoning_parser
        return self._facts.tool_call_parser if self._looks and self._calls is None else None

    def read(self, text: str, began: Mapping[str, Any], *, opened: bool) -> ReadMessage:
        """Return the message in a whole text.

        Args:
            began: fields of the message that are known.
            opened: whether the prompt has begun the reasoning.

        Raises:
            UnreadableAnswer: nothing here can read it.
        """
        if (parser := self.missing) is not None:
            raise UnreadableAnswer("incomplete", f"no local parser for {parser}")
        reasoning = ""
        try:
            if self._thinking is not None:
                split = self._thinking.whole(text, thinking=opened)
                reasoning, text = split.reasoning, split.rest or ""
            content, calls = (text, []) if self._calls is None else self._calls.read(text, self._tools)
        except UNREAD as error:
            raise UnreadableAnswer("incomplete", f"no local parser can read it: {error}") from error
        return ReadMessage(self.message(began, reasoning, content, calls), text)

    def message(
        self, began: Mapping[str, Any], reasoning: str, content: str, calls: Sequence[ReadCall]
    ) -> dict[str, Any]:
        """Return the message that was read, its calls named."""
        message = {**began, "content": content, "reasoning_content": reasoning or None}
        message.pop("tool_calls", None)
        return {**message, "tool_calls": tool_calls(calls, self._name)} if calls else message

    def growing(self, *, opened: bool) -> GrowingText | None:
        """Return what reads a text as it comes on; None where nothing here can."""
        if self.missing is not None:
            return None
        names: dict[int, str] = {}
        return GrowingText(
            self._thinking,
            opened,
            self._calls,
            self._tools,
            lambda name, place: names.setdefault(place, self._name(name, place)),
        )

    def _name(self, name: str, place: int) -> str:
        return call_id(name, place, self._fields, self._facts)


class LiveText:
    """Shows a text as it grows: what is certain of its message.

    Args:
        growing: None where it cannot be read before it is whole.
        shown: the message, as far as it was shown.
    """

    def __init__(self, growing: GrowingText | None, shown: GrowingMessage) -> None:
        self.shown = shown
        self._growing = growing
        self._read = 0

    @property
    def is_live(self) -> bool:
        """Return whether it is read as it comes."""
        return self._growing is not None

    def certain(self, text: str) -> list[Mapping[str, Any]]:
        """Return the deltas of what is certain now of all the text and was not shown before; some of it may wait for
        more."""
        if self._growing is None or len(text) - self._read <= len(text) // FINENESS:
            return []
        self._read = len(text)
        try:
            return self.behind(*self._growing.message(text))
        except (UnreadableAnswer, *UNREAD):
            self._growing = None  # the whole text will tell
            return []

    def behind(self, message: Mapping[str, Any], text: str) -> list[Mapping[str, Any]]:
        """Return the deltas that make a message of what was shown.

        Raises:
            UnreadableAnswer: something was shown that the message does not have.
        """
        deltas: list[Mapping[str, Any]] = [*deltas_behind(self.shown.message(), message, text)]
        for delta in deltas:
            self.shown.add(delta)
        return deltas
