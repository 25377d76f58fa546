"""The entry for requests within a session: turns go to the agent API of their path, a few other requests pass through.

All others are refused: the agent may hold the clients' key, and it runs code that a model wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.turns.reply import ReplySender
from middleware_hub.openai_session.turns.run_turn import TurnRunner
from middleware_hub.openai_session.turns.shown_models import shown_models
from miles_router.engines import paths
from miles_router.engines.known import ASIDE, COMPUTED
from miles_router.errors import NotFound
from miles_router.middlewares import ASGIApp, Exchange, Receive, Scope, Send

#: Paths that generate, and are forwarded without being recorded if no agent API answers them.
UNTRACED = frozenset({paths.GENERATE})


class SessionEndpoint:
    """The handler of requests within all sessions."""

    def __init__(
        self,
        app: ASGIApp,
        agent_apis: Iterable[AgentApi],
        store: SessionStore,
        archive: SessionArchive,
        runner: TurnRunner,
    ) -> None:
        self._app = app
        self._apis = {api.path: api for api in agent_apis}
        self._store = store
        self._archive = archive
        self._runner = runner

    def is_turn(self, scope: Scope) -> bool:
        """Return True if an agent API treats the request as a turn."""
        return scope["method"] == "POST" and scope["path"] in self._apis

    async def answer_other(self, session: Session, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request that is not a turn, if an agent API answers it; return whether one did.

        `GET /v1/models` is answered here too if the session's contract names its model.
        """
        name, method, path = session.episode.contract.model.name, scope["method"], scope["path"]
        send = self._until_durable(session, send) if method == "DELETE" else send
        named = name is not None and method == "GET" and _is_of_models(path)
        app = partial(shown_models, name, self._app) if name is not None and named else self._app
        for api in self._apis.values():
            if await api.answer_other(session, scope, receive, send, app):
                return True
        if named:
            await app(scope, receive, send)
        return named

    def speak(self, scope: Scope, path: str) -> None:
        """Write the errors of a request in the format of its agent API; `path` is the path within the session."""
        own = self._apis.get(path)
        for api in (own,) if own is not None else self._apis.values():
            if api.owns_path(scope, path):
                Exchange.of(scope).error_body = api.error_body

    async def request(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request within a session.

        Raises:
            NotFound: agents may not make this request.
        """
        method, path = scope["method"], scope["path"]
        Exchange.of(scope).routing.private = True
        if self.is_turn(scope):
            await self.turn(session, scope, receive, send)
            return
        if await self.answer_other(session, scope, receive, send):
            return
        if method == "POST" and path in UNTRACED:
            body, send = await Exchange.of(scope).read(receive), self._until_durable(session, send)
            with self._store.in_use(session):
                await self._runner.pass_untraced(session, "this endpoint is not traced", body, scope, receive, send)
            return
        if not _is_aside(method, path):
            raise NotFound(f"within a session there is no {method} {path}")
        with self._store.in_use(session):
            if method == "POST" and path in COMPUTED:
                await self._runner.pass_on(await Exchange.of(scope).read(receive), scope, receive, send)
            else:
                await self._app(scope, receive, send)

    def _until_durable(self, session: Session, send: Send) -> Send:
        """Return a `send` that delays the end of the answer until the session is saved."""
        return ReplySender(send, partial(self._archive.save, session)).send

    async def turn(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one turn of a session. Raises like `TurnRunner.run_turn`."""
        await self._runner.run_turn(self._apis[scope["path"]], session, scope, receive, send)


def _is_aside(method: str, path: str) -> bool:
    """Return True if an agent may make this request besides its turns."""
    if method == "POST":
        return path in ASIDE
    return method in ("GET", "HEAD") and _is_of_models(path)


def _is_of_models(path: str) -> bool:
    return path == paths.MODELS or path.startswith(f"{paths.MODELS}/")
