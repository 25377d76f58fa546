"""Qwen 2.5 and 3: JSON in `<tool_call>` (SGLang 0.5.23, `qwen25_detector.py`). Pure."""

from __future__ import annotations

import json
import re

from miles_router.engines.parsers.reading import ParsedCall, ParsedCalls, Tools, calls_from_json, open_block, up_to_last

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)"(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL)
_VALUE = json.JSONDecoder()


class Hermes:
    begin = "<tool_call>\n"
    end = "\n</tool_call>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        content, begin, rest = text.partition(self.begin)
        if not begin:
            return ParsedCalls(text, [])
        calls: list[ParsedCall] = []
        for block in re.findall(f"{self.begin}(.*?){self.end}", up_to_last(begin + rest, self.end), re.DOTALL):
            try:
                calls += calls_from_json(json.loads(block.strip()), tools)
            except json.JSONDecodeError:
                continue  # the engine drops invalid JSON too
        return ParsedCalls(content.strip(), calls)

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        head = _HEAD.match(open_block(text, self.begin, self.end))
        if head is None or head[1] not in tools:
            return None
        return ParsedCall(head[1], _first_value(head[2] or ""))


def _first_value(arguments: str) -> str:
    """Return the first JSON value, without the text behind it; the whole text if the value is incomplete."""
    try:
        return arguments[: _VALUE.raw_decode(arguments)[1]]
    except json.JSONDecodeError:
        return arguments
