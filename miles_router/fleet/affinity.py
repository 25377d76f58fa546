"""What ties a request to earlier ones, so that it goes to the worker that has their prefix in its cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from miles_router.asgi.headers import RawHeaders
from miles_router.engines.paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from miles_router.engines.scan import Field, Incomplete, value_at

#: What stands before an engine's own path in a request of a session: `/sessions/{id}/...`.
SESSION_PREFIX = "/sessions/"
#: Headers that name a conversation wherever it takes place.
ROUTING_KEY, SESSION_ID = b"x-smg-routing-key", b"x-session-id"
#: What coding agents call their conversation: Claude Code, and Codex in both spellings, in a header; Codex, pi and
#: OpenCode in a field of OpenAI's APIs; others in a field of their own.
NAMES = ("x-claude-code-session-id", "session_id", "session-id", "body:prompt_cache_key", "body:session_id")
#: In front of the name of a field.
BODY = "body:"
#: Bytes at either end of a body in which fields are looked for: those of the request itself stand before or behind its
#: messages, whose length must cost nothing here.
EDGE = 32 * 1024
#: The APIs that have such fields.
PATHS = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES})
MAX_KEY_LENGTH = 512
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_NAME = re.compile(r"[ !#-\[\]-~]+")  # as it stands in JSON: ASCII that is not escaped there


def names_problem(names: Iterable[str]) -> str | None:
    """Return why these cannot name headers and fields, or None."""
    for name in names:
        pattern, named = (_FIELD_NAME, name[len(BODY) :]) if name.startswith(BODY) else (_HEADER_NAME, name)
        if pattern.fullmatch(named) is None:
            return f"each must be the name of a header, or {BODY}NAME for a field of a JSON body"
    return None


class Affinity:
    """Finds the key of requests: a routing key, a session header, the session in the path, or one of the configured
    names, the first in this order that is not empty. These count behind a session's path, for one session may be
    several conversations."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        given = [*names]
        self._headers = [name.lower().encode("ascii") for name in given if not name.startswith(BODY)]
        self._fields = [Field(name[len(BODY) :]) for name in given if name.startswith(BODY)]
        #: Headers that name a conversation.
        self.links = frozenset({ROUTING_KEY, SESSION_ID, *self._headers})

    def named(self, path: str, headers: RawHeaders) -> str | None:
        """Return the key that headers or path give."""
        given = {name: value for name, value in reversed(headers) if name in self.links}
        found = given.get(ROUTING_KEY) or given.get(SESSION_ID)
        if not found and path.startswith(SESSION_PREFIX) and (session := path[len(SESSION_PREFIX) :].partition("/")[0]):
            return session[:MAX_KEY_LENGTH]
        found = found or next((given[name] for name in self._headers if given.get(name)), b"")
        return found[:MAX_KEY_LENGTH].decode("latin-1") or None

    def looks_inside(self, path: str) -> bool:
        """Return whether a field of such a request may give its key."""
        return path in PATHS and bool(self._fields)

    def in_body(self, path: str, body: bytes) -> str | None:
        """Return the key that a field of a chat, a completion, a message or a response gives: its first value that is
        text, at any depth. No body is parsed for that."""
        if not self.looks_inside(path):
            return None
        edges = body if len(body) <= 2 * EDGE else b"%b\n%b" % (body[:EDGE], body[-EDGE:])
        for field in self._fields:
            for place in field.places(edges):
                with suppress(Incomplete):  # it is cut, or the engine says what is wrong with it
                    value = value_at(edges, place)
                    if isinstance(value, str) and value:
                        return value[:MAX_KEY_LENGTH]
        return None
