"""DeepSeek V4: tags in `<｜DSML｜tool_calls>`, read tag by tag (SGLang 0.5.23, `deepseek_recipe_output.py`, and
deepseek-recipe 0.2.0 behind it). Pure.

The engine passes arguments on as they are sampled, also for a cut call, and does not drop calls of unknown tools. Tags
in an order that the model is not trained on raise `Unparsable`: the engine's result for them is not reproduced here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from miles_router.engines.parsers.reading import (
    ParsedCall,
    ParsedCalls,
    Tools,
    Unparsable,
    partial_mark_length,
    to_json,
)
from miles_router.engines.parsers.thinking import Split

_OPEN, _THINK, _THOUGHT = "<｜DSML｜", "<think>", "</think>"
_SECTION = re.compile(r"<｜DSML｜tool_calls>\s*")
_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"<>]+)">\s*')
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"<>]*)" string="(true|false)">(.*?)</｜DSML｜parameter>\s*', re.DOTALL
)
_INVOKED = re.compile(r"</｜DSML｜invoke>\s*")
_NAME = re.compile(r'<｜DSML｜invoke name="([^"<>]*)("?)')
_HEAD = re.compile(r'<｜DSML｜parameter name=("[^"<>]*"?)?')
_KIND = re.compile(r' string="(true|false)">')
_SECTION_END, _INVOKE_END, _PARAMETER_END = "</｜DSML｜tool_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>"


class DeepSeekV4Thinking:
    """The format of reasoning. Newlines around the reasoning, and in front of the content, are dropped."""

    def split(self, text: str, *, thinking: bool) -> Split:
        at = _end_of_reasoning(text) if thinking else 0
        reasoning = text[:at].strip("\n") if at < len(text) else text.lstrip("\n")
        rest = text[at:].removeprefix(_THOUGHT) if thinking else text
        if _THOUGHT in rest or _THINK in text:
            raise Unparsable("reasoning begins or ends twice")
        return Split(reasoning, rest.lstrip("\n"))

    def split_certain(self, text: str, *, thinking: bool) -> Split:
        at = _end_of_reasoning(text) if thinking else 0
        if not thinking or at < len(text):
            return self.split(text, thinking=thinking)
        held = max(partial_mark_length(text, _THOUGHT), partial_mark_length(text, _OPEN))
        return Split(text[: len(text) - held].strip("\n"), None)


def _end_of_reasoning(text: str) -> int:
    ends = [at for mark in (_THOUGHT, _OPEN) if (at := text.find(mark)) >= 0]
    return min(ends, default=len(text))


class DeepSeekV4:
    """The format of tool calls."""

    begin = _OPEN
    end = "</｜DSML｜invoke>"

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        text = text.lstrip("\n")
        at = text.find(_OPEN)
        if at < 0:
            return ParsedCalls(text, [])
        return ParsedCalls(text[:at].rstrip("\n"), list(_calls(text[at:])))

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        """Return None: `read` returns incomplete calls too, as the engine does."""
        return None


def _calls(text: str) -> Iterator[ParsedCall]:
    """Yield the calls of a section. The last one may be incomplete.

    Raises:
        Unparsable: the text does not follow the format.
    """
    section = _SECTION.match(text)
    at = section.end() if section is not None else 0
    while invoke := _INVOKE.match(text, at):
        arguments, at = "", invoke.end()
        while parameter := _PARAMETER.match(text, at):
            name, kind, value = parameter.groups()
            arguments += f'{_separator(arguments)}"{name}": {_value(value, kind)}' + ('"' if kind == "true" else "")
            at = parameter.end()
        end = _INVOKED.match(text, at)
        if end is None:
            yield ParsedCall(invoke[1], arguments + _unfinished_arguments(text[at:], _separator(arguments)))
            return
        at = end.end()
        yield ParsedCall(invoke[1], (arguments or "{") + "}")
    name = _NAME.fullmatch(text, at)
    if name is not None and name[2]:
        yield ParsedCall(name[1], "")
    elif name is None and not text.startswith(_SECTION_END, at):
        _expect(text[at:], _SECTION_END, '<｜DSML｜invoke name="', *([] if at else ["<｜DSML｜tool_calls>"]))


def _unfinished_arguments(text: str, lead: str) -> str:
    """Return the JSON that the engine shows for an incomplete parameter, or for an incomplete end of a call."""
    head = _HEAD.match(text)
    if head is None:
        _expect(text, _INVOKE_END, "<｜DSML｜parameter name=")
        return "" if len(text) <= len("<｜DSML｜") or text[1] != "/" else lead.strip(", ") + "}"
    key, rest = head[1] or "", text[head.end() :]
    if len(key) < 2 or key[-1] != '"' or not rest:
        _expect(rest, "")
        return lead + key
    kind = _KIND.match(rest)
    if kind is None:
        _expect(rest, ' string="true">', ' string="false">')
        return f"{lead}{key}: "
    value, closed, end = rest[kind.end() :].partition("</｜DSML｜")
    _expect("</｜DSML｜" + end, _PARAMETER_END)
    return f"{lead}{key}: {_value(value, kind[1])}" + ('"' if closed and kind[1] == "true" else "")


def _separator(arguments: str) -> str:
    return ", " if arguments else "{"


def _value(value: str, kind: str) -> str:
    """Return the JSON of a value, for a string without the closing quote. Other values pass unchecked."""
    if "｜DSML｜" in value:
        raise Unparsable("a tag inside a value")
    return to_json(value)[:-1] if kind == "true" else value


def _expect(text: str, *ways: str) -> None:
    """Raise `Unparsable` if the text is not a prefix of one of `ways`."""
    if not any(way.startswith(text) for way in ways):
        raise Unparsable("a tool call does not follow the format")
