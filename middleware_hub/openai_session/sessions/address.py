"""Where a session is on the wire: `/sessions/{id}/...`."""

from __future__ import annotations

from middleware_hub.openai_session.errors import SessionNotFound
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.tree import Session
from miles_router.middlewares import Scope

PREFIX = "/sessions/"
ROUTING = b"x-smg-routing-key"


def within(path: str) -> str:
    """The path within its session of one that begins with `PREFIX`."""
    return "/" + path[len(PREFIX) :].partition("/")[2]


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
