"""What of a chat request reaches the chat template beside the messages, as SGLang reads it (0.5.23, `protocol.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Efforts with a name; any other is a number.
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
YES = frozenset({"1", "true", "yes", "y", "on"})


def tools_of(request: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the template is told of: none where none may be called, the one that must be."""
    tools, choice = request.get("tools"), request.get("tool_choice")
    if not isinstance(tools, list) or not tools or choice == "none":
        return None
    if isinstance(choice, Mapping):
        return [tool for tool in tools if _name(tool) == _name(choice)] or None
    return list(tools)


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def settings_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The template's settings: `chat_template_kwargs`, and what `reasoning_effort` and `reasoning` mean for them."""
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
