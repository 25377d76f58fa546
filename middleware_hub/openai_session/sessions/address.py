"""Request paths of sessions, `/sessions/{id}/...`, and the session that each of them names."""

from __future__ import annotations

from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from miles_router.engines.known import TOKENIZERS
from miles_router.errors import NotFound
from miles_router.middlewares import Scope

SESSIONS, PREFIX = "/sessions", "/sessions/"
#: Paths behind the session id that agents use begin with this.
AGENT_PATHS = "v1/"
#: The header by which a router behind this one keeps the requests of a session on one worker.
ROUTING_HEADER = b"x-smg-routing-key"


def path_in_session(path: str) -> str:
    """Return the part of a path behind the session id; the path must begin with `PREFIX`."""
    return "/" + path[len(PREFIX) :].partition("/")[2]


def session_key(store: SessionStore, path: str) -> str | None:
    """Return the session's own API key for this path, or None if the session has none.

    The key opens only the paths that agents use (`/v1/...` and the tokenizer routes), not the paths that manage a
    session.

    Raises:
        SessionLost: the session was lost, and its key with it.
    """
    name, _, rest = path[len(PREFIX) :].partition("/")
    if not path.startswith(PREFIX) or not (rest.startswith(AGENT_PATHS) or f"/{rest}" in TOKENIZERS):
        return None
    session = store.find(name)
    if session is None:
        store.check_lost(name)  # its key is lost too: without this check the agent would read that its key is wrong
    return None if session is None else session.episode.key


def resolve(store: SessionStore, scope: Scope) -> tuple[Session, Scope]:
    """Return the session that the path names, and the scope without the session prefix.

    The new scope has the session id as `x-session-id`, so that the policy keeps the session on its worker.

    Raises:
        NotFound: the path names no session.
    """
    name, _, rest = scope["path"][len(PREFIX) :].partition("/")
    session = store.get(name)
    raw = scope["raw_path"].split(b"/", 3)
    if len(raw) < 4:
        raise NotFound(f"no session at {scope['path']!r}")
    headers = [pair for pair in scope["headers"] if pair[0] != b"x-session-id"]
    name_bytes = session.id.encode("ascii")
    headers.append((b"x-session-id", name_bytes))
    if not any(pair[0] == ROUTING_HEADER for pair in headers):
        headers.append((ROUTING_HEADER, name_bytes))
    return session, {**scope, "path": f"/{rest}", "raw_path": b"/" + raw[3], "headers": headers}
