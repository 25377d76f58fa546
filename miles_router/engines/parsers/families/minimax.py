"""MiniMax M2: `<invoke name="...">` in `<minimax:tool_call>` (SGLang 0.5.23, `minimax_m2.py`). Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from miles_router.engines.parsers.reading import (
    ParsedCall,
    ParsedCalls,
    Tools,
    known_calls,
    open_block,
    open_json,
    properties_of,
    single_type,
    to_json,
    up_to_last,
)

_INVOKE = re.compile(r'<invoke name="(.*?)</invoke>|<invoke name="(.*)$', re.DOTALL)
_PARAMETER = re.compile(r'<parameter name="(.*?)</parameter>|<parameter name="(.*?)$', re.DOTALL)
_CLOSED = re.compile(r'<parameter name="([^"]*)">(.*?)</parameter>', re.DOTALL)
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class MiniMax:
    begin = "<minimax:tool_call>"
    end = "</minimax:tool_call>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        content, calls, cursor = "", list[ParsedCall](), 0
        while (at := text.find(self.begin, cursor)) >= 0 and (end := text.find(self.end, at)) >= 0:
            content += text[cursor:at]
            cursor = end + len(self.end)
            calls += _calls(text[at:cursor], tools)
        return ParsedCalls(content + text[cursor:], known_calls(calls, tools))

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        block = open_block(text, self.begin, self.end)
        name, head, body = block.rpartition('<invoke name="')[2].partition('">')
        if "</invoke>" in body or not head or name not in tools:
            return None
        closed = up_to_last(body, "</parameter>")
        values = {key: _value(value.strip("\n"), key, tools[name]) for key, value in _CLOSED.findall(closed)}
        return ParsedCall(name, open_json(values))


def _calls(block: str, tools: Tools) -> list[ParsedCall]:
    calls = []
    for first, second in _INVOKE.findall(block):
        name, head, body = (first or second).partition('">')
        if not head:
            continue
        name = name.strip()
        pairs = [(one or other).partition('">') for one, other in _PARAMETER.findall(body)]
        values = {
            key.strip(): _value(value.strip("\n"), key.strip(), tools.get(name)) for key, at, value in pairs if at
        }
        calls.append(ParsedCall(name, to_json(values)))
    return calls


def _value(value: str, key: str, schema: Any) -> Any:
    properties = properties_of(schema)
    if value.lower() in ("null", "none", "nil"):
        return None
    kind = single_type(properties[key]) if key in properties else "string"
    try:
        if kind in ("integer", "int"):
            return int(value)
        if kind in ("number", "float"):
            number = float(value)
            return number if number != int(number) else int(number)
    except (ValueError, OverflowError):
        pass
    if kind in ("string", "str", "text"):
        return value
    if kind in ("boolean", "bool") and value.lower().strip() in (*_YES, *_NO):
        return value.lower().strip() in _YES
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
