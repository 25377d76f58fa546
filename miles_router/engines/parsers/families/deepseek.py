"""DeepSeek V3 to V3.2: JSON between marks until V3.1, tags since V3.2 (SGLang 0.5.23, `deepseekv3_detector.py`,
`deepseekv31_detector.py`, `deepseekv32_detector.py`). Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from miles_router.engines.parsers.reading import (
    ParsedCall,
    ParsedCalls,
    Tools,
    calls_from_json,
    known_calls,
    open_block,
    open_json,
    to_json,
    up_to_last,
)

_BEGIN, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL = re.compile(r"<｜tool▁call▁begin｜>.*?<｜tool▁call▁end｜>", re.DOTALL)
#: The text between the name of a function and its arguments, and the text behind the arguments.
_FENCE, _FENCE_END = "\n```json\n", "\n```"
_DSML = "｜DSML｜"
_SECTION = re.compile(r"<｜DSML｜function_calls>(.*?)</｜DSML｜function_calls>", re.DOTALL)
_INVOKE = re.compile(
    r'<｜DSML｜invoke\s+name="(?P<name>[^"]+)"\s*(?:(?P<closed>/>)|>(?P<body>.*?)(?P<end>(?:</｜DSML｜invoke>|$)))',
    re.DOTALL,
)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter\s+name="([^"]+)"\s+string="([^"]+)"\s*>(.*?)</｜DSML｜parameter>', re.DOTALL
)
_PARAMETER_END = "</｜DSML｜parameter>"


class DeepSeekMarks:
    """The format until V3.1; `fenced` selects the format of V3."""

    begin = "<｜tool▁calls▁begin｜>"
    end = "<｜tool▁call▁end｜>"

    def __init__(self, *, fenced: bool = False) -> None:
        self._between = _FENCE if fenced else _SEPARATOR

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        content, begin, rest = text.partition(self.begin)
        if not begin:
            return ParsedCalls(text, [])
        calls: list[ParsedCall] = []
        try:
            for block in _CALL.findall(up_to_last(begin + rest, self.end)):
                parts = self._parts(block[len(_BEGIN) : -len(self.end)])
                if parts is None:
                    return ParsedCalls(text, [])
                name, arguments = parts
                calls += calls_from_json({"name": name, "parameters": json.loads(arguments)}, tools)
        except json.JSONDecodeError:
            return ParsedCalls(text, [])
        return ParsedCalls(content.strip(), calls)

    def _parts(self, call: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a call; None if the text is not a call.

        If a mark occurs several times, the last one counts, as in the engine's regular expression.
        """
        if self._between == _SEPARATOR:
            name, mark, arguments = call.rpartition(_SEPARATOR)
            return (name, arguments) if mark else None
        head, _, arguments = call.removesuffix(_FENCE_END).rpartition(_FENCE)
        _, mark, name = head.rpartition(_SEPARATOR)
        return (name, arguments) if mark and call.endswith(_FENCE_END) else None

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        head, begin, arguments = open_block(text, _BEGIN, self.end).partition(self._between)
        name = head.rpartition(_SEPARATOR)[2]
        if not begin or name not in tools:
            return None
        return ParsedCall(name, arguments.partition(_FENCE_END)[0] if self._between == _FENCE else arguments)


class DeepSeekTags:
    """The format since V3.2."""

    begin = "<｜DSML｜"
    end = "</｜DSML｜function_calls>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        at = text.find("<｜DSML｜function_calls>")
        if at >= 0:
            sections, content = _SECTION.findall(up_to_last(text, self.end)), text[:at].removesuffix("\n\n")
        else:
            start = text.find("<｜DSML｜invoke")
            if start < 0:
                return ParsedCalls(text, [])
            before = text[: text.find(_DSML)]
            mark = next((mark for mark in ("</", "<") if before.endswith(mark)), "")
            sections, content = [text[start:]], before.removesuffix(mark).removesuffix("\n\n")
        calls = [call for section in sections for match in _INVOKE.finditer(section) for call in _parsed_calls(match)]
        return ParsedCalls(content, known_calls(calls, tools))

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        found = list(_INVOKE.finditer(text))
        if not found or found[-1]["closed"] or found[-1]["end"] or found[-1]["name"] not in tools:
            return None
        body = found[-1]["body"]
        if body.lstrip().startswith("{"):
            return ParsedCall(found[-1]["name"], body.strip())
        return ParsedCall(found[-1]["name"], open_json(_values(body)))


def _parsed_calls(match: re.Match[str]) -> list[ParsedCall]:
    """Return the call of one tag; an empty list if the engine drops the call."""
    name, body = match["name"].strip(), match["body"] or ""
    if not (match["closed"] or match["end"]):
        return []
    try:
        if body.strip().startswith("{"):
            parsed = json.loads(body.strip(), parse_constant=_refuse_constant)
            return [ParsedCall(name, to_json(parsed))]
        closed = up_to_last(body, _PARAMETER_END)
        rest = _PARAMETER.sub("", closed) + body[len(closed) :]
        if _DSML in rest or (not _PARAMETER.search(closed) and rest.strip()):
            return []
        return [ParsedCall(name, to_json(_values(body)))]
    except ValueError:
        return []


def _values(body: str) -> dict[str, Any]:
    return {
        name: _value(value.strip(), text=kind == "true")
        for name, kind, value in _PARAMETER.findall(up_to_last(body, _PARAMETER_END))
    }


def _value(value: str, *, text: bool) -> Any:
    if text:
        return value
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except ValueError:
        return value


def _refuse_constant(value: str) -> Any:
    raise ValueError(f"{value} is not JSON")
