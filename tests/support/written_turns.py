"""Answers as models of several families write them, for parsers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "exact": {"type": "boolean"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                },
            },
        },
    },
]


@dataclass(frozen=True)
class Family:
    """A family, by the engine's names for its parsers, and turns in its writing."""

    calls: str
    thinking: str
    turns: tuple[str, ...]


def _coder(name: str, *parameters: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def _glm(name: str, *parameters: tuple[str, str]) -> str:
    written = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in parameters)
    return f"<tool_call>{name}{written}</tool_call>"


def _kimi(*calls: tuple[str, str]) -> str:
    written = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _minimax(*calls: tuple[str, tuple[tuple[str, str], ...]]) -> str:
    written = ""
    for name, parameters in calls:
        inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters)
        written += f'<invoke name="{name}">\n{inner}</invoke>\n'
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def _marks(*calls: tuple[str, str]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _fenced(*calls: tuple[str, str]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _tags(*calls: tuple[str, str], section: str = "function_calls") -> str:
    written = "".join(f'<｜DSML｜invoke name="{name}">\n{body}\n</｜DSML｜invoke>\n' for name, body in calls)
    return f"<｜DSML｜{section}>\n{written}</｜DSML｜{section}>"


def _channel(name: str, text: str, end: str = "<|end|>", begin: str = "<|start|>assistant") -> str:
    return f"{begin}<|channel|>{name}<|message|>{text}{end}"


def _invoked(name: str, arguments: str) -> str:
    return _channel(f"commentary to=functions.{name} <|constrain|>json", arguments, "<|call|>")


_TAG = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
_ADD, _WRITE = '{"a":1, "b": 2.5}', '{"path": "ä.txt", "lines": ["x\\n", "<tool_call>"], "options": {"k": null}}'
_THOUGHT = "<think>\nWhy < not?\n</think>\n\n"


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


_A = _TAG.format("a", "false", "17")
_LINES = _TAG.format("lines", "false", ' ["x\\n",  1]')
_WHY = _channel("analysis", "Why < not?", begin="")


def _v4(*calls: tuple[str, str]) -> str:
    return _tags(*calls, section="tool_calls")


FAMILIES = {
    "qwen3": Family(
        "qwen25",
        "qwen3",
        (
            f"{_THOUGHT}It is 42, 世界 😀.",
            f"{_THOUGHT}I add.\n{_hermes('add', _ADD)}",
            f"{_hermes('add', _ADD)}\n{_hermes('write_file', _WRITE)}",
            f"I call {_hermes('none', _ADD)} and <tool_call>\nno json\n</tool_call> too",
        ),
    ),
    "qwen3.5": Family(
        "qwen3_coder",
        "qwen3",
        (
            f"{_THOUGHT}I add. {_coder('add', ('a', '17'), ('b', '2.0'), ('exact', 'True'))}",
            f"{_coder('write_file', ('path', 'a'), ('lines', '[1, 2]'), ('options', 'null'))}\n{_coder('add')}",
            f"{_coder('write_file', ('options', chr(39).join(('{', 'a', ': 1}'))), ('other', '3'))}",
        ),
    ),
    "glm-4.7": Family(
        "glm47",
        "glm45",
        (
            f"{_THOUGHT}I add.{_glm('add', ('a', '17'), ('b', '2.5'))}{_glm('add', ('a', 'x'))} Done.",
            f"{_glm('write_file', ('path', '12'), ('lines', '[1, 2]'), ('options', '{}'), ('other', 'x'))}",
            f"{_glm('add')}",
        ),
    ),
    "kimi": Family(
        "kimi_k2",
        "kimi_k2",
        (
            f"{_THOUGHT}I add. {_kimi(('functions.add:0', _ADD), ('functions.write_file:1', _WRITE))}",
            f"<think>Then {_kimi(('add:3', _ADD))} and more",
        ),
    ),
    "minimax": Family(
        "minimax-m2",
        "minimax",
        (
            f"{_THOUGHT}I add.\n{_minimax(('add', (('a', '17'), ('b', '2.0'), ('exact', 'yes'))))} Done.",
            f"{_minimax(('write_file', (('path', '12'), ('lines', '[1]'), ('other', '3'))), ('add', ()))}",
        ),
    ),
    "deepseek": Family(
        "deepseekv32",
        "deepseek-v3",
        (
            f"{_THOUGHT}I add.\n\n{_tags(('add', _TAG.format('a', 'false', '17') + _TAG.format('b', 'true', ' x ')))}",
            f"{_tags(('write_file', _WRITE), ('none', ''), ('add', ''))}",
        ),
    ),
    "deepseekv31": Family(
        "deepseekv31",
        "deepseek-v3",
        (
            f"{_THOUGHT}I add. {_marks(('add', _ADD), ('write_file', _WRITE))}",
            f"{_marks(('none', _ADD), ('add', '{}'))} behind",
        ),
    ),
    "deepseekv3": Family(
        "deepseekv3",
        "deepseek-v3",
        (
            f"{_THOUGHT}I add. {_fenced(('add', _ADD), ('write_file', _WRITE))}",
            f"{_fenced(('none', _ADD), ('add', '{}'))} behind",
        ),
    ),
    "deepseekv4": Family(
        "deepseekv4",
        "deepseek-v4",
        (
            "It is 42, 世界 😀.\n",
            f"Why?\n</think>\n\nI add.\n\n{_v4(('add', _A + _TAG.format('b', 'true', ' x ')))}",
            f"{_v4(('write_file', _TAG.format('path', 'true', 'ä {') + _LINES), ('none', ''), ('add', ''))} behind",
        ),
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "gpt-oss",
        (
            f"{_WHY}{_channel('final', 'It is 42, 世界 😀.', '')}",
            f"{_WHY}{_channel('commentary', 'I add.')}{_invoked('add', _ADD)}",
            f"{_WHY}{_invoked('none', _ADD)}{_invoked('write_file', _WRITE)}commentary{_channel('final', 'A <|x|> B')}",
            f"{_channel('commentary to=add <|constrain|>json', '', '<|call|>', '')}{_invoked('add', 'no json')} behind",
        ),
    ),
}


def spoilt(text: str, source: random.Random) -> str:
    """A text that ends early, lacks something, or says something twice."""
    begin, end = sorted(source.sample(range(len(text) + 1), 2))
    return source.choice([text[:begin], text[:end], text[:begin] + text[end:], text[:end] + text[begin:], text[begin:]])


def cases(name: str, count: int) -> Iterator[str]:
    source, turns = random.Random(name), FAMILIES[name].turns
    yield from turns
    for _ in range(count):
        yield spoilt(source.choice(turns), source)
