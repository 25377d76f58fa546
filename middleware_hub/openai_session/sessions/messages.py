"""Chat messages: what a request must have, and when one that an agent sends back is one that is held.

Agents send the whole history with every turn, and their libraries change its spelling on the way: null for an empty
string, one text part for a string, reasoning left out. What a chat template reads decides, not the spelling.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from miles_router.errors import BadRequest, ConfigError

Message = Mapping[str, Any]
#: `(held, sent)`: whether the message sent is the one held.
Equality = Callable[[Message, Message], bool]

TEXT_PARTS = ("text", "input_text", "output_text")
#: What chat templates read of a message as it is, beside its content, reasoning and calls.
READ_AS_IT_IS = ("role", "tool_call_id", "name", "tools")


def checked(parsed: object) -> tuple[Message, ...]:
    """The messages of a request.

    Raises:
        BadRequest: it is no object, or its messages are not a list of objects with a role.
    """
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    messages = parsed.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{place}] must be an object with a role")
    return tuple(messages)


def only_text(messages: Sequence[Message]) -> bool:
    """Whether no message holds an image, audio or anything else that ids alone do not carry."""
    return all(
        part.get("type") in TEXT_PARTS if isinstance(part, Mapping) else isinstance(part, str)
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def message_bytes(message: object) -> int:
    """The memory that a message, or a value in it, takes; but for keys, which are few and shared."""
    own = sys.getsizeof(message)
    if isinstance(message, Mapping):
        return own + sum(map(message_bytes, message.values()))
    if isinstance(message, (list, tuple)):
        return own + sum(map(message_bytes, message))
    return own


def strict(held: Message, sent: Message) -> bool:
    """Equal in all that chat templates read. Reasoning may be left out: its tokens are held."""
    return held is sent or held == sent or (_but_for_calls(held, sent) and _calls(held) == _calls(sent))


def tool_arguments_as_json(held: Message, sent: Message) -> bool:
    """As `strict`, with the arguments of tool calls compared as the JSON they spell."""
    if held is sent or held == sent:
        return True
    return _but_for_calls(held, sent) and _calls(held, parse=True) == _calls(sent, parse=True)


EQUALITIES: Mapping[str, Equality] = {"strict": strict, "tool-arguments-as-json": tool_arguments_as_json}


def equality(name: str) -> Equality:
    """The equality of this name, or at this dotted path.

    Raises:
        ConfigError: there is none.
    """
    known = EQUALITIES.get(name)
    return known if known is not None else load_function(name, "message_equality", EQUALITIES)


def load_function(path: str, option: str, names: Mapping[str, object]) -> Callable[..., Any]:
    """A function by its dotted path, for an option that also takes `names`.

    Raises:
        ConfigError: there is none.
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
        raise ConfigError(f"{where}: {path!r} is no function")
    return found  # type: ignore[no-any-return]  # whatever its operator named


def says(message: Message) -> bytes:
    """A digest of what an answer says: its text, and the names of the functions it calls. Unlike an equality it needs
    no other message, and it does not see what agents' libraries write anew."""
    calls = message.get("tool_calls")
    names = [_function(call).get("name") for call in calls] if isinstance(calls, list) else []
    return blake2b(orjson.dumps([_content(message), names]), digest_size=16).digest()


def _but_for_calls(held: Message, sent: Message) -> bool:
    if any((held.get(name) or None) != (sent.get(name) or None) for name in READ_AS_IT_IS):
        return False
    reasoning = sent.get("reasoning_content") or sent.get("reasoning")
    if reasoning and reasoning != (held.get("reasoning_content") or held.get("reasoning")):
        return False
    return _content(held) == _content(sent)


def _content(message: Message) -> object:
    """Text as a string, however it is spelled. Beside its text, what a text part has (`cache_control`, annotations) is
    read by no template, and clients move it from turn to turn."""
    content = message.get("content")
    if not isinstance(content, list):
        return content or ""
    parts = [_part(part) for part in content]
    return parts[0] if len(parts) == 1 else parts or ""


def _part(part: object) -> object:
    if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS:
        return part.get("text") or ""
    return part


def _calls(message: Message, *, parse: bool = False) -> list[object]:
    calls = message.get("tool_calls")
    return [_call(call, parse=parse) for call in calls] if isinstance(calls, list) else []


def _call(call: Any, *, parse: bool) -> object:
    function = _function(call)
    if not function:
        return call
    arguments = function.get("arguments")
    if parse and isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = ("not JSON", arguments)
    return call.get("id"), function.get("name"), arguments


def _function(holder: object) -> Mapping[str, Any]:
    """The function that a tool, a call or a choice of one names."""
    function = holder.get("function") if isinstance(holder, Mapping) else None
    return function if isinstance(function, Mapping) else {}
