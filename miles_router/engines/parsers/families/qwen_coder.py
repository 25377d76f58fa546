"""Qwen3-Coder, Qwen3.5, Nemotron 3: `<function=name>` with `<parameter=name>` in `<tool_call>` (SGLang 0.5.23,
`qwen3_coder_detector.py`). Pure."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from miles_router.engines.parsers.reading import (
    ParsedCall,
    ParsedCalls,
    Tools,
    open_block,
    open_json,
    properties_of,
    single_type,
    to_json,
    up_to_last,
)

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=(.*?)</function>|<function=(.*)$", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|$)", re.DOTALL)
_CLOSED = re.compile(r"<parameter=([^>]*)>(.*?)</parameter>", re.DOTALL)
_PARAMETER_END = "</parameter>"
_TEXTS = ("string", "str", "text", "varchar", "char", "enum")
_INTEGERS = ("int", "uint", "long", "short", "unsigned")
_NUMBERS = ("num", "float")
_BOOLEANS = ("boolean", "bool", "binary")


class QwenCoder:
    begin = "<tool_call>"
    end = "</tool_call>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        if self.begin not in text:
            return ParsedCalls(text, [])
        blocks = _BLOCK.findall(up_to_last(text, self.end)) or ([text] if "<function=" in text else [])
        bodies = [first or second for block in blocks for first, second in _FUNCTION.findall(block)]
        calls = [_call(body, tools) for body in bodies if ">" in body]
        return ParsedCalls(text[: text.index(self.begin)], calls)

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        block = open_block(text, self.begin, self.end)
        name, head, body = block.partition("<function=")[2].partition(">")
        if not head:
            return None
        return ParsedCall(name, open_json(_values(name, _CLOSED.findall(up_to_last(body, _PARAMETER_END)), tools)))


def _call(body: str, tools: Tools) -> ParsedCall:
    name, _, parameters = body.partition(">")
    pairs = [each.partition(">")[::2] for each in _PARAMETER.findall(parameters) if ">" in each]
    return ParsedCall(name, to_json(_values(name, pairs, tools)))


def _values(name: str, pairs: list[Any], tools: Tools) -> dict[str, Any]:
    schemas = properties_of(tools.get(name)) or tools.get(name) or {}
    return {key: _value(value.removeprefix("\n").removesuffix("\n"), key, schemas) for key, value in pairs}


def _value(value: str, key: str, schemas: Mapping[str, Any]) -> Any:
    if value.lower() == "null":
        return None
    if key not in schemas:
        return value
    kind = single_type(schemas[key])
    if kind in _TEXTS:
        return value
    try:
        if kind.startswith(_INTEGERS):
            return int(value)
        if kind.startswith(_NUMBERS):
            number = float(value)
            whole = number.is_integer() and "." not in value and "e" not in value.lower()
            return int(number) if whole else number
    except (ValueError, OverflowError):
        return value
    if kind in _BOOLEANS:
        return value.lower() == "true"
    return _literal(value)


def _literal(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
