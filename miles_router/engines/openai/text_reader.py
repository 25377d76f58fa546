"""Parses the text of a chat answer with the same result as the engine's own parsers (SGLang 0.5.23). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_by_name, tools_of
from miles_router.engines.openai.chat_parts import call_id, looks_for_calls, separates_reasoning
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.rest import missing_deltas
from miles_router.engines.parsers import PARSE_ERRORS, Parsers
from miles_router.engines.parsers.growing import GrowingText
from miles_router.engines.parsers.reading import ParsedCall, tool_calls

#: A growing text is parsed again after it grew by 1/256. Parsing with every token would take quadratic time.
REPARSE_FRACTION = 256


class ReadMessage(NamedTuple):
    """A parsed message, and the text behind its reasoning."""

    message: dict[str, Any]
    text: str


class TextReader:
    """A parser of the answers to one request.

    Args:
        fields: the fields of the request.
        facts: the facts of the engine, which name the parsers that the engine uses.
    """

    def __init__(self, fields: Mapping[str, Any], parsers: Parsers, facts: Facts) -> None:
        self._fields = fields
        self._facts = facts
        self._tools = tools_by_name(tools_of(fields))
        self._separates, self._looks = separates_reasoning(fields, facts), looks_for_calls(fields, facts)
        self._thinking = parsers.reasoning_format(facts) if self._separates else None
        self._calls = parsers.call_format(facts) if self._looks else None

    @property
    def missing(self) -> str | None:
        """The name of a parser that is needed and that the router lacks; None if the router has all."""
        if self._separates and self._thinking is None:
            return self._facts.reasoning_parser
        return self._facts.tool_call_parser if self._looks and self._calls is None else None

    def read(self, text: str, began: Mapping[str, Any], *, opened: bool) -> ReadMessage:
        """Parse a whole text.

        Args:
            began: fields of the message that are kept.
            opened: whether the prompt ends with the start of reasoning.

        Raises:
            UnreadableAnswer: the text cannot be parsed.
        """
        if (parser := self.missing) is not None:
            raise UnreadableAnswer("incomplete", f"there is no local parser for {parser}")
        reasoning = ""
        try:
            if self._thinking is not None:
                split = self._thinking.split(text, thinking=opened)
                reasoning, text = split.reasoning, split.rest or ""
            content, calls = (text, []) if self._calls is None else self._calls.read(text, self._tools)
        except PARSE_ERRORS as error:
            raise UnreadableAnswer("incomplete", f"the local parser cannot read the text: {error}") from error
        return ReadMessage(self.message(began, reasoning, content, calls), text)

    def message(
        self, began: Mapping[str, Any], reasoning: str, content: str, calls: Sequence[ParsedCall]
    ) -> dict[str, Any]:
        """Return the message with an id for each call."""
        message = {**began, "content": content, "reasoning_content": reasoning or None}
        message.pop("tool_calls", None)
        return {**message, "tool_calls": tool_calls(calls, self._name)} if calls else message

    def growing(self, *, opened: bool) -> GrowingText | None:
        """Return the incremental parser; None if the router lacks one that is needed."""
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
    """The deltas of a message whose text grows.

    Args:
        growing: the incremental parser; None if only the whole text can be parsed.
        shown: the message that the deltas so far make.
    """

    def __init__(self, growing: GrowingText | None, shown: GrowingMessage) -> None:
        self.shown = shown
        self._growing = growing
        self._read = 0

    @property
    def is_live(self) -> bool:
        """True if there is an incremental parser."""
        return self._growing is not None

    def new_deltas(self, text: str, *, at_once: bool = False) -> list[Mapping[str, Any]]:
        """Return new deltas for all the text so far. More text cannot change them.

        Args:
            at_once: parse even if only little is new.
        """
        waits = not at_once and len(text) - self._read <= len(text) // REPARSE_FRACTION
        if self._growing is None or waits:
            return []
        self._read = len(text)
        try:
            return self.remaining_deltas(*self._growing.message(text))
        except (UnreadableAnswer, *PARSE_ERRORS):
            self._growing = None  # only the whole text can be parsed
            return []

    def remaining_deltas(self, message: Mapping[str, Any], text: str) -> list[Mapping[str, Any]]:
        """Return the deltas that complete `shown` to this message.

        Raises:
            UnreadableAnswer: `shown` has something that the message does not have.
        """
        deltas: list[Mapping[str, Any]] = [*missing_deltas(self.shown.message(), message, text)]
        for delta in deltas:
            self.shown.add(delta)
        return deltas
