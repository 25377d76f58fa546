"""GLM 4.5 to 4.7: `<arg_key>` and `<arg_value>` in `<tool_call>` (SGLang 0.5.23, `glm47_moe_detector.py`). Pure."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from miles_router.engines.parsers.reading import (
    ParsedCall,
    ParsedCalls,
    Tools,
    known_calls,
    open_block,
    open_json,
    single_type,
    to_json,
    up_to_last,
)

_BLOCK = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
_PARTS = re.compile(r"<tool_call>(.*?)(<arg_key>.*?)?</tool_call>", re.DOTALL)
_KEY, _VALUE_END = "<arg_key>", "</arg_value>"
_BETWEEN = re.compile(r"</arg_key>(?:\\n|\s)*<arg_value>")


class Glm:
    begin = "<tool_call>"
    end = "</tool_call>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        if self.begin not in text:
            return ParsedCalls(text, [])
        closed = up_to_last(text, self.end)
        parts = [match for block in _BLOCK.findall(closed) if (match := _PARTS.search(block)) is not None]
        calls = [ParsedCall(each[1], to_json(_values(each[1], each[2] or "", tools))) for each in parts]
        return ParsedCalls((_BLOCK.sub("", closed) + text[len(closed) :]).strip(), known_calls(calls, tools))

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        name, begin, rest = open_block(text, self.begin, self.end).partition(_KEY)
        if not begin or name not in tools:
            return None
        return ParsedCall(name, open_json(_values(name, begin + rest, tools)))


def _values(name: str, arguments: str, tools: Tools) -> dict[str, Any]:
    schema = tools.get(name) or {}
    properties = schema.get("properties") or {}
    values: dict[str, Any] = {}
    for key, value in _pairs(arguments):
        kind = single_type(properties[key.strip()]) if key.strip() in properties else None
        parsed = _parsed(value, kind or "string")
        values[key.strip()] = value if kind == "string" and not isinstance(parsed, str) else parsed
    return values


def _pairs(arguments: str) -> Iterator[tuple[str, str]]:
    """Yield each key with its value. A single regular expression would take quadratic time."""
    at = 0
    while (begin := arguments.find(_KEY, at)) >= 0:
        between = _BETWEEN.search(arguments, begin + len(_KEY))
        end = arguments.find(_VALUE_END, between.end()) if between is not None else -1
        if between is None or end < 0:
            return
        yield arguments[begin + len(_KEY) : between.start()], arguments[between.end() : end]
        at = end + len(_VALUE_END)


def _parsed(value: str, kind: str) -> Any:
    for attempt in (value, _unescaped(value)):
        try:
            return _number(json.loads(attempt), kind)
        except ValueError:
            continue
    if kind == "string":
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        return value[1:-1] if quoted else value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _unescaped(value: str) -> str:
    try:
        found: str = json.loads(f'"{value}"')
    except ValueError:
        return ""
    return found


def _number(value: Any, kind: str) -> Any:
    if not isinstance(value, str) or kind not in ("integer", "number"):
        return value
    try:
        return float(value) if kind == "number" and ("." in value or "e" in value.lower()) else int(value)
    except ValueError:
        return value
