"""Kimi K2: `functions.name:0` and JSON between marks (SGLang 0.5.23, `kimik2_detector.py`). Pure."""

from __future__ import annotations

import re

from miles_router.engines.parsers.reading import ParsedCall, ParsedCalls, Tools, Unparsable, open_block, up_to_last

_BEGIN, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*([^\s<|]+)\s*<\|tool_call_argument_begin\|>\s*(\{.*?\})\s*<\|tool_call_end\|>", re.DOTALL
)
_ID = re.compile(r"^(?:functions\.)?([\w.\-]+):\d+$")


class Kimi:
    begin = "<|tool_calls_section_begin|>"
    end = "<|tool_call_end|>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        content, begin, rest = text.partition(self.begin)
        found = [
            (_name(call, tools), arguments) for call, arguments in _CALL.findall(up_to_last(begin + rest, self.end))
        ]
        return ParsedCalls(content, [ParsedCall(name, arguments) for name, arguments in found if name is not None])

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        call, begin, arguments = open_block(text, _BEGIN, self.end).partition(_ARGUMENTS)
        name = _name(call.strip(), tools) if begin else None
        return None if name is None else ParsedCall(name, arguments.lstrip())


def _name(call: str, tools: Tools) -> str | None:
    """Return the function's name in a call's id; None if the id has another form.

    Raises:
        Unparsable: the id is only a number, and there are several tools: the engine guesses.
    """
    match = _ID.match(call)
    if match:
        return match[1]
    if not call.isdigit():
        return None
    if len(tools) != 1:
        raise Unparsable("a tool call names no function")
    return next(iter(tools))
