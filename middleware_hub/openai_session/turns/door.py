"""Where requests within a session come in: a turn is taken by the face of its path, what agents need besides passes.
Nothing else does: whoever has a session's address has the clients' key, and runs what a model wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.archive.ending import DurableEnd
from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.errors import ContextOverflow, SessionFinalized
from middleware_hub.openai_session.faces.face import Face, RunSettings, StreamForm
from middleware_hub.openai_session.sessions.pending import PendingTurn
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.turns.idempotency import once, repeat_key, turn_id_of
from middleware_hub.openai_session.turns.keeper import EpisodeKeeper
from middleware_hub.openai_session.turns.leaving import SeenThrough
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.runner import TurnRunner, give_events
from middleware_hub.openai_session.turns.shown_models import shown_models
from miles_router.engines import models, paths
from miles_router.engines.known import ASIDE, COMPUTED
from miles_router.errors import NotFound, RouterError, StateError
from miles_router.middlewares import ASGIApp, Exchange, Receive, Scope, Send, Watch, replay, with_body
from miles_router.middlewares.generation import Heartbeat

#: Paths that generate, and that are not recorded where no face answers them.
UNTRACED = frozenset({paths.GENERATE})


class TurnDoor:
    """Takes the requests of all sessions."""

    def __init__(
        self,
        app: ASGIApp,
        faces: Iterable[Face],
        store: SessionStore,
        recorder: TurnRecorder,
        runner: TurnRunner,
        keeper: EpisodeKeeper,
        archive: SessionArchive,
        settings: RunSettings,
        now: Callable[[], float],
        heartbeat: float,
    ) -> None:
        self._app = app
        self._faces = {face.path: face for face in faces}
        self._store = store
        self._recorder = recorder
        self._runner = runner
        self._keeper = keeper
        self._archive = archive
        self._settings = settings
        self._now = now
        self._heartbeat = heartbeat

    def is_turn(self, scope: Scope) -> bool:
        """Whether a face takes a request as a turn."""
        return scope["method"] == "POST" and scope["path"] in self._faces

    async def beside(self, session: Session, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer what a face answers beside turns; False where none does."""
        name, method, path = session.episode.contract.model.name, scope["method"], scope["path"]
        send = self._until_held(session, send) if method == "DELETE" else send
        named = name is not None and method == "GET" and _is_of_models(path)
        app = partial(shown_models, name, self._app) if name is not None and named else self._app
        for face in self._faces.values():
            if await face.beside(session, scope, receive, send, app):
                return True
        if named:
            await app(scope, receive, send)
        return named

    def speak(self, scope: Scope, path: str) -> None:
        """Have the errors of a request for this path within a session written in the words of its API."""
        own = self._faces.get(path)
        for face in (own,) if own is not None else self._faces.values():
            if face.speaks(scope, path):
                Exchange.of(scope).error_body = face.error_body

    async def request(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Any request within a session.

        Raises:
            NotFound: it is none that an agent makes.
        """
        method, path = scope["method"], scope["path"]
        Exchange.of(scope).flight.private = True
        if self.is_turn(scope):
            await self.turn(session, scope, receive, send)
            return
        if await self.beside(session, scope, receive, send):
            return
        if method == "POST" and path in UNTRACED:
            self._keeper.refuse_untraced(session, "this endpoint is not traced")
            self._recorder.pass_by(path, session, "this endpoint is not traced", Exchange.of(scope).request_id)
            body, send = await Exchange.of(scope).read(receive), self._until_held(session, send)
            with self._store.in_use(session):
                await self._untraced(body, scope, receive, send)
            return
        if not _is_aside(method, path):
            raise NotFound(f"within a session there is no {method} {path}")
        with self._store.in_use(session):
            if method == "POST" and path in COMPUTED:
                await self._untraced(await Exchange.of(scope).read(receive), scope, receive, send)
            else:
                await self._app(scope, receive, send)

    async def _untraced(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have what is not traced answered as it came, but for the adapter of the run."""
        if adapter := self._settings.lora_path:
            Exchange.of(scope).adapter = adapter
            body = models.only_with_adapter(body, adapter)
            scope = with_body(scope, body)
        await self._app(scope, replay(body, receive), send)

    def _until_held(self, session: Session, send: Send, last_event: bytes | tuple[bytes, ...] = ()) -> Send:
        """Have the end of an answer wait until what became of the session is durable."""
        if not self._archive.is_held:
            return send
        return DurableEnd(send, partial(self._archive.save, session), last_event).send

    async def turn(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """One turn of a session.

        Raises:
            BadRequest: the request is none, or the session has no room, is finalized or has a contract against it.
            UnusableAnswer: the worker's answer cannot be recorded.
            StateError: what became of it cannot be made durable.
        """
        face = self._faces[scope["path"]]
        exchange = Exchange.of(scope)
        exchange.error_body, exchange.flight.private = face.error_body, True
        body = await exchange.read(receive)
        parsed = exchange.loads(body, partial(self._store.read, session, name=face.list_name))
        streams = isinstance(parsed, Mapping) and parsed.get("stream") is True
        form = face.stream_form(session, parsed)
        async with Heartbeat(send, exchange, form, self._heartbeat if streams else 0.0) as heartbeat:
            try:
                await self._turn(face, session, scope, receive, body, form, heartbeat.send)
            except StateError:
                raise
            except RouterError:  # which may have ended the episode
                await self._archive.save(session)
                raise
            except asyncio.CancelledError:
                self._archive.save_soon(session)
                raise

    async def _turn(
        self,
        face: Face,
        session: Session,
        scope: Scope,
        receive: Receive,
        body: bytes,
        form: StreamForm,
        send: Send,
    ) -> None:
        exchange = Exchange.of(scope)
        parsed = exchange.loads(body)
        turn_id = turn_id_of(scope)
        send = self._until_held(session, send, face.last_event)
        asked: list[PendingTurn] = []
        key = None if turn_id is None else repeat_key(turn_id, face.path, body)

        async def run(send: Send) -> None:
            # Here, so that the recorded answer of a turn is given even where there is no room for another.
            if session.ending.status is SessionStatus.FINALIZED:
                raise SessionFinalized(f"session {session.id!r} is finalized")
            self._store.check_room(session)
            if not self._archive.is_saved(session):  # what could not be held must be, before there is more of it
                await self._archive.save(session)
            try:
                self._keeper.check(session)
            except ContextOverflow as error:
                await _tell(error, face, session, parsed, form, send)
                return
            with self._keeper.running(session, exchange) as running:
                try:
                    with Watch(receive):  # a long text takes its time, which is not spent for an agent that has left
                        turn = await face.turn(session, parsed, now=self._now())
                        form.is_of(turn)
                        turn.repeat_key = key
                        await self._keeper.bind(face, turn, running)
                    turn.turn_id, turn.side_call = turn_id, face.is_side_call(scope)
                    asked.append(turn)
                    ask = partial(self._runner.run, face, turn, scope)
                    if session.episode.contract.budget.counts:
                        await SeenThrough(turn, running, receive, send).run(ask)
                    else:
                        await ask(receive, send)
                except ContextOverflow as error:
                    await _tell(error, face, session, parsed, form, send)

        with self._store.in_use(session):
            untraceable = face.untraceable(parsed)
            if untraceable is not None:
                self._keeper.refuse_untraced(session, untraceable)
                self._recorder.pass_by(face.path, session, untraceable, exchange.request_id)
                await self._untraced(body, scope, receive, send)
            elif key is None:
                await run(send)
            else:
                account = partial(self._store.account, session)
                await once(
                    session,
                    key,
                    receive,
                    send,
                    run,
                    lambda: any(turn.answered for turn in asked),
                    account,
                    last_event=face.last_event,
                )


async def _tell(
    error: ContextOverflow, face: Face, session: Session, request: object, form: StreamForm, send: Send
) -> None:
    """Tell an agent of a full context where its harness looks for that: in a stream, or as any error. A stream that a
    heartbeat has begun is told of any error."""
    events = None if form.began else face.as_stream(session, request, error)
    if events is None:
        raise error
    await give_events(send, events)


def _is_aside(method: str, path: str) -> bool:
    """Whether an agent may ask for this beside its turns."""
    if method == "POST":
        return path in ASIDE
    return method in ("GET", "HEAD") and _is_of_models(path)


def _is_of_models(path: str) -> bool:
    return path == paths.MODELS or path.startswith(f"{paths.MODELS}/")
