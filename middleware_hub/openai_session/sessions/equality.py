"""Comparison of a message that an agent sends back with the recorded one, and the first field that differs.

Agents send the whole history with every turn, and their libraries change its spelling: null for an empty string, text
in parts, reformatted arguments, thinking in blocks, cache marks that move. Two messages are equal if a model reads the
same in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from middleware_hub.openai_session.sessions.messages import TEXT_PARTS, Message, function_of, load_function
from middleware_hub.openai_session.sessions.repaired import is_repair, plain_value
from miles_router.engines import paths

#: `(held, sent)`: True if the sent message is the recorded one.
Equality = Callable[[Message, Message], bool]

#: Fields that chat templates read unchanged, besides content, reasoning and calls.
PLAIN_FIELDS = ("role", "tool_call_id", "name", "tools")
#: Fields in which clients keep the reasoning of an answer.
REASONING = ("reasoning_content", "reasoning")
THINKING_PARTS = ("thinking", "redacted_thinking", "reasoning")
INLINE_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
#: Separators with which clients join the parts of a text.
SEPARATORS = ("", "\n", " ", "\n\n")
#: Tags around notes that harnesses put into a message, sometimes before its text and sometimes behind it.
REMINDER_TAGS = ("<system-reminder>", "</system-reminder>")


class Difference(NamedTuple):
    """The first field in which two messages differ, and both values."""

    field: str
    held: object
    sent: object


class Reading(NamedTuple):
    """The compared parts of a message: reasoning, content as texts and other parts, and tool calls."""

    reasoning: Sequence[object]
    content: Sequence[object]
    calls: Sequence[Any]


@dataclass(frozen=True)
class Likeness:
    """An equality that also reports the difference.

    Attributes:
        json: arguments of tool calls are compared as JSON values, not as text.
        parts: ignore how a text is divided into parts, where thinking and reminders stand in a message, and the `name`
            of an assistant message.
        trims: ignore white space around an answer's text.
    """

    json: bool = False
    parts: bool = False
    trims: bool = False

    def __call__(self, held: Message, sent: Message) -> bool:
        """Return True if the sent message is the recorded one."""
        return held is sent or held == sent or self.difference(held, sent) is None

    def difference(self, held: Message, sent: Message) -> Difference | None:
        """Return the first difference that a model would read; None without one."""
        return next(self._differences(held, sent), None)

    def _differences(self, held: Message, sent: Message) -> Iterator[Difference]:
        answers = held.get("role") == "assistant"
        for name in PLAIN_FIELDS:
            if (held.get(name) or None) != (sent.get(name) or None) and not (self.parts and answers and name == "name"):
                yield Difference(name, held.get(name), sent.get(name))
        one, other = self._read(held), self._read(sent)
        # Agents may leave reasoning out: its tokens are recorded.
        if any(other.reasoning) and not self._same(one.reasoning, other.reasoning, trimmed=self.parts):
            yield Difference(REASONING[0], _unwrapped(one.reasoning), _unwrapped(other.reasoning))
        if not self._same(one.content, other.content, trimmed=self.trims and answers):
            yield Difference("content", _unwrapped(one.content), _unwrapped(other.content))
        yield from self._calls(one.calls, other.calls)

    def _read(self, message: Message) -> Reading:
        texts = (message.get(name) for name in REASONING)  # reasoning that is not text, such as a summary, is ignored
        reasoning: list[object] = [next((text for text in texts if text and isinstance(text, str)), "")]
        calls = message.get("tool_calls")
        content = _parts_of(message)
        if self.parts and message.get("role") == "assistant":
            reasoning, content = _without_thinking(message, reasoning, content)
        return Reading(reasoning, content, calls if isinstance(calls, list) else ())

    def _same(self, held: Sequence[object], sent: Sequence[object], *, trimmed: bool) -> bool:
        if held == sent or _or_empty(held) == _or_empty(sent):
            return True
        divided = len(held) > 1 or len(sent) > 1
        if (divided and not self.parts) or not all(isinstance(part, str) for part in (*held, *sent)):
            return False
        for separator in SEPARATORS if divided else SEPARATORS[:1]:
            one, other = _joined(held, separator), _joined(sent, separator)
            if one == other or (trimmed and one.strip() == other.strip()):
                return True
            if self.parts and _same_but_for_reminders(one, other):
                return True
        return False

    def _calls(self, held: Sequence[Any], sent: Sequence[Any]) -> Iterator[Difference]:
        for place, (one, other) in enumerate(zip_longest(held, sent)):
            where, held_function, sent_function = f"tool_calls[{place}]", function_of(one), function_of(other)
            if not held_function or not sent_function:
                if one != other:
                    yield Difference(where, one, other)
                continue
            if one.get("id") != other.get("id"):
                yield Difference(f"{where}.id", one.get("id"), other.get("id"))
            if held_function.get("name") != sent_function.get("name"):
                yield Difference(f"{where}.function.name", held_function.get("name"), sent_function.get("name"))
            arguments = held_function.get("arguments"), sent_function.get("arguments")
            same = arguments[0] == arguments[1] or (self.json and _same_value(*map(_parsed_arguments, arguments)))
            known = self.json and one.get("id") == other.get("id")
            if not same and not (known and (arguments[1] is None or is_repair(*arguments))):
                yield Difference(f"{where}.function.arguments", *arguments)


#: The default: messages that differ only in spelling are equal. `strict` accepts fewer spellings.
MEANING = Likeness(json=True, parts=True, trims=True)
STRICT, ARGUMENTS_AS_JSON = Likeness(), Likeness(json=True)
EQUALITIES: Mapping[str, Likeness] = {
    "meaning": MEANING,
    "strict": STRICT,
    "tool-arguments-as-json": ARGUMENTS_AS_JSON,
}


def equality(name: str) -> Equality:
    """Return the equality with this name, or load the function at this dotted path.

    Raises:
        ConfigError: there is no such name or function.
    """
    known = EQUALITIES.get(name)
    return known if known is not None else load_function(name, "message_equality", EQUALITIES)


def equality_on(path: str, equal: Equality) -> Equality:
    """Return the equality for messages that come back over an agent API.

    The Messages API has no blocks of white space alone, and its clients trim: `trims` is always on there.
    """
    return replace(equal, trims=True) if path == paths.MESSAGES and isinstance(equal, Likeness) else equal


def same_json(one: Any, other: Any) -> bool:
    """Return True if two values are the same JSON. Unlike in Python, `true` is not `1`.

    Numbers are compared as doubles: agents written in JavaScript round those beyond 2^53.
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return float(one) == float(other)
    return bool(one == other)


def _same_value(held: object, sent: object) -> bool:
    """Return True if two parsed arguments are the same. Some libraries write empty arguments as 0, false or ""."""
    return same_json(held, sent) or (held == {} and not sent)


def compact_text(message: Message) -> str:
    """Return an answer's text without white space and thinking, which is the same in every spelling."""
    _, content = _without_thinking(message, [], _parts_of(message))
    return "".join("".join(part for part in content if isinstance(part, str)).split())


def _parts_of(message: Message) -> list[object]:
    """Return the content as a list of texts and other parts.

    Other fields of a text part (`cache_control`, annotations) are dropped: no chat template reads them, and clients
    move them from turn to turn.
    """
    content = message.get("content")
    return [_part(part) for part in content] if isinstance(content, list) else [content or ""]


def _part(part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in TEXT_PARTS:
        return part.get("text") or ""
    return {name: value for name, value in part.items() if name != "cache_control"}


def _without_thinking(
    message: Message, reasoning: list[object], content: list[object]
) -> tuple[list[object], list[object]]:
    """Return reasoning and content, after moving thinking out of parts, `thinking_blocks` and `<think>` tags."""
    blocks = message.get("thinking_blocks")
    thinking = [part for part in (*content, *(blocks if isinstance(blocks, list) else ())) if _is_thinking(part)]
    rest = [part for part in content if not _is_thinking(part)]
    texts: list[object] = [
        text for part in thinking if isinstance(text := part.get("thinking") or part.get("text"), str)
    ]
    if rest and isinstance(rest[0], str) and (inline := INLINE_THINKING.match(rest[0])):
        texts.append(inline[1])
        rest[0] = rest[0][inline.end() :]
    return (reasoning if any(reasoning) else texts), rest


def _is_thinking(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in THINKING_PARTS


def _or_empty(parts: Sequence[object]) -> Sequence[object]:
    return parts or [""]


def _joined(parts: Sequence[Any], separator: str) -> str:
    return separator.join(part for part in parts if part)


def _same_but_for_reminders(held: str, sent: str) -> bool:
    """Return True if two texts have the same reminders, in any position, and the same text around them."""
    if REMINDER_TAGS[0] not in held:
        return False
    (reminders, rest), (others, other_rest) = _split_reminders(held), _split_reminders(sent)
    return reminders == others and rest == other_rest


def _split_reminders(text: str) -> tuple[list[str], list[str]]:
    """Return the reminders of a text, sorted, and the texts between them, in order."""
    reminders, rest, position = [], [], 0
    while (begin := text.find(REMINDER_TAGS[0], position)) >= 0 and (end := text.find(REMINDER_TAGS[1], begin)) >= 0:
        rest.append(text[position:begin].strip())
        position = end + len(REMINDER_TAGS[1])
        reminders.append(text[begin:position])
    return sorted(reminders), [part for part in (*rest, text[position:].strip()) if part]


def _unwrapped(content: Sequence[object]) -> object:
    return content[0] if len(content) == 1 else content


def _parsed_arguments(arguments: object) -> object:
    """Return the parsed arguments of a call.

    Missing, empty and null arguments become {}, and so does the empty list that PHP writes. Text that is not JSON, or
    is nested too deep to compare, becomes a tuple, which differs from every JSON value.
    """
    if not isinstance(arguments, str):
        return {} if arguments in (None, []) else arguments
    try:
        parsed = plain_value(arguments) if arguments.strip() else None
        return {} if parsed in (None, []) else parsed
    except ValueError:
        return ("not JSON", arguments)
