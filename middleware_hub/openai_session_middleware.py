"""OpenAISessionMiddleware: agents that know an OpenAI `base_url` and nothing else, and exact samples of their work.

An agent talks to `http://router/sessions/<id>/v1`. Its first turn goes to the engine as it is; every further one goes
as the ids that were given and sampled before, and the continuation of what the agent appended. The trainer reads the
session's turns, and training samples of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.routing import BaseRoute

from middleware_hub.openai_session.continuing.continuation import build
from middleware_hub.openai_session.errors import SessionFinalized, SessionNotFound
from middleware_hub.openai_session.export.dialect import Dialect
from middleware_hub.openai_session.export.routes import SessionRoutes
from middleware_hub.openai_session.export.samples import SampleMaker
from middleware_hub.openai_session.export.selection import Selection
from middleware_hub.openai_session.faces import completions
from middleware_hub.openai_session.faces.completions import COMPLETIONS
from middleware_hub.openai_session.sessions.messages import equality
from middleware_hub.openai_session.sessions.store import Bounds, SessionStore
from middleware_hub.openai_session.sessions.tree import Session
from middleware_hub.openai_session.turns import asking
from middleware_hub.openai_session.turns.asking import CHAT, Asked
from middleware_hub.openai_session.turns.engines import Engines
from middleware_hub.openai_session.turns.recording import Recorder
from middleware_hub.openai_session.turns.retries import MAX_TURN_ID, Retries
from middleware_hub.openai_session.turns.turns import Turns
from miles_router import Exchange, Router, replay
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.asgi.headers import first
from miles_router.errors import BadRequest
from miles_router.middlewares.contract import ASGIApp, HasRoutes
from miles_router.middlewares.rows import RowSource
from miles_router.trajectory.rows import ROUTED_EXPERTS

PREFIX = "/sessions/"
NAME = "openai_sessions"
#: Paths that generate, and that are not recorded.
UNTRACED = frozenset({"/v1/messages", "/v1/responses", "/generate"})
GIB = 1024**3


class OpenAISessionMiddleware:
    """The session tracer.

    Args:
        tito_model: the model's family, where a library knows how it continues a chat (qwen3, qwen3.5, glm-4.7, ...);
            without it the model's own chat template serves.
        message_equality: when a message that an agent sends back is the one held: `strict`, `tool-arguments-as-json`,
            or the dotted path of a function of two messages, held and sent.
        branch_policies: dotted paths of functions that a request for samples may name as `branches`.
        max_sessions: sessions held.
        max_turns: turns of one session.
        max_session_bytes: bytes of one session, messages and arrays.
        max_bytes: bytes of all sessions.
        idle_timeout: seconds after which a session that nobody uses is forgotten; 0 for never.
        header_sessions: whether `X-Session-Id` on `/v1/chat/completions` means a session too.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        tito_model: str = "",
        message_equality: str = "strict",
        branch_policies: tuple[str, ...] = (),
        max_sessions: int = 100_000,
        max_turns: int = 2_000,
        max_session_bytes: int = 256 * 1024 * 1024,
        max_bytes: int = 16 * GIB,
        idle_timeout: float = 3600.0,
        header_sessions: bool = True,
    ) -> None:
        bounds = Bounds(max_sessions, max_turns, max_session_bytes, max_bytes, idle_timeout)
        bounds.check("openai_session_middleware")
        self.app = app
        self._equal = equality(message_equality)
        self._continuation = build(router.tokenizer, tito_model or None)
        self.store = SessionStore(bounds, now=time.time)
        self.recorder = Recorder(self.store, self._equal, self._continuation.is_special, now=time.time)
        self._turns = Turns(app, router, self.recorder, Engines(router))
        self._retries = Retries()
        maker = SampleMaker(Selection(branch_policies), router.tokenizer.decode, router.rows[ROUTED_EXPERTS])
        self._routes = SessionRoutes(self.store, maker)
        router.rows[ROUTED_EXPERTS].sources["session_id"] = RowSource(self._routes.experts, fields=("leaf",))
        self._dialect = Dialect(router, self._routes, self.chat) if header_sessions else None
        router.publish(NAME, self.store.statistics, continuation=lambda: self._continuation.proof.describe())

    def routes(self) -> Sequence[BaseRoute]:
        """Making, reading, listing and deleting sessions, and their samples."""
        return [*self._routes.routes(), *(self._dialect.routes() if self._dialect is not None else ())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Trace what belongs to a session; everything else is none of our business."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            session, inner = self._within(scope)
            await self._in_session(session, inner, receive, send)
        elif self._dialect is None or not await self._dialect.answer(scope, receive, send):
            await self.app(scope, receive, send)

    def _within(self, scope: Scope) -> tuple[Session, Scope]:
        """The session that a path names, and the scope of the request within it, which keeps its affinity."""
        name, _, rest = scope["path"][len(PREFIX) :].partition("/")
        session = self.store.get(name)
        raw = scope["raw_path"].split(b"/", 3)
        # A slash that is percent-encoded is part of a name, and of none we give.
        if len(raw) < 4 or unquote_to_bytes(raw[2]) != name.encode():
            raise SessionNotFound(f"no session at {scope['path']!r}")
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-session-id"]
        headers.append((b"x-session-id", session.id.encode("ascii")))
        return session, {**scope, "path": f"/{rest}", "raw_path": b"/" + raw[3], "headers": headers}

    async def _in_session(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] == "POST" and path in (CHAT, COMPLETIONS):
            await self.chat(session, scope, receive, send)
            return
        if scope["method"] == "POST" and path in UNTRACED:
            self.recorder.pass_by(path, session, "this endpoint is not traced", Exchange.of(scope).request_id)
        with self.store.in_use(session):
            await self.app(scope, receive, send)

    async def chat(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """One turn of a session.

        Raises:
            BadRequest: the request is none, or the session has no room or is finalized.
            UnusableAnswer: the worker's answer cannot be recorded.
        """
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        parsed = exchange.loads(body)
        turn_id = _turn_id(scope)

        async def run(send: Send) -> None:
            # Here, so that the recorded answer of a turn is given even where there is no room for another.
            if session.finalized is not None:
                raise SessionFinalized(f"session {session.id!r} is finalized")
            self.store.check_room(session)
            asked = self._ask(session, scope["path"], parsed)
            asked.turn_id = turn_id
            await self._turns.run(asked, scope, receive, send)

        with self.store.in_use(session):
            untraceable = completions.untraceable(parsed) if scope["path"] == COMPLETIONS else None
            if untraceable is not None:
                self.recorder.pass_by(COMPLETIONS, session, untraceable, exchange.request_id)
                await self.app(scope, replay(body, receive), send)
            elif turn_id is None:
                await run(send)
            else:
                account = lambda nbytes: self.store.account(session, nbytes)  # noqa: E731
                await self._retries.once(session, turn_id, send, run, account)

    def _ask(self, session: Session, path: str, parsed: Any) -> Asked:
        now = time.time()
        if path == COMPLETIONS:
            return completions.ask(session, parsed, now=now)
        return asking.ask(session, parsed, path=path, continuation=self._continuation, equal=self._equal, now=now)


def _turn_id(scope: Scope) -> str | None:
    value = first(scope["headers"], b"x-turn-id")
    if value is not None and len(value) > MAX_TURN_ID:
        raise BadRequest(f"X-Turn-Id is longer than {MAX_TURN_ID} bytes")
    return value.decode("latin-1") if value else None


_routes: type[HasRoutes] = OpenAISessionMiddleware
