"""Converts tool definitions to chat functions, loads deferred tools, and translates `tool_choice`.

A tool with `defer_loading` is hidden from the model until a `tool_reference` in a tool result names it. The definition
is written into that result, so the prompt before it stays the same. From then on the engine may parse calls of it. A
definition in a recorded turn stays as it is, even if a later request changes or drops the tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.agent_api import UnknownFields
from middleware_hub.openai_session.agent_apis.messages.errors import invalid, unknown_field
from middleware_hub.openai_session.sessions.messages import Message, parse_text

#: Fields of a tool that do not affect the model.
HARMLESS = frozenset({"type", "cache_control", "eager_input_streaming"})
READ = frozenset(
    {"name", "description", "input_schema", "strict", "input_examples", "defer_loading", "allowed_callers"}
)
DIRECT = ["direct"]
#: The tags around a definition in a message.
BEGIN, END = "<function>", "</function>"
#: Roles of the messages in which `MessagesTools.load_reference` writes definitions. A user may write such tags, too.
DEFINING = ("system", "tool")


class HeldFunctions:
    """The functions that the recorded messages of a session define."""

    def __init__(self) -> None:
        self._in_results: dict[tuple[str | None, str], dict[str, Any]] = {}
        self._latest: dict[str, dict[str, Any]] = {}
        #: Whether the session has a recorded turn.
        self.began = False

    def add(self, message: Message) -> None:
        """Read the definitions in a recorded message, if it has some."""
        content = message.get("content")
        if message.get("role") not in DEFINING or not isinstance(content, str):
            return
        for line in content.split("\n") if BEGIN in content else ():
            if line.startswith(BEGIN) and line.endswith(END):
                self._read(line[len(BEGIN) : -len(END)], message.get("tool_call_id"))

    def _read(self, text: str, call_id: str | None) -> None:
        try:
            function = parse_text(text)
        except ValueError:  # text that a tool wrote between such tags
            return
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            tool = {"type": "function", "function": function}
            self._in_results.setdefault((call_id, name), tool)
            self._latest[name] = tool

    def defined_by(self, call_id: str | None, name: str) -> dict[str, Any] | None:
        """Return the tool that the result of this call defined; `call_id` None means a system message."""
        return self._in_results.get((call_id, name))

    def last_definition(self, name: str) -> dict[str, Any] | None:
        """Return a tool that the request no longer defines: its last recorded definition, or only its name; None in a
        first turn."""
        return self._latest.get(name) or ({"type": "function", "function": {"name": name}} if self.began else None)


class MessagesTools:
    """The tools of one request."""

    def __init__(self, given: object, held: HeldFunctions | None = None, unknown: UnknownFields | None = None) -> None:
        self._held = held or HeldFunctions()
        self._unknown = unknown or UnknownFields(refuses=True)
        self._functions: dict[str, dict[str, Any]] = {}
        self._schemas: dict[str, Any] = {}
        self._shown: dict[str, dict[str, Any]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._gone: dict[str, Any] = {}  # schemas of tools that only recorded messages define
        self._left_out: list[str] = []
        if given is None:
            return
        if not isinstance(given, list):
            raise invalid("tools", "Input should be a valid list")
        for place, tool in enumerate(given):
            self._add(tool, f"tools.{place}", again=self._held.began)

    def _add(self, tool: object, where: str, *, again: bool = False) -> None:
        """Add a tool.

        Args:
            again: leave out a different tool under a name that is taken, instead of refusing it.
        """
        if not isinstance(tool, Mapping):
            raise invalid(where, "Input should be an object")
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise invalid(
                where, f"a tool of type {str(kind)[:64]!r} is not available: define only tools that the client runs"
            )
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise invalid(where, "a tool needs a name and an input_schema")
        self._refuse(tool, where)
        function = _function(tool, name, schema, where)
        if self._functions.setdefault(name, function) != function:
            if not again:
                raise invalid(where, f"Tool names must be unique: two different tools have the name {name[:64]!r}.")
            self._left_out.append(name[:64])
            return
        self._schemas[name] = schema
        if not tool.get("defer_loading"):
            self._shown[name] = self._functions[name]

    def _refuse(self, tool: Mapping[str, Any], where: str) -> None:
        if (name := self._unknown.refused(tool, HARMLESS | READ, f"{where}.")) is not None:
            raise unknown_field(name)
        if tool.get("allowed_callers") not in (None, DIRECT):
            raise invalid(f"{where}.allowed_callers", "Input should be ['direct'] in a traced session")

    @property
    def facts(self) -> dict[str, Any]:
        """The tools that were left out, for the turn's record."""
        return {"tools_left_out": self._left_out} if self._left_out else {}

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools that the model sees from the beginning."""
        return [*self._shown.values()]

    @property
    def loaded(self) -> list[dict[str, Any]]:
        """The tools that a reference loaded, in the order of loading."""
        return [*self._loaded.values()]

    @property
    def callable(self) -> list[dict[str, Any]]:
        """All tools that the model may call now."""
        return [*self._shown.values(), *self._loaded.values()]

    def schema(self, name: str) -> Any:
        """Return the input schema of a tool, or None for an unknown tool."""
        return self._schemas.get(name, self._gone.get(name))

    def load_reference(self, name: object, where: str, call_id: str | None = None) -> str:
        """Return the definition to show the model for a `tool_reference`, and load the tool.

        Args:
            call_id: the call whose result contains the reference; None for a system message.

        Raises:
            BadRequest: no tool has this name, and the session has no recorded turn.
        """
        tool = self._named(name, call_id) if isinstance(name, str) else None
        if tool is None or not isinstance(name, str):
            raise invalid(where, f"Tool reference {str(name)[:64]!r} not found in available tools")
        if name not in self._shown:
            self._loaded[name] = tool
        return f"{BEGIN}{orjson.dumps(tool['function']).decode()}{END}"

    def _named(self, name: str, call_id: str | None) -> dict[str, Any] | None:
        """Return a tool as a recorded message defined it, else from the request, else the last known definition."""
        recorded = self._held.defined_by(call_id, name)
        if recorded is None and name in self._schemas:
            return self._functions[name]
        recorded = recorded or self._held.last_definition(name)
        if recorded is not None:
            self._gone[name] = recorded["function"].get("parameters")
        return recorded

    def load_added(self, tool: object, where: str) -> str:
        """Load the tool that a system message adds, by name or by value; return its definition to show the model.

        Raises:
            BadRequest: the tool is invalid, or runs on Anthropic's servers only.
        """
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or kind not in ("tool_reference", "tool_definition"):
            raise invalid(where, f"type {str(kind)[:64]!r} is not available in a traced session")
        if kind == "tool_reference":
            return self.load_reference(tool.get("name"), where)
        definition = tool.get("definition")
        if not isinstance(definition, Mapping):
            raise invalid(f"{where}.definition", "Input should be an object")
        self._add({**definition, "defer_loading": True}, f"{where}.definition")
        return self.load_reference(definition["name"], where)


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
    """Return the chat request's fields for a `tool_choice`.

    Raises:
        BadRequest: the value is invalid, or names a tool that is not given.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid("tool_choice", "Input should be an object")
    kind = given.get("type")
    fields: dict[str, Any] = {"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") else {}
    names = [tool["function"]["name"] for tool in tools.callable]
    if kind in ("any", "tool") and not names:
        raise invalid("tool_choice", f"type {kind!r} needs at least one tool in `tools`")
    if kind == "tool":
        name = given.get("name")
        if name not in names:
            raise invalid("tool_choice", f"Tool {str(name)[:64]!r} not found in provided tools")
        return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}
    chosen = {"auto": "auto", "any": "required", "none": "none"}.get(kind) if isinstance(kind, str) else None
    if chosen is None:
        raise invalid("tool_choice.type", "Input should be 'auto', 'any', 'tool' or 'none'")
    return {**fields, "tool_choice": chosen} if names else {}
