"""Tools of an agent: what a model calls, and what it is told of it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
#: A tool's answer, or that and the reward of the call.
ToolAnswer = str | tuple[str, float]


class ToolError(Exception):
    """Raised by a tool: the model is told its message. Every other error ends the rollout."""


@dataclass(frozen=True)
class FunctionTool:
    """A tool.

    Attributes:
        call: a coroutine function that takes the call's arguments by their names.
        schema: the OpenAI schema that the chat template shows the model.
    """

    name: str
    call: Callable[..., Awaitable[ToolAnswer]]
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FunctionCall:
    """A call that a model wrote; `arguments` is JSON as it wrote it."""

    name: str
    arguments: str


def hermes_calls(text: str) -> list[FunctionCall]:
    """The calls in a text of models that write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen's
    do. What is no such object is a call of no name, which the model is told of."""
    calls = []
    for written in _CALL.findall(text):
        try:
            parsed = json.loads(written)
            calls.append(FunctionCall(str(parsed["name"]), json.dumps(parsed["arguments"], ensure_ascii=False)))
        except (json.JSONDecodeError, KeyError, TypeError):
            calls.append(FunctionCall("", written.strip()))
    return calls


async def call_tool(call: FunctionCall, tools: Mapping[str, FunctionTool]) -> tuple[str, float | None]:
    """What the model is told of its call, and the reward of it; of a call that cannot be made, why, and 0."""
    if not call.name:
        return f"Invalid tool call: {call.arguments}", 0.0
    tool = tools.get(call.name)
    if tool is None:
        return f"Unknown function '{call.name}'. Available tools: {list(tools)}", 0.0
    try:
        arguments = json.loads(call.arguments)
        inspect.signature(tool.call).bind(**arguments)
    except (json.JSONDecodeError, TypeError) as error:
        return f"Invalid arguments for '{call.name}': {error}", 0.0
    try:
        result = await tool.call(**arguments)
    except ToolError as error:
        return f"Error executing tool '{call.name}': {error}", 0.0
    return result if isinstance(result, tuple) else (result, None)


def shorten(text: str, length: int, side: str) -> str:
    """A text of at most `length` characters, and a note where it was longer: at its left, right or middle."""
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - length :]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
