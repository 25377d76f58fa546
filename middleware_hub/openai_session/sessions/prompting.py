"""Tools and template settings of a chat request, as SGLang passes them to the chat template (0.5.23, `protocol.py`).

Only this module reads them, because they decide both how a turn is rendered and which turn it may continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

#: Named reasoning efforts; any other effort is a number.
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
#: Fields of a function that SGLang's request model keeps; the first three are always present, null if not sent.
REQUIRED_FUNCTION_FIELDS = ("description", "name", "parameters")
FUNCTION_FIELDS = (*REQUIRED_FUNCTION_FIELDS, "strict", "defer_loading")
#: Fields of a request that set template settings.
SETTINGS = frozenset({"chat_template_kwargs", "reasoning", "reasoning_effort"})
TRUE_WORDS = frozenset({"1", "true", "yes", "y", "on"})


class Context:
    """The tools and template settings that a conversation is rendered with.

    Contexts that a template cannot tell apart are equal and have equal keys. The order of names in an object does
    not matter.
    """

    __slots__ = ("key", "template_kwargs", "tools")

    def __init__(self, tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]) -> None:
        self.tools = tools
        self.template_kwargs = template_kwargs
        read = [[prepared_tool(tool) for tool in tools] if tools else None, template_kwargs]
        self.key = orjson.dumps(read, option=orjson.OPT_SORT_KEYS) if tools or template_kwargs else b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def read_key(key: bytes) -> tuple[Sequence[Any] | None, Mapping[str, Any]]:
    """Return the tools and template settings of a `Context.key`; (None, {}) for the key of a completion."""
    tools, template_kwargs = orjson.loads(key) if key.startswith(b"[") else (None, {})
    return tools and [_sent_tool(tool) for tool in tools], template_kwargs


def shows_tools(key: bytes) -> bool:
    """Return True if the context with this key has tools."""
    return key.startswith(b"[[")


def _sent_tool(tool: Any) -> Any:
    """Return a prepared tool without its null fields, which the client need not have sent."""
    return {name: value for name, value in tool.items() if value is not None} if isinstance(tool, Mapping) else tool


def contexts_of(request: Mapping[str, Any]) -> tuple[Context, ...]:
    """Return the contexts in which a request may continue a recorded turn.

    The first is the context that the engine renders for this request, without tools that `tool_choice` excludes. If
    some are excluded, the second context has all tools: the request may also continue a turn that showed them all.
    """
    settings, shown, every_tool = settings_of(request), tools_of(request), _all_tools(request)
    own = Context(shown, settings)
    if shown is every_tool:
        return (own,)
    every = Context(every_tool, settings)
    return (own,) if own == every else (own, every)


def prepared_tool(tool: Any) -> Any:
    """Return a tool as SGLang's request model writes it, with the function's fields in the order in which they came."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    sent = tool["function"]
    known = {name: sent[name] for name in sent if name in FUNCTION_FIELDS}
    function = {**known, **{name: None for name in REQUIRED_FUNCTION_FIELDS if name not in known}}
    kept = {name: value for name, value in function.items() if value is not None or name in REQUIRED_FUNCTION_FIELDS}
    return {"type": tool.get("type", "function"), "function": kept, "defer_loading": tool.get("defer_loading")}


def tools_of(request: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the template renders: None if `tool_choice` is "none", or only the tool that it names."""
    tools, choice = _all_tools(request), request.get("tool_choice")
    if tools is None or choice == "none":
        return None
    if isinstance(choice, Mapping):
        return [tool for tool in tools if _name(tool) == _name(choice)] or None
    return tools


def _all_tools(request: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a request; None without tools. The engine refuses tools that are not a list."""
    tools = request.get("tools")
    return tools if isinstance(tools, list) and tools else None


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def settings_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template settings of `chat_template_kwargs`, `reasoning_effort` and `reasoning`."""
    if SETTINGS.isdisjoint(request):  # the common case
        return {}
    reasoning = request.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, Mapping) else {}
    named = (reasoning.get("effort"), reasoning.get("reasoning_effort"), request.get("reasoning_effort"))
    effort = _effort(next((each for each in named if each is not None), None))
    thinking = effort != "none" if effort is not None else True if _enabled(reasoning) else None
    given = request.get("chat_template_kwargs")
    settings = dict(given) if isinstance(given, Mapping) else {}
    if thinking is not None:
        settings = {"thinking": thinking, "enable_thinking": thinking, **settings}
    return settings if effort is None else {"reasoning_effort": effort, **settings}


def _effort(value: object) -> str | float | None:
    if isinstance(value, str) and value in EFFORTS:
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None  # missing, or invalid and refused by the engine
    try:
        return float(value)
    except ValueError:
        return None


def _enabled(reasoning: Mapping[str, Any]) -> bool:
    enabled = reasoning.get("enabled")
    if enabled is None:
        enabled = reasoning.get("enable", False)
    return enabled.strip().lower() in TRUE_WORDS if isinstance(enabled, str) else bool(enabled)
