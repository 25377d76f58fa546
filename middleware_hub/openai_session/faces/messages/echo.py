"""What comes back of an answer, matched with what was sampled.

Agents' libraries parse the input of a tool call and write it anew: other spaces and order, the defaults that the tool's
schema names filled in, texts tidied. Where it says the same as the call that this session holds, that one is taken,
spelled as it was sampled. Any other change is an edit of the history, and is left to be found as one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from middleware_hub.openai_session.continuing.templates import INVALID_JSON
from middleware_hub.openai_session.faces.messages.tools import HeldFunctions
from middleware_hub.openai_session.sessions.equality import same_json
from middleware_hub.openai_session.sessions.messages import Message, parse_text
from middleware_hub.openai_session.sessions.repaired import is_repair, plain_value
from middleware_hub.openai_session.sessions.session import Session
from miles_router.engines.client_json import nests_too_deep

#: Under which a session remembers it.
NOTE = "messages.echo"
SIGNED = "miles1."
#: Types of a schema's values that no text is.
NO_TEXTS = ("integer", "number", "boolean", "array", "object")
CHANGES_DIRECTORY = re.compile(r"^cd \S+ && ")


def signature(thinking: str) -> str:
    """What stands for a text of reasoning, so that it is known again where only this comes back."""
    return SIGNED + blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=18).hexdigest()


def input_of(arguments: object) -> dict[str, Any]:
    """The input of a call, from the text that was sampled."""
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str) or not arguments.strip():
        return {}
    try:
        parsed = parse_text(arguments)
    except ValueError:
        return {INVALID_JSON: arguments}
    given = {} if parsed is None else parsed
    return given if isinstance(given, dict) else {INVALID_JSON: arguments}


def shown_input(arguments: str) -> str:
    """Return the JSON of a call's input: the text that was sampled, where that is an object."""
    given = input_of(arguments)
    wrapped = given.get(INVALID_JSON) == arguments or not given
    return orjson.dumps(given).decode() if wrapped else arguments


class Echo:
    """What a session's answers said, by the names under which it comes back."""

    def __init__(self) -> None:
        self._turns = 0
        self._calls: dict[str, list[Any]] = {}
        self._thinking: dict[str, str] = {}
        self._answers: dict[tuple[Any, ...], Message] = {}  # by all that each says
        self._known: dict[bytes, Message] = {}  # by the digest of the content that came back
        self._digests: dict[tuple[Any, ...], bytes] = {}  # the last one of each answer
        #: What the session was told of tools on the way.
        self.functions = HeldFunctions()

    @classmethod
    def of(cls, session: Session) -> Echo:
        """Of all that the session has recorded until now."""
        echo: Echo = session.notes.setdefault(NOTE, cls())
        for turn in session.turns[echo._turns :]:
            echo._add(turn.answer)
            for message in turn.appended:
                echo.functions.add(message)
        echo._turns = len(session.turns)
        echo.functions.began = echo._turns > 0
        return echo

    def _add(self, answer: Message) -> None:
        for call in answer.get("tool_calls") or ():
            self._calls.setdefault(str(call.get("id")), []).append(call)
        thinking = answer.get("reasoning_content")
        if isinstance(thinking, str) and thinking:
            self._thinking[signature(thinking)] = thinking
        self._answers[_all_of(answer)] = answer

    def known(self, content: object) -> tuple[bytes, Message | None]:
        """The answer that has come back with just this content before, and by which that is known. Answers whose calls
        have ids of others, too, are not known by that."""
        digest = blake2b(orjson.dumps(content), digest_size=16).digest()
        answer = self._known.get(digest)
        calls = (answer or {}).get("tool_calls") or ()
        return digest, None if any(len(self._calls[str(call.get("id"))]) > 1 for call in calls) else answer

    def held(self, message: Message, digest: bytes) -> Message:
        """The answer that a message is, if it says all that this does; the next time its content is enough."""
        said = _all_of(message)
        answer = self._answers.get(said)
        if answer is None:
            return message
        self._known.pop(self._digests.get(said, b""), None)
        self._digests[said], self._known[digest] = digest, answer
        return answer

    def call(
        self, call_id: str, name: str, given: object, schema: object, used: set[int] | None = None
    ) -> Mapping[str, Any]:
        """The call that comes back under this id, as it is held if it says the same. Of several that do, those that the
        request has not `used` go first, in the order in which they were sampled."""
        calls, used = self._calls.get(call_id, ()), set() if used is None else used
        for call in sorted(calls, key=lambda call: id(call) in used) if len(calls) > 1 else calls:
            function = call["function"]
            if function["name"] == name and is_held_input(function.get("arguments"), given, schema):
                used.add(id(call))
                held: Mapping[str, Any] = call
                return held
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(given)}}

    def thinking(self, text: str, signed: object) -> str:
        """The reasoning of a block: its text, or where only its signature comes back, what that stands for."""
        return text or (self._thinking.get(signed, "") if isinstance(signed, str) else "")


def _all_of(message: Message) -> tuple[Any, ...]:
    """Text, reasoning and calls of an answer; the calls as objects, each of which is held once."""
    calls = tuple(map(id, message.get("tool_calls") or ()))
    return _stripped(message), message.get("reasoning_content") or "", calls


def is_held_input(arguments: object, given: object, schema: object) -> bool:
    """Return whether the input of a call that comes back says what its sampled arguments say. An input that is left out
    does: agents that could not parse the arguments have none. A text is the arguments, or the JSON of an input."""
    if not input_of(arguments) and not (_parsed(given) if isinstance(given, str) else given):
        return True  # libraries write no arguments as a list, a number or false, too
    if given is None or (isinstance(given, str) and not given.strip()):
        return True
    if isinstance(given, str):
        if isinstance(arguments, str) and given.strip() == arguments.strip():
            return True
        given = _parsed(given)
    given = {} if given == [] else given  # as PHP writes it
    if isinstance(given, dict) and same_input(input_of(arguments), given, schema):
        return True
    if isinstance(arguments, str) and not isinstance(given, dict):
        return same_json(_parsed(arguments), given) or is_repair(arguments, given)
    return is_repair(arguments, given)


def arguments_of(given: object) -> str:
    """Return the arguments for an input that no held call has; what is no object is wrapped in one."""
    said = _parsed(given) if isinstance(given, str) else given
    if said in (None, "", []):
        said = {}
    if not isinstance(said, dict):
        said = {INVALID_JSON: given if isinstance(given, str) else orjson.dumps(given).decode()}
    return orjson.dumps(said).decode()


def _parsed(text: str) -> Any:
    """Return the JSON that a text spells, or the text if it spells none."""
    try:
        return plain_value(text)
    except ValueError:
        return text.strip()


def same_input(held: Any, sent: Any, schema: object) -> bool:
    """Whether two inputs of a tool say the same, once the schema's defaults are filled in and what harnesses tidy is
    tidied on both sides. What was sampled may nest deeper than any request: then nothing that is sent says it."""
    if same_json(held, sent):
        return True
    return not nests_too_deep(held) and same_json(_plain(held, schema), _plain(sent, schema))


def _plain(value: Any, schema: object, name: str = "") -> Any:
    """A value with its schema's defaults, and without what Claude Code 2.1 tidies in a call: a `cd` in front of a
    command, white space at the ends of lines, numbers and lists that were written as texts."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, str):
        return _plain_text(value, schema, name)
    if isinstance(value, list):
        return [_plain(each, schema.get("items")) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    defaults = {key: known["default"] for key, known in properties.items() if _has_default(known)}
    return {key: _plain(each, properties.get(key), key) for key, each in {**defaults, **value}.items()}


def _has_default(schema: object) -> bool:
    return isinstance(schema, Mapping) and "default" in schema


def _plain_text(text: str, schema: Mapping[str, Any], name: str) -> Any:
    if schema.get("type") in NO_TEXTS:
        try:
            return parse_text(text)
        except ValueError:
            return text
    if name == "command":
        text = CHANGES_DIRECTORY.sub("", text).replace("\\\\;", "\\;")
    return "\n".join([line.rstrip() for line in text.split("\n")])


def _stripped(message: Message) -> str | None:
    content = message.get("content") or ""
    return content.strip() if isinstance(content, str) else None
