"""Where a session is on the wire: `/sessions/{id}/...`."""

from __future__ import annotations

from middleware_hub.openai_session.errors import SessionNotFound
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from miles_router.engines.known import TOKENIZERS
from miles_router.middlewares import Scope

SESSIONS, PREFIX = "/sessions", "/sessions/"
#: What agents ask for within their sessions begins with this.
WITHIN = "v1/"
ROUTING = b"x-smg-routing-key"


def within(path: str) -> str:
    """The path within its session of one that begins with `PREFIX`."""
    return "/" + path[len(PREFIX) :].partition("/")[2]


def key_of(store: SessionStore, path: str) -> str | None:
    """The key of its own that opens this path within a session, if that has one: what an agent asks, and not what is
    asked of a session.

    Raises:
        SessionLost: the session was lost, and its key with it.
    """
    name, _, rest = path[len(PREFIX) :].partition("/")
    if not path.startswith(PREFIX) or not (rest.startswith(WITHIN) or f"/{rest}" in TOKENIZERS):
        return None
    session = store.find(name)
    if session is None:
        store.check_lost(name)  # its key is gone with it: the agent would be told that its own is wrong
    return None if session is None else session.episode.key


def addressed(store: SessionStore, scope: Scope) -> tuple[Session, Scope]:
    """The session that a path names, and the scope of the request within it, which keeps its affinity.

    Raises:
        SessionNotFound: it names none.
    """
    name, _, rest = scope["path"][len(PREFIX) :].partition("/")
    session = store.get(name)
    raw = scope["raw_path"].split(b"/", 3)
    if len(raw) < 4:
        raise SessionNotFound(f"no session at {scope['path']!r}")
    headers = [pair for pair in scope["headers"] if pair[0] != b"x-session-id"]
    name_bytes = session.id.encode("ascii")
    headers.append((b"x-session-id", name_bytes))
    if not any(pair[0] == ROUTING for pair in headers):  # what a router behind this one reads
        headers.append((ROUTING, name_bytes))
    return session, {**scope, "path": f"/{rest}", "raw_path": b"/" + raw[3], "headers": headers}
