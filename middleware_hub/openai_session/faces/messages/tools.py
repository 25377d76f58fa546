"""Tools: definitions to chat functions, those that are loaded later, and which of them may be called.

A tool with `defer_loading` is not shown to the model until a `tool_reference` in a tool's result names it. Its
definition is written there, so that what stands before does not change; from then on the engine may parse calls of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.faces.messages.errors import invalid

#: Fields of a tool that say nothing to a model.
HARMLESS = frozenset({"type", "cache_control", "eager_input_streaming"})
READ = frozenset(
    {"name", "description", "input_schema", "strict", "input_examples", "defer_loading", "allowed_callers"}
)
DIRECT = ["direct"]


class MessagesTools:
    """The tools of one request."""

    def __init__(self, given: object) -> None:
        self._functions: dict[str, dict[str, Any]] = {}
        self._schemas: dict[str, Any] = {}
        self._shown: dict[str, dict[str, Any]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        if given is None:
            return
        if not isinstance(given, list):
            raise invalid("tools", "Input should be a valid list")
        for place, tool in enumerate(given):
            self._add(tool, f"tools.{place}")

    def _add(self, tool: object, where: str) -> None:
        if not isinstance(tool, Mapping):
            raise invalid(where, "Input should be an object")
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise invalid(
                where, f"{str(kind)[:64]!r} is not available here: only tools that the client runs and defines"
            )
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise invalid(where, "a tool needs a name and an input_schema")
        if name in self._schemas:
            raise invalid("tools", "Tool names must be unique.")
        _refuse_unknown(tool, where)
        self._schemas[name] = schema
        self._functions[name] = _function(tool, name, schema, where)
        if not tool.get("defer_loading"):
            self._shown[name] = self._functions[name]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Those that are shown from the beginning."""
        return [*self._shown.values()]

    @property
    def loaded(self) -> list[dict[str, Any]]:
        """Those that were loaded by a reference, in the order in which they were."""
        return [*self._loaded.values()]

    @property
    def callable(self) -> list[dict[str, Any]]:
        """Those that may be called now."""
        return [*self._shown.values(), *self._loaded.values()]

    def schema(self, name: str) -> Any:
        """What a tool's input must be; None where no such tool is given."""
        return self._schemas.get(name)

    def reference(self, name: object, where: str) -> str:
        """What the model is told of a tool that a reference names, which may be called from now on.

        Raises:
            BadRequest: no tool has this name.
        """
        if not isinstance(name, str) or name not in self._schemas:
            raise invalid(where, f"Tool reference {str(name)[:64]!r} not found in available tools")
        tool = self._functions[name]
        if name not in self._shown:
            self._loaded[name] = tool
        return f"<function>{orjson.dumps(tool['function']).decode()}</function>"

    def added(self, tool: object, where: str) -> str:
        """The same for a tool that a system message adds, by its name or by value.

        Raises:
            BadRequest: it is none, or one that only Anthropic runs.
        """
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or kind not in ("tool_reference", "tool_definition"):
            raise invalid(where, f"{str(kind)[:64]!r} is not available here")
        if kind == "tool_reference":
            return self.reference(tool.get("name"), where)
        definition = tool.get("definition")
        if not isinstance(definition, Mapping):
            raise invalid(f"{where}.definition", "Input should be an object")
        self._add({**definition, "defer_loading": True}, f"{where}.definition")
        return self.reference(definition["name"], where)


def _refuse_unknown(tool: Mapping[str, Any], where: str) -> None:
    unknown = tool.keys() - HARMLESS - READ
    if unknown:
        raise invalid(f"{where}.{min(unknown)}", "Extra inputs are not permitted")
    if tool.get("allowed_callers") not in (None, DIRECT):
        raise invalid(f"{where}.allowed_callers", "only 'direct' is available here")


def _function(tool: Mapping[str, Any], name: str, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    description = tool.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise invalid(f"{where}.description", "Input should be a valid string")
        function["description"] = description
    examples = tool.get("input_examples")
    function["parameters"] = {**schema, "examples": examples} if examples else schema
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def choice_of(given: object, tools: MessagesTools) -> dict[str, Any]:
    """The chat request's fields for a `tool_choice`.

    Raises:
        BadRequest: it is none, or wants a tool that is not there.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid("tool_choice", "Input should be an object")
    kind = given.get("type")
    fields: dict[str, Any] = {"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") else {}
    names = [tool["function"]["name"] for tool in tools.callable]
    if kind in ("any", "tool") and not names:
        raise invalid("tool_choice", "tools must be given where one of them must be used")
    if kind == "tool":
        name = given.get("name")
        if name not in names:
            raise invalid("tool_choice", f"Tool {str(name)[:64]!r} not found in provided tools")
        return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}
    chosen = {"auto": "auto", "any": "required", "none": "none"}.get(kind) if isinstance(kind, str) else None
    if chosen is None:
        raise invalid("tool_choice.type", "Input should be 'auto', 'any', 'tool' or 'none'")
    return {**fields, "tool_choice": chosen} if names else {}
