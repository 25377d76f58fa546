"""Converts tools to the functions that a chat template shows, and sampled calls back to items.

The function of a tool in a namespace has a name made of both names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from middleware_hub.openai_session.agent_apis.responses.errors import InvalidParameter, missing, unavailable, wrong_type
from middleware_hub.openai_session.agent_apis.responses.forms import CUSTOM, FORMS, FUNCTION, CallForm

#: Tools of OpenAI's servers that Codex sends with every request. They are left out, and the turn's record names them:
#: a model that does not see a tool does not call it, and agents work without these.
LEFT_OUT = frozenset({"web_search", "tool_search"})


class Named(NamedTuple):
    """The tool that a chat function stands for."""

    form: CallForm
    name: str
    namespace: str | None = None


class ResponsesTools:
    """The tools of a request.

    Attributes:
        shown: as chat functions.
        given: the tools that the model sees, as the request has them.
        left_out: the names of the other tools.
    """

    def __init__(self, given: object, *, began: bool = False) -> None:
        """Convert the `tools` of a request.

        Args:
            began: the session has recorded turns, so a different tool under a name that is taken is left out.

        Raises:
            InvalidParameter: a tool is invalid, cannot be run, or has the name of a different tool.
        """
        self._began = began
        self.shown: list[dict[str, Any]] = []
        self.given: list[Any] = []
        self.left_out: list[str] = []
        self._named: dict[str, Named] = {}
        self._functions: dict[str, dict[str, Any]] = {}
        if given is not None and not isinstance(given, list):
            raise wrong_type("tools", "an array")
        for place, tool in enumerate(given or ()):
            before = len(self.shown)
            self._add(tool, f"tools[{place}]")
            if len(self.shown) > before:
                self.given.append(tool)

    def of(self, name: str) -> Named:
        """Return the tool that a function stands for; an unknown name stands for a function of that name."""
        return self._named.get(name) or Named(FUNCTION, name)

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def call(self, call: Mapping[str, Any], item_id: str, status: str = "completed") -> dict[str, Any]:
        function = call["function"]
        named = self.of(function["name"])
        arguments = function.get("arguments") or ""
        fields = named.form.fields(arguments)
        if fields is None:  # the sampled arguments do not fit the tool: show the agent a plain function call
            named, fields = Named(FUNCTION, named.name), FUNCTION.fields(arguments)
        item: dict[str, Any] = {"type": named.form.kind, "id": item_id, "call_id": call["id"]}
        if named.form in (FUNCTION, CUSTOM):
            item["name"] = named.name
        if named.namespace is not None:
            item["namespace"] = named.namespace
        return {**item, **fields, **({"status": status} if named.form.status else {})}

    def _add(self, tool: object, where: str, space: Mapping[str, Any] | None = None) -> None:
        if not isinstance(tool, Mapping):
            raise wrong_type(where, "an object")
        kind = tool.get("type")
        if kind is not None and not isinstance(kind, str):
            raise wrong_type(f"{where}.type", "a string")
        if kind == "namespace" and space is None:
            for each, at in _members(tool, where):
                self._add(each, at, tool)
        elif kind in LEFT_OUT or tool.get("defer_loading"):  # OpenAI loads deferred tools by a tool search
            self.left_out.append(str(tool.get("name") or kind))
        elif kind not in FORMS:
            raise unavailable(f"{where}.type", f"The tool '{str(kind)[:64]}'")
        else:
            self._show(tool, FORMS[kind], where, space)

    def _show(self, tool: Mapping[str, Any], form: CallForm, where: str, space: Mapping[str, Any] | None) -> None:
        name = tool.get("name") if form in (FUNCTION, CUSTOM) else tool["type"]
        if not isinstance(name, str) or not name:
            raise missing(f"{where}.name")
        namespace = str(space["name"]) if space is not None else None
        shown = shown_name(name, namespace)
        description = tool.get("description")
        described = {"description": description} if isinstance(description, str) else {}
        function = {"name": shown, **described, **form.function(tool, where)}
        stands_for = Named(form, name, namespace)
        if shown not in self._named:
            self._named[shown] = stands_for
            self._functions[shown] = function
            self.shown.append({"type": "function", "function": function})
        elif (stands_for, function) != (self._named[shown], self._functions[shown]):
            if not self._began:
                raise InvalidParameter(f"{where}.name", f"Two different tools have the name '{shown[:64]}'.")
            self.left_out.append(shown)


def shown_name(name: str, namespace: object) -> str:
    """Return the function name for a tool, with its namespace if it has one."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def choice_of(given: object, tools: ResponsesTools) -> dict[str, Any]:
    """Return the chat request's fields for a `tool_choice`, with the tools that it allows.

    Raises:
        InvalidParameter: the value is invalid, or names a tool that is not given.
    """
    if given is None or isinstance(given, str):
        return _mode(given or "auto", tools, tools.shown)
    if not isinstance(given, Mapping):
        raise wrong_type("tool_choice", "a string or an object")
    if given.get("type") == "allowed_tools":
        chosen = given.get("tools") or []
        if not isinstance(chosen, list):
            raise wrong_type("tool_choice.tools", "an array")
        names = {_chosen(each, tools) for each in chosen}
        allowed = [tool for tool in tools.shown if tool["function"]["name"] in names]
        return _mode(given.get("mode"), tools, allowed)
    function = {"name": _chosen(given, tools)}
    return {"tools": tools.shown, "tool_choice": {"type": "function", "function": function}}


def _mode(mode: object, tools: ResponsesTools, allowed: list[dict[str, Any]]) -> dict[str, Any]:
    if mode not in ("auto", "required", "none"):
        raise InvalidParameter(
            "tool_choice",
            f"Invalid value: '{str(mode)[:64]}'. Supported values are: 'none', 'auto', and 'required'.",
        )
    if mode == "required" and not allowed:
        raise InvalidParameter("tool_choice", "Tool choice 'required' must be specified with 'tools' parameter.")
    return {"tools": allowed, "tool_choice": mode} if allowed else {}


def _chosen(given: object, tools: ResponsesTools) -> str:
    if not isinstance(given, Mapping):
        raise wrong_type("tool_choice", "a string or an object")
    kind = given.get("type")
    name = given.get("name") if kind in ("function", "custom") else kind
    shown = shown_name(str(name), given.get("namespace"))
    if shown not in tools:
        raise InvalidParameter("tool_choice", f"Tool choice '{shown[:64]}' not found in 'tools' parameter.")
    return shown


def _members(space: Mapping[str, Any], where: str) -> Iterator[tuple[object, str]]:
    if not isinstance(space.get("name"), str):
        raise missing(f"{where}.name")
    if not isinstance(space.get("tools"), list):
        raise missing(f"{where}.tools")
    return ((each, f"{where}.tools[{place}]") for place, each in enumerate(space["tools"]))
