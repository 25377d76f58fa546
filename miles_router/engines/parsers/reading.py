"""The protocol of tool call formats, and helpers that the parsers of all families share. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from miles_router.engines.json_bytes import replace_half_surrogates

#: The parameters' schema of each tool, by its name.
Tools = Mapping[str, Any]


class Unparsable(ValueError):
    """A text for which the result of the engine's parser is not certain."""


#: Errors of a parser: arguments nested too deep, numbers with too many digits, literals that are not JSON, invalid tool
#: schemas. The engine's parsers fail at these texts too.
PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class ParsedCall(NamedTuple):
    """A tool call: the name of the function, and its arguments as JSON."""

    name: str
    arguments: str


class ParsedCalls(NamedTuple):
    """The content of a text, and its tool calls."""

    content: str
    calls: list[ParsedCall]


class CallFormat(Protocol):
    """The format in which a family writes tool calls."""

    #: The mark that begins the first call, and the mark that ends each call.
    begin: str
    end: str

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        """Parse a whole text as the engine's parser does.

        Raises:
            Unparsable: the result of the engine's parser is not certain.
            PARSE_ERRORS: one of these, if the text cannot be read. The same applies to `unfinished`.
        """
        ...

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        """Return the incomplete call at the end of a text; None if there is none, or if it has no name yet."""
        ...


def tool_calls(calls: Sequence[ParsedCall], name: Callable[[str, int], str], *, begin: int = 0) -> list[dict[str, Any]]:
    """Return the `tool_calls` of a message.

    Args:
        name: returns the id of a call, from the function's name and the call's index.
        begin: the index of the first call.
    """
    return [
        {
            "id": name(call.name, place),
            "index": place,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls, begin)
    ]


def to_json(value: object) -> str:
    """Return JSON in the form of the engine's parsers. Lone surrogates, at which they fail, become U+FFFD."""
    return replace_half_surrogates(json.dumps(value, ensure_ascii=False))


def open_json(values: Mapping[str, Any]) -> str:
    """Return the JSON of incomplete arguments, without the closing brace."""
    return to_json(values)[:-1] if values else ""


def partial_mark_length(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` at the end of `text`."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def up_to_last(text: str, end: str) -> str:
    """Return the text up to and with the last `end` mark; empty if there is none.

    The text behind has no closed block. Leaving it out keeps lazy regular expressions from quadratic search.
    """
    return text[: text.rfind(end) + len(end)] if end in text else ""


def open_block(text: str, begin: str, end: str) -> str:
    """Return the text behind the last `begin` mark if no `end` mark follows; otherwise an empty string."""
    _, found, block = text.rpartition(begin)
    return block if found and end not in block else ""


def known_calls(calls: Sequence[ParsedCall], tools: Tools) -> list[ParsedCall]:
    """Return the calls of known tools. The engine drops all others."""
    return [call for call in calls if call.name in tools]


def calls_from_json(parsed: Any, tools: Tools) -> list[ParsedCall]:
    """Return the calls in parsed JSON, an object or a list of objects (SGLang 0.5.23, `parse_base_json`).

    Raises:
        Unparsable: a call is not an object.
    """
    found = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(each, Mapping) for each in found):
        raise Unparsable("a tool call is not an object")
    calls = [
        ParsedCall(each.get("name"), to_json(each.get("parameters") or each.get("arguments", {}))) for each in found
    ]
    return known_calls(calls, tools)


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the schema of each parameter of a tool, merged over `anyOf`, `oneOf` and `allOf`."""
    if not isinstance(schema, Mapping):
        return {}
    if isinstance(schema.get("properties"), Mapping):
        found: Mapping[str, Any] = schema["properties"]
        return found
    merged: dict[str, Any] = {}
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(keyword) or ():
            merged = {**properties_of(branch), **merged}
    return merged


def single_type(schema: Any) -> str:
    """Return the type of a parameter.

    Raises:
        Unparsable: the schema has no single type. Each of the engine's parsers has its own rules for this case.
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(kind, str):
        raise Unparsable("a tool's parameter has no single type")
    return kind.strip().lower()
