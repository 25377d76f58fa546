"""What of a chat request reaches the chat template beside the messages, as SGLang reads it (0.5.23, `protocol.py`).

It is read here and nowhere else: what a turn is rendered with, and whether it may continue another, is one question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

#: Efforts with a name; any other is a number.
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
#: What a function keeps on its way through the request model of SGLang.
ALWAYS_OF_A_FUNCTION = ("description", "name", "parameters")
OF_A_FUNCTION = (*ALWAYS_OF_A_FUNCTION, "strict", "defer_loading")
#: What a request sets the template with.
SETTINGS = frozenset({"chat_template_kwargs", "reasoning", "reasoning_effort"})
YES = frozenset({"1", "true", "yes", "y", "on"})


class Context:
    """What a conversation is rendered with beside its messages. Contexts that a template cannot tell apart are equal,
    and so are their keys; the order of the names in an object counts for nothing."""

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
    """Return the tools and template settings of which a `Context.key` was made; of a completion's key, none."""
    tools, template_kwargs = orjson.loads(key) if key.startswith(b"[") else (None, {})
    return tools and [_sent_tool(tool) for tool in tools], template_kwargs


def shows_tools(key: bytes) -> bool:
    """Whether the context of a key has tools."""
    return key.startswith(b"[[")


def _sent_tool(tool: Any) -> Any:
    """A prepared tool without what its sender need not have said."""
    return {name: value for name, value in tool.items() if value is not None} if isinstance(tool, Mapping) else tool


def contexts_of(request: Mapping[str, Any]) -> tuple[Context, ...]:
    """What a request may be rendered with.

    The first is what the engine's template is given for this request. It leaves out tools that `tool_choice` does not
    allow; where all of them were shown before, the request goes on there as well, and that is the second.
    """
    settings, shown, every_tool = settings_of(request), tools_of(request), _every_tool(request)
    own = Context(shown, settings)
    if shown is every_tool:
        return (own,)
    every = Context(every_tool, settings)
    return (own,) if own == every else (own, every)


def prepared_tool(tool: Any) -> Any:
    """One tool as SGLang's request model writes it: the function's fields in the order they were sent."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    sent = tool["function"]
    known = {name: sent[name] for name in sent if name in OF_A_FUNCTION}
    function = {**known, **{name: None for name in ALWAYS_OF_A_FUNCTION if name not in known}}
    kept = {name: value for name, value in function.items() if value is not None or name in ALWAYS_OF_A_FUNCTION}
    return {"type": tool.get("type", "function"), "function": kept, "defer_loading": tool.get("defer_loading")}


def tools_of(request: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the template is told of: none where none may be called, the one that must be."""
    tools, choice = _every_tool(request), request.get("tool_choice")
    if tools is None or choice == "none":
        return None
    if isinstance(choice, Mapping):
        return [tool for tool in tools if _name(tool) == _name(choice)] or None
    return tools


def _every_tool(request: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a request; what is no list of them is for the engine to refuse."""
    tools = request.get("tools")
    return tools if isinstance(tools, list) and tools else None


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def settings_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The template's settings: `chat_template_kwargs`, and what `reasoning_effort` and `reasoning` mean for them."""
    if SETTINGS.isdisjoint(request):  # as of most
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
        return None  # none, or one that the engine refuses
    try:
        return float(value)
    except ValueError:
        return None


def _enabled(reasoning: Mapping[str, Any]) -> bool:
    enabled = reasoning.get("enabled")
    if enabled is None:
        enabled = reasoning.get("enable", False)
    return enabled.strip().lower() in YES if isinstance(enabled, str) else bool(enabled)
