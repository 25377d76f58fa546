"""The forms of calls for each kind of tool: as an item of this API, and as the arguments that a model samples.

A chat template knows only functions, so every tool that an agent runs itself is shown as one. A custom tool is a
function with one text, `input`. A shell and `apply_patch` are functions with the fields of their calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.responses.errors import InvalidParameter, missing, unavailable, wrong_type
from middleware_hub.openai_session.sessions.equality import same_json
from middleware_hub.openai_session.sessions.messages import Message, parse_text

TEXT: Mapping[str, Any] = {"type": "string"}
TEXTS: Mapping[str, Any] = {"type": "array", "items": TEXT}
NUMBER: Mapping[str, Any] = {"type": "integer"}


class CallForm(ABC):
    """A converter for the calls of one kind of tool.

    Attributes:
        kind: the type of a call's item.
        status: whether the item has a `status` field.
    """

    kind: str
    status = True

    @abstractmethod
    def function(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the chat function for a tool, without its name.

        Raises:
            InvalidParameter: the tool is not a valid tool of this kind.
        """

    @abstractmethod
    def fields(self, arguments: str) -> Mapping[str, Any] | None:
        """Return the item's fields for sampled arguments; None if they are not valid for this kind."""

    @abstractmethod
    def arguments(self, item: Mapping[str, Any], where: str) -> str:
        """Return the arguments for an item.

        Raises:
            InvalidParameter: the item is not a valid call of this kind.
        """


class FunctionForm(CallForm):
    """A function. Its arguments are the sampled text; agents may send them back missing, null, or parsed."""

    kind = "function_call"

    def function(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        parameters = tool.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise wrong_type(f"{where}.parameters", "an object")
        strict = {"strict": True} if tool.get("strict") else {}
        return {"parameters": parameters or {"type": "object", "properties": {}}, **strict}

    def fields(self, arguments: str) -> Mapping[str, Any]:
        return {"arguments": arguments}

    def arguments(self, item: Mapping[str, Any], where: str) -> str:
        given = item.get("arguments")
        if isinstance(given, dict | list):
            return orjson.dumps(given).decode()
        return _text(item, "arguments", where) if given else ""


class CustomForm(CallForm):
    """A tool that takes any text. A grammar is only described to the model; nothing enforces it."""

    kind, status = "custom_tool_call", False

    def function(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        form = tool.get("format")
        takes = dict(TEXT)
        if isinstance(form, Mapping) and form.get("type") == "grammar":
            takes["description"] = f"A text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
        elif form is not None and not (isinstance(form, Mapping) and form.get("type") == "text"):
            raise InvalidParameter(f"{where}.format.type", f"Invalid value for '{where}.format.type'.")
        return {"parameters": _object({"input": takes}, "input")}

    def fields(self, arguments: str) -> Mapping[str, Any]:
        return {"input": input_of(arguments)}

    def arguments(self, item: Mapping[str, Any], where: str) -> str:
        return orjson.dumps({"input": _text(item, "input", where)}).decode()


class _ObjectForm(CallForm):
    """A tool whose item holds the arguments as an object in one field, `item_field`."""

    item_field: str
    description: str
    parameters: Mapping[str, Any]

    def function(self, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        environment = tool.get("environment")
        if environment is not None and not (isinstance(environment, Mapping) and environment.get("type") == "local"):
            raise unavailable(f"{where}.environment", "An environment that is not the agent's own")
        return {"description": self.description, "parameters": self.parameters}

    def fields(self, arguments: str) -> Mapping[str, Any] | None:
        values = _parsed(arguments)
        if values is None or not all(isinstance(values.get(name), kind) for name, kind in self.required().items()):
            return None
        return {self.item_field: self.to_item(values)}

    def arguments(self, item: Mapping[str, Any], where: str) -> str:
        values = item.get(self.item_field)
        if not isinstance(values, Mapping):
            raise missing(f"{where}.{self.item_field}")
        return orjson.dumps(self.from_item(values)).decode()

    def required(self) -> Mapping[str, type]:
        """Return the fields that the arguments must have, with their types."""
        return {}

    def to_item(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the item's object for arguments."""
        return values

    def from_item(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments for an item's object."""
        return {name: value for name, value in values.items() if value is not None}


class LocalShellForm(_ObjectForm):
    """`local_shell`: one command, as a list of words."""

    kind, item_field = "local_shell_call", "action"
    description = "Runs a command on the user's machine and returns its output."

    def __init__(self) -> None:
        optional = {"working_directory": TEXT, "timeout_ms": NUMBER, "env": {"type": "object"}, "user": TEXT}
        self.parameters = _object({"command": TEXTS, **optional}, "command")

    def required(self) -> Mapping[str, type]:
        return {"command": list}

    def to_item(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "exec", "env": {}, **values}

    def from_item(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        plain = super().from_item(values)
        return {name: value for name, value in plain.items() if name != "type" and (name != "env" or value)}


class ShellForm(_ObjectForm):
    """`shell`: a list of command lines."""

    kind, item_field = "shell_call", "action"
    description = "Runs shell commands on the user's machine and returns their output."

    def __init__(self) -> None:
        self.parameters = _object({"commands": TEXTS, "timeout_ms": NUMBER, "max_output_length": NUMBER}, "commands")

    def required(self) -> Mapping[str, type]:
        return {"commands": list}

    def to_item(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"timeout_ms": None, "max_output_length": None, **values}


class PatchForm(_ObjectForm):
    """`apply_patch`: creates, updates or deletes a file."""

    kind, item_field = "apply_patch_call", "operation"
    description = "Creates, updates or deletes a file. diff is in the V4A format; a file that is deleted has none."

    def __init__(self) -> None:
        kinds = {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}
        self.parameters = _object({"type": kinds, "path": TEXT, "diff": TEXT}, "type", "path")

    def required(self) -> Mapping[str, type]:
        return {"type": str, "path": str}


FUNCTION, CUSTOM = FunctionForm(), CustomForm()


def input_of(arguments: str) -> str:
    """Return the text that a custom tool was called with, or the arguments unchanged if they contain no `input`
    text."""
    values = _parsed(arguments)
    given = values.get("input") if values is not None else None
    return given if isinstance(given, str) else arguments


def held_call(held: Message, item: Mapping[str, Any], form: CallForm) -> bool:
    """Return True if an item has the same content as a recorded call."""
    fields = form.fields(held["function"].get("arguments") or "")
    return fields is not None and all(
        same_json(_plain(item.get(name)), _plain(value)) for name, value in fields.items()
    )


def _plain(value: object) -> object:
    """Return a value without the null fields of an object."""
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, Mapping) else value


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _parsed(arguments: str) -> dict[str, Any] | None:
    try:
        parsed = parse_text(arguments)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if value is None:
        raise missing(f"{where}.{name}")
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", "a string")
    return value


#: By the type of the tool. A tool type without a name of its own uses the type as its name.
FORMS: Mapping[object, CallForm] = {
    "function": FUNCTION,
    "custom": CUSTOM,
    "local_shell": LocalShellForm(),
    "shell": ShellForm(),
    "apply_patch": PatchForm(),
}
#: By the type of a call's item: the form, and the name of tools that have no name of their own.
CALLS: Mapping[object, tuple[CallForm, str]] = {form.kind: (form, str(name)) for name, form in FORMS.items()}
