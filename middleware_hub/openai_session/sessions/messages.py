"""Chat messages: checks of the messages in a request, bounds of the JSON values in a turn, and ids of tool calls.

Agents with their own loop number their calls or leave ids out. Some send the form that OpenAI had before tools: a
`function_call` of the assistant, answered by a message with the role `function`. SGLang 0.5.23 refuses numbers as ids
and drops the old form without an error. So all calls and results are given string ids.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from miles_router.engines import json_bytes
from miles_router.engines.json_bytes import is_too_deep, may_have_many_values, refuse_many_values
from miles_router.errors import BadRequest, ConfigError

Message = Mapping[str, Any]

_role, _content = methodcaller("get", "role"), methodcaller("get", "content")

TEXT_PARTS = ("text", "input_text", "output_text")


def checked_messages(parsed: object) -> Sequence[Message]:
    """Return the messages of a parsed request.

    Raises:
        BadRequest: the request is not an object, or its messages are not a list of objects with a role.
    """
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    messages = parsed.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    if {*map(type, messages)} != {dict} or {*map(type, map(_role, messages))} != {str}:
        for place, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest(f"messages[{place}] must be an object with a role")
    return messages


def only_text(messages: Sequence[Message]) -> bool:
    """Return True if every part of every message is text, so that token ids alone represent the messages."""
    return all(
        part.get("type") in TEXT_PARTS if isinstance(part, Mapping) else isinstance(part, str)
        for content in map(_content, messages)
        if isinstance(content, list)
        for part in content
    )


def parse_text(text: str) -> Any:
    """Parse JSON in a text of a message, such as the arguments of a call. Lone surrogates become U+FFFD.

    Raises:
        ValueError: the text is not JSON, or is nested too deep to be compared or serialized.
    """
    data = text.encode("utf-8", "surrogatepass")
    parsed = json_bytes.loads(data)
    if is_too_deep(data, parsed):
        raise ValueError("nested too deep")
    return parsed


def common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def message_bytes(message: object) -> int:
    """Return the memory size in bytes of a message, or of a value in it. Keys are few and shared, and do not count."""
    own = sys.getsizeof(message)
    if isinstance(message, str):  # first, because most values are strings
        return own
    if isinstance(message, (dict, Mapping)):  # dict first: the check against Mapping is slow
        return own + sum(map(message_bytes, message.values()))
    if isinstance(message, (list, tuple)):
        return own + sum(map(message_bytes, message))
    return own


def load_function(path: str, option: str, names: Mapping[str, object]) -> Callable[..., Any]:
    """Import a function by its dotted path, for an option of the middleware that also accepts `names`.

    Raises:
        ConfigError: the path is not a dotted path, cannot be imported, or is not callable.
    """
    module, _, attribute = path.rpartition(".")
    where = f"openai_session_middleware.{option}"
    if not module:
        raise ConfigError(f"{where}: must be one of {', '.join(names)} or a dotted path, not {path!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot load {path!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{where}: {path!r} is not a function")
    return found  # type: ignore[no-any-return]  # the operator's own function


def function_of(holder: object) -> Mapping[str, Any]:
    """Return the `function` object of a tool, a tool call or a `tool_choice`; empty if it is missing."""
    function = holder.get("function") if isinstance(holder, Mapping) else None
    return function if isinstance(function, Mapping) else {}


#: The most values in a turn, without the ids of a prompt. A chat template takes some 50 microseconds for a message,
#: which has at least three values.
MAX_VALUES = 1 << 16
#: The most ids in a prompt.
MAX_IDS = 1 << 20
PROMPT = "prompt"


def refuse_long_turn(body: bytes, parsed: Any) -> None:
    """Refuse a turn that would block the event loop for seconds.

    Raises:
        BadRequest: the turn, or the arguments of one call, have more than `MAX_VALUES` values, or the prompt more than
            `MAX_IDS` ids.
    """
    if not isinstance(parsed, dict) or len(body) <= 2 * MAX_VALUES or len(body) - _text_in(parsed) <= 2 * MAX_VALUES:
        return  # each value takes two bytes
    if not may_have_many_values(body, MAX_VALUES):
        return
    prompt = parsed.get(PROMPT)
    if isinstance(prompt, list) and sum(len(each) if isinstance(each, list) else 1 for each in prompt) > MAX_IDS:
        raise BadRequest(f"the prompt has more than {MAX_IDS} ids")
    fields = {name: value for name, value in parsed.items() if name != PROMPT or not isinstance(value, list)}
    refuse_many_values(body, [fields], MAX_VALUES)  # in a list, because at the top level it would exempt fields of ids
    if any(_values_in(text) > MAX_VALUES for text in _arguments([*parsed.values()])):
        raise BadRequest(f"the arguments of a call have more than {MAX_VALUES} values")


def _text_in(parsed: Mapping[str, Any]) -> int:
    """Return the characters in messages that are one text; no value but the text is among them."""
    messages = parsed.get("messages")
    contents = map(_content, messages) if isinstance(messages, list) and {*map(type, messages)} == {dict} else ()
    return sum([len(content) for content in contents if isinstance(content, str)])


def _values_in(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _arguments(waiting: list[Any]) -> list[str]:
    """Return all call arguments that are JSON in a string; `waiting` is consumed."""
    found: list[str] = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            texts = (value.get("arguments"), value.get("input") if value.get("type") == "tool_use" else None)
            found += [text for text in texts if isinstance(text, str)]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


USER, ASSISTANT, FUNCTION_CALL = "user", "assistant", "function_call"
#: The most field names in the record of a turn, and the most characters of each.
MAX_NAMES, MAX_NAME_LENGTH = 32, 64


class Unread:
    """The names of fields in one request that the model does not see.

    Attributes:
        first: whether the request is the session's first turn: there, important fields are refused instead.
        names: the names of unread fields, each once.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self.names: list[str] = []

    def note(self, names: Iterable[str]) -> None:
        """Add names, up to `MAX_NAMES`."""
        for name in names:
            if name[:MAX_NAME_LENGTH] not in self.names and len(self.names) < MAX_NAMES:
                self.names.append(name[:MAX_NAME_LENGTH])

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the record of the turn."""
        return {"unread_fields": self.names} if self.names else {}


#: Prefix of the ids that this module gives to calls without one. No sampled call has such an id.
UNNAMED = "call_unnamed_"
TOOL, FUNCTION = "tool", "function"


def normalized_id(value: object) -> str | None:
    """Return a call id as a string; None if it is missing, null or empty.

    Raises:
        ValueError: the id is neither a string nor an integer.
    """
    if isinstance(value, str | None):
        return value or None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a string or an integer")
    return str(value)


def unnamed_id(place: int, number: int = 0) -> str:
    """Return an id for a call without one, which is the same in every request of a growing history.

    Args:
        place: the index of the message.
        number: the index of the call in the message.
    """
    return f"{UNNAMED}{place}_{number}"


def is_unnamed(call_id: object) -> bool:
    """Return True if `unnamed_id` made this id."""
    return isinstance(call_id, str) and call_id.startswith(UNNAMED)


class OpenCalls:
    """The calls of an answer that have no result yet, in order."""

    def __init__(self, calls: object = ()) -> None:
        self._names: dict[str, str] = {}  # call id to function name
        self._ids: dict[str, dict[str, None]] = {}  # function name to the ids of its calls
        for call in calls if isinstance(calls, Sequence) else ():
            self.add(call)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, call: object) -> None:
        """Add a call; a call without a string id and a function name is ignored."""
        call_id, name = call.get("id") if isinstance(call, Mapping) else None, function_of(call).get("name")
        if isinstance(call_id, str) and isinstance(name, str):
            self._names[call_id] = name
            self._ids.setdefault(name, {})[call_id] = None

    def answer(self, call_id: str) -> None:
        """Remove a call, because its result has come."""
        self._ids.get(self._names.pop(call_id, ""), {}).pop(call_id, None)

    def only_candidate(self, name: object = None, *, is_function: bool = False) -> str | None:
        """Return the id of the only open call that a result without an id can belong to; None if there are several.

        Args:
            name: the function that the result names.
            is_function: the result has the role `function`: if it names a function, no other function's call matches.
        """
        of_name = self._ids.get(name, {}) if isinstance(name, str) else {}
        found = of_name or ({} if is_function and name else self._names)
        return next(iter(found)) if len(found) == 1 else None

    def first(self) -> str:
        """Return the id of the first open call."""
        return next(iter(self._names))


class _CallReader:
    """A converter of one request's messages, which must be read in order."""

    def __init__(self, messages: Sequence[Message], unread: Unread, *, writes_ids: bool) -> None:
        self._messages = messages
        self._unread = unread
        self._writes_ids = writes_ids
        self._calls = OpenCalls()
        self._run_end = 0  # the index behind the current run of results without ids

    def message(self, place: int) -> Message:
        """Return the converted message at this index.

        Raises:
            BadRequest: an id is invalid, or the call of a result is ambiguous.
        """
        message = self._messages[place]
        role = message["role"].lower()
        if role == ASSISTANT:
            message = self._with_named_calls(message, place)
            self._calls = OpenCalls(message.get("tool_calls"))
        elif role in (TOOL, FUNCTION):
            message = self._with_result_id(message, place)
        return message

    def _with_named_calls(self, message: Message, place: int) -> Message:
        calls, legacy = message.get("tool_calls"), message.get(FUNCTION_CALL)
        given: list[Any] = calls if isinstance(calls, list) else []
        named = [_with_named_id(call, place, number) for number, call in enumerate(given)]
        function = self._function(legacy, place) if legacy else None
        if function is not None:
            message = {name: value for name, value in message.items() if name != FUNCTION_CALL}
            if function not in [_function(call) for call in given]:  # libraries write one call in both forms
                named.append({"id": unnamed_id(place, len(given)), "type": FUNCTION, FUNCTION: function})
        unchanged = len(named) == len(given) and all(map(operator.is_, named, given))
        return message if unchanged else {**message, "tool_calls": named}

    def _function(self, legacy: object, place: int) -> dict[str, Any] | None:
        """Return the function of a `function_call`; None if it is invalid and the request is not the first turn.

        Raises:
            BadRequest: it is invalid in the first turn.
        """
        function = _function({FUNCTION: legacy})
        if isinstance(function["name"], str) and function["name"]:
            return function
        if self._unread.first:
            raise BadRequest(f"messages[{place}].{FUNCTION_CALL} must be an object with the name of a function")
        self._unread.note([FUNCTION_CALL])
        return None

    def _with_result_id(self, message: Message, place: int) -> Message:
        try:
            call_id = normalized_id(message.get("tool_call_id"))
        except ValueError as error:
            raise BadRequest(f"messages[{place}].tool_call_id {error}") from None
        is_function = message["role"].lower() == FUNCTION
        found = self._find_call(message, place, is_function=is_function) if call_id is None else call_id
        if found is None:
            return message
        self._calls.answer(found)
        if message.get("tool_call_id") == found and not is_function:
            return message
        return {**message, "role": TOOL, "tool_call_id": found}

    def _find_call(self, message: Message, place: int, *, is_function: bool) -> str | None:
        """Return the id of the call that a result without an id belongs to; None if the result stays without one.

        Raises:
            BadRequest: several calls are possible, and the id matters.
        """
        if not self._calls:
            return None
        found = self._calls.only_candidate(message.get("name"), is_function=is_function)
        if found is None and len(self._calls) > 1 and self._run_length(place) == len(self._calls):
            return self._calls.first()  # as many results as calls: take them in order
        if found is None and not is_function and (self._unread.first or self._writes_ids):
            reason = f"is missing, and {len(self._calls)} calls are open: name the call of this result"
            raise BadRequest(f"messages[{place}].tool_call_id {reason}")
        return found

    def _run_length(self, place: int) -> int:
        """Return how many consecutive results without an id begin at this index."""
        if place >= self._run_end:
            rest = range(place, len(self._messages))
            self._run_end = next((each for each in rest if not _is_unnamed_result(self._messages[each])), rest.stop)
        return self._run_end - place


def named_calls(messages: Sequence[Message], unread: Unread, *, writes_ids: bool) -> Sequence[Message]:
    """Return the messages with string ids for all calls and results; the same object if nothing changes.

    Args:
        writes_ids: whether the chat template renders call ids. If it does not, a result may stay without one.

    Raises:
        BadRequest: an id is neither a string nor an integer, or the call of a result is ambiguous.
    """
    if all(map(_is_named, messages)):
        return messages
    reading = _CallReader(messages, unread, writes_ids=writes_ids)
    changed = [reading.message(place) for place in range(len(messages))]
    return messages if all(map(operator.is_, messages, changed)) else changed


def _is_named(message: Message) -> bool:
    if message["role"] == USER:
        return True
    role, calls = message["role"].lower(), message.get("tool_calls")
    if role == ASSISTANT:
        return not message.get(FUNCTION_CALL) and not (isinstance(calls, list) and not all(map(_has_id, calls)))
    return role not in (TOOL, FUNCTION) or (role == TOOL and _is_text(message.get("tool_call_id")))


def _has_id(call: object) -> bool:
    return not isinstance(call, Mapping) or _is_text(call.get("id"))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_unnamed_result(message: Message) -> bool:
    return message["role"].lower() in (TOOL, FUNCTION) and message.get("tool_call_id") in (None, "")


def _with_named_id(call: Any, place: int, number: int) -> Any:
    if _has_id(call):
        return call
    try:
        call_id = normalized_id(call.get("id"))
    except ValueError as error:
        raise BadRequest(f"messages[{place}].tool_calls[{number}].id {error}") from None
    return {**call, "id": unnamed_id(place, number) if call_id is None else call_id}


def _function(call: object) -> dict[str, Any]:
    function = function_of(call)
    return {"name": function.get("name"), "arguments": function.get("arguments") or "{}"}
