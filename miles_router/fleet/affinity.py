"""The affinity key of a request: requests with the same key go to the worker that has their prefix in its cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from miles_router.asgi.headers import RawHeaders
from miles_router.engines.paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from miles_router.engines.scan import Field, Incomplete, value_at

#: The path prefix of session requests, before the engine's own path: `/sessions/{id}/...`.
SESSION_PREFIX = "/sessions/"
#: Headers that name a conversation, on every path.
ROUTING_KEY, SESSION_ID = b"x-smg-routing-key", b"x-session-id"
#: Where coding agents name their conversation. Headers: Claude Code, and Codex in two spellings. Body fields:
#: `prompt_cache_key` (Codex, pi, OpenCode; from OpenAI's APIs) and `session_id` (others).
NAMES = ("x-claude-code-session-id", "session_id", "session-id", "body:prompt_cache_key", "body:session_id")
#: The prefix that marks a name as a body field.
BODY = "body:"
#: Bytes at each end of a body that are searched for fields. The request's own fields stand before or after its
#: messages, which may be long and are not searched.
EDGE = 32 * 1024
#: The paths whose bodies are searched for these fields.
PATHS = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES})
MAX_KEY_LENGTH = 512
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_NAME = re.compile(r"[ !#-\[\]-~]+")  # ASCII that JSON does not escape


def invalid_name_reason(names: Iterable[str]) -> str | None:
    """Return why `names` are not valid header or field names, or None if they are."""
    for name in names:
        pattern, named = (_FIELD_NAME, name[len(BODY) :]) if name.startswith(BODY) else (_HEADER_NAME, name)
        if pattern.fullmatch(named) is None:
            return f"each must be the name of a header, or {BODY}NAME for a field of a JSON body"
    return None


class Affinity:
    """A finder of affinity keys.

    The key is the first of these that is not empty: the routing key header, the session header, the session in the
    path, a configured header, a configured body field.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        given = [*names]
        self._headers = [name.lower().encode("ascii") for name in given if not name.startswith(BODY)]
        self._fields = [Field(name[len(BODY) :]) for name in given if name.startswith(BODY)]
        #: Headers that name a conversation.
        self.header_names = frozenset({ROUTING_KEY, SESSION_ID, *self._headers})

    def key_from_headers(self, path: str, headers: RawHeaders) -> str | None:
        """Return the key from the headers or the path, or None."""
        given = {name: value for name, value in reversed(headers) if name in self.header_names}
        found = given.get(ROUTING_KEY) or given.get(SESSION_ID)
        if not found and path.startswith(SESSION_PREFIX) and (session := path[len(SESSION_PREFIX) :].partition("/")[0]):
            return session[:MAX_KEY_LENGTH]
        found = found or next((given[name] for name in self._headers if given.get(name)), b"")
        return found[:MAX_KEY_LENGTH].decode("latin-1") or None

    def may_be_in_body(self, path: str) -> bool:
        """Return True if the body of a request to this path may contain a key."""
        return path in PATHS and bool(self._fields)

    def key_from_body(self, path: str, body: bytes) -> str | None:
        """Return the key from a body field of an OpenAI or Anthropic request, or None, without parsing the body.

        A configured field counts at any depth; its first value that is a non-empty string is the key.
        """
        if not self.may_be_in_body(path):
            return None
        edges = body if len(body) <= 2 * EDGE else b"%b\n%b" % (body[:EDGE], body[-EDGE:])
        for field in self._fields:
            for place in field.places(edges):
                with suppress(Incomplete):  # the edge cuts the value, or the JSON is malformed; the engine refuses that
                    value = value_at(edges, place)
                    if isinstance(value, str) and value:
                        return value[:MAX_KEY_LENGTH]
        return None
