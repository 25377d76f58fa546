"""What every family's parser shares: what was read, marks that are still coming, and the schemas of tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from miles_router.engines.client_json import replace_half_surrogates

#: The parameters' schema of each tool, by its name.
Tools = Mapping[str, Any]


class Unparsable(ValueError):
    """A text that a local parser cannot read as the engine's would; says why."""


#: What reading calls raises where a text, or a tool's schema, is beyond it: arguments nested too deep, numbers of too
#: many digits, literals that are no JSON, schemas that are none. The engine's parsers fail at them, too.
UNREAD = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class ReadCall(NamedTuple):
    """A tool call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ReadCalls(NamedTuple):
    """The content of a text, and the calls in it."""

    content: str
    calls: list[ReadCall]


class CallFormat(Protocol):
    """How a family writes tool calls."""

    #: What the first call begins with, and what each ends with.
    begin: str
    end: str

    def read(self, text: str, tools: Tools) -> ReadCalls:
        """A whole text, as the engine's parser reads it.

        Raises:
            Unparsable: how the engine would is not known.
            UNREAD: one of them, where it is beyond what can be read. So with `unfinished`.
        """
        ...

    def unfinished(self, text: str, tools: Tools) -> ReadCall | None:
        """The call that a text ends within, as far as it goes; None where it ends elsewhere, or before a name."""
        ...


def tool_calls(calls: Sequence[ReadCall], name: Callable[[str, int], str], *, begin: int = 0) -> list[dict[str, Any]]:
    """Calls as a message has them, from the place `begin` on; `name` names one, of a function and in its place."""
    return [
        {
            "id": name(call.name, place),
            "index": place,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls, begin)
    ]


def written(value: object) -> str:
    """JSON as the engine's parsers write it; but half of a surrogate pair, which they cannot write, as U+FFFD."""
    return replace_half_surrogates(json.dumps(value, ensure_ascii=False))


def begun(values: Mapping[str, Any]) -> str:
    """Arguments that are not complete."""
    return written(values)[:-1] if values else ""


def overlap(text: str, mark: str) -> int:
    """How much of a mark a text ends with, short of all of it."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def up_to_last(text: str, end: str) -> str:
    """A text up to the last of these marks: behind it nothing can be closed, and nobody need look for it again and
    again."""
    return text[: text.rfind(end) + len(end)] if end in text else ""


def open_block(text: str, begin: str, end: str) -> str:
    """What a text ends within: what follows its last `begin`, without an `end`; empty where it ends elsewhere."""
    _, found, block = text.rpartition(begin)
    return block if found and end not in block else ""


def known(calls: Sequence[ReadCall], tools: Tools) -> list[ReadCall]:
    """Those of tools that there are: the engine drops the others."""
    return [call for call in calls if call.name in tools]


def of_json(parsed: Any, tools: Tools) -> list[ReadCall]:
    """Calls that were written as JSON, one or a list (SGLang 0.5.23, `parse_base_json`).

    Raises:
        Unparsable: they are no objects.
    """
    found = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(each, Mapping) for each in found):
        raise Unparsable("a tool call is no object")
    calls = [ReadCall(each.get("name"), written(each.get("parameters") or each.get("arguments", {}))) for each in found]
    return known(calls, tools)


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The parameters of a tool, those of alternatives too."""
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


def plain_type(schema: Any) -> str:
    """The type of a parameter that has one.

    Raises:
        Unparsable: it may be of several. Each of the engine's parsers has rules of its own for that.
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(kind, str):
        raise Unparsable("a tool's parameter has no plain type")
    return kind.strip().lower()
