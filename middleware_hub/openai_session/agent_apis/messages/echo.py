"""Matches content that an agent sends back with the answers that were sampled.

Agent libraries parse the input of a tool call and serialize it again: spaces and key order change, defaults of the
tool's schema appear, texts are tidied. An input that means the same as a recorded call is replaced by that call, as it
was sampled. Any other change is an edit of the history, and is left for the history to find.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.messages.tools import HeldFunctions
from middleware_hub.openai_session.continuing.templates import INVALID_JSON
from middleware_hub.openai_session.sessions.equality import same_json
from middleware_hub.openai_session.sessions.messages import Message, parse_text
from middleware_hub.openai_session.sessions.repaired import is_repair, plain_value
from middleware_hub.openai_session.sessions.session import Session
from miles_router.engines.json_bytes import nests_too_deep

#: The key of the session's `notes`.
NOTE = "messages.echo"
SIGNED = "miles1."
#: JSON schema types other than string.
NO_TEXTS = ("integer", "number", "boolean", "array", "object")
CHANGES_DIRECTORY = re.compile(r"^cd \S+ && ")


def signature(thinking: str) -> str:
    """Return the signature of a reasoning text, by which the text is found when only the signature comes back."""
    return SIGNED + blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=18).hexdigest()


def input_of(arguments: object) -> dict[str, Any]:
    """Return the input of a call for the sampled arguments. Arguments that are not a JSON object are wrapped in one."""
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
    """Return the JSON of a call's input: the sampled text, if that is a JSON object."""
    given = input_of(arguments)
    wrapped = given.get(INVALID_JSON) == arguments or not given
    return orjson.dumps(given).decode() if wrapped else arguments


class Echo:
    """An index of a session's recorded answers, by the content in which agents send them back."""

    def __init__(self) -> None:
        self._turns = 0
        self._calls: dict[str, list[Any]] = {}
        self._thinking: dict[str, str] = {}
        self._answers: dict[tuple[Any, ...], Message] = {}  # by text, reasoning and calls
        self._known: dict[bytes, Message] = {}  # by the digest of the content that came back
        self._digests: dict[tuple[Any, ...], bytes] = {}  # the latest digest of each answer
        #: Tools that recorded messages define.
        self.functions = HeldFunctions()

    @classmethod
    def of(cls, session: Session) -> Echo:
        """Return the session's index, with all turns recorded until now."""
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
        self._answers[_content_key(answer)] = answer

    def find_returned(self, content: object) -> tuple[bytes, Message | None]:
        """Return the digest of a content, and the answer that came back with the same content before, if any. An answer
        that shares a call id with another answer is never found by digest."""
        digest = blake2b(orjson.dumps(content), digest_size=16).digest()
        answer = self._known.get(digest)
        calls = (answer or {}).get("tool_calls") or ()
        return digest, None if any(len(self._calls[str(call.get("id"))]) > 1 for call in calls) else answer

    def match_recorded(self, message: Message, digest: bytes) -> Message:
        """Return the recorded answer that equals a message, else the message. The answer is found by `digest` next
        time."""
        content = _content_key(message)
        answer = self._answers.get(content)
        if answer is None:
            return message
        self._known.pop(self._digests.get(content, b""), None)
        self._digests[content], self._known[digest] = digest, answer
        return answer

    def match_call(
        self, call_id: str, name: str, given: object, schema: object, used: set[int] | None = None
    ) -> Mapping[str, Any]:
        """Return the recorded call with this id and the same meaning, else a new call. Of several matching calls, those
        whose `id()` is not in `used` come first, in the order of sampling. The returned call's `id()` is added to
        `used`."""
        calls, used = self._calls.get(call_id, ()), set() if used is None else used
        for call in sorted(calls, key=lambda call: id(call) in used) if len(calls) > 1 else calls:
            function = call["function"]
            if function["name"] == name and is_held_input(function.get("arguments"), given, schema):
                used.add(id(call))
                held: Mapping[str, Any] = call
                return held
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(given)}}

    def restore_thinking(self, text: str, signed: object) -> str:
        """Return the reasoning of a block: its text, or the text that its signature stands for if it has none."""
        return text or (self._thinking.get(signed, "") if isinstance(signed, str) else "")


def _content_key(message: Message) -> tuple[Any, ...]:
    """Return a key of an answer's text, reasoning and calls. Calls count by identity, since each is stored once."""
    calls = tuple(map(id, message.get("tool_calls") or ()))
    return _stripped(message), message.get("reasoning_content") or "", calls


def is_held_input(arguments: object, given: object, schema: object) -> bool:
    """Return True if a call's returned input means the same as its sampled arguments. A missing input matches any
    arguments: agents that could not parse the arguments send none. A string input is the arguments themselves, or the
    JSON of an input."""
    if not input_of(arguments) and not (_parsed(given) if isinstance(given, str) else given):
        return True  # libraries also write empty arguments as a list, a number or false
    if given is None or (isinstance(given, str) and not given.strip()):
        return True
    if isinstance(given, str):
        if isinstance(arguments, str) and given.strip() == arguments.strip():
            return True
        given = _parsed(given)
    given = {} if given == [] else given  # PHP serializes an empty object so
    if isinstance(given, dict) and same_input(input_of(arguments), given, schema):
        return True
    if isinstance(arguments, str) and not isinstance(given, dict):
        return same_json(_parsed(arguments), given) or is_repair(arguments, given)
    return is_repair(arguments, given)


def arguments_of(given: object) -> str:
    """Return the arguments for an input that matches no recorded call. An input that is not an object is wrapped in
    one."""
    parsed = _parsed(given) if isinstance(given, str) else given
    if parsed in (None, "", []):
        parsed = {}
    if not isinstance(parsed, dict):
        parsed = {INVALID_JSON: given if isinstance(given, str) else orjson.dumps(given).decode()}
    return orjson.dumps(parsed).decode()


def _parsed(text: str) -> Any:
    """Return the JSON value of a text, or the text if it is not JSON."""
    try:
        return plain_value(text)
    except ValueError:
        return text.strip()


def same_input(held: Any, sent: Any, schema: object) -> bool:
    """Return True if two inputs of a tool are equal after filling in the schema's defaults and undoing what harnesses
    tidy. A sampled input may nest deeper than requests may; no request equals that."""
    if same_json(held, sent):
        return True
    return not nests_too_deep(held) and same_json(_normalize(held, schema), _normalize(sent, schema))


def _normalize(value: Any, schema: object, name: str = "") -> Any:
    """Return a value with its schema's defaults, and without what Claude Code 2.1 tidies in a call. It removes a
    `cd` in front of a command and white space at line ends, and parses numbers and lists written as texts."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, str):
        return _normalize_text(value, schema, name)
    if isinstance(value, list):
        return [_normalize(each, schema.get("items")) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    defaults = {key: known["default"] for key, known in properties.items() if _has_default(known)}
    return {key: _normalize(each, properties.get(key), key) for key, each in {**defaults, **value}.items()}


def _has_default(schema: object) -> bool:
    return isinstance(schema, Mapping) and "default" in schema


def _normalize_text(text: str, schema: Mapping[str, Any], name: str) -> Any:
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
