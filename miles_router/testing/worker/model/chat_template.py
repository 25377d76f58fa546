"""The toy vocabulary's chat template: ChatML with tools, as Qwen models use it."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_TOOLS_INTRO = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_OUTRO = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def render_chatml(messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None) -> str:
    """Render a conversation up to and including the assistant's header."""
    rest = list(messages)
    parts: list[str] = []
    system = _text_of(rest.pop(0)) if rest and rest[0].get("role") == "system" else None
    if tools or system is not None:
        parts.append(_turn("system", "\n\n".join(filter(None, [system, _tools_text(tools)]))))
    parts.extend(_render(message) for message in rest)
    return "".join(parts) + "<|im_start|>assistant\n"


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _tools_text(tools: Sequence[Any] | None) -> str:
    if not tools:
        return ""
    return _TOOLS_INTRO + "".join("\n" + orjson.dumps(tool).decode() for tool in tools) + _TOOLS_OUTRO


def _render(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "user"))
    if role == "tool":
        return _turn("user", f"<tool_response>\n{_text_of(message)}\n</tool_response>")
    calls = "".join("\n" + _tool_call_text(call) for call in message.get("tool_calls") or ())
    return _turn(role, (_text_of(message) + calls).removeprefix("\n"))


def _tool_call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", "{}")
    encoded = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    name = orjson.dumps(function.get("name", "")).decode()
    return f'<tool_call>\n{{"name": {name}, "arguments": {encoded}}}\n</tool_call>'


def _text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text; for a list of content parts, the joined text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
