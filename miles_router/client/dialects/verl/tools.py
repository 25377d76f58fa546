"""Tools of an agent: the calls that a model writes, and the answers that it gets."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
#: A tool's answer, or a pair of the answer and the reward of the call.
ToolAnswer = str | tuple[str, float]


class ToolError(Exception):
    """An error that a tool raises for the model: the model gets the message. Every other error ends the rollout."""


@dataclass(frozen=True)
class FunctionTool:
    """A tool.

    Attributes:
        call: an async function that takes the call's arguments by name.
        schema: the OpenAI schema that the chat template shows the model.
    """

    name: str
    call: Callable[..., Awaitable[ToolAnswer]]
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FunctionCall:
    """A tool call in a model's text; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


def hermes_calls(text: str) -> list[FunctionCall]:
    """Return the calls in a text of models that write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, such
    as Qwen's. A malformed call becomes one without a name, which the model gets an error for."""
    calls = []
    for written in _CALL.findall(text):
        try:
            parsed = json.loads(written)
            calls.append(FunctionCall(str(parsed["name"]), json.dumps(parsed["arguments"], ensure_ascii=False)))
        except (json.JSONDecodeError, KeyError, TypeError):
            calls.append(FunctionCall("", written.strip()))
    return calls


async def call_tool(call: FunctionCall, tools: Mapping[str, FunctionTool]) -> tuple[str, float | None]:
    """Make a call, and return the answer for the model and the reward. If the call is invalid or the tool raises
    `ToolError`, the answer is the error and the reward 0."""
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
    """Return the text cut to at most `length` characters plus a note, at its left, right or middle."""
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - length :]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
