"""The routes of sessions: create, list, read, delete, and make samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from middleware_hub.auditing.teachers import TEACHER, TeacherRequest, Teachers
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.episodes.contract import SessionStatus
from middleware_hub.openai_session.episodes.reading import read_contract, with_evaluation
from middleware_hub.openai_session.errors import SessionLost
from middleware_hub.openai_session.export.full_records import (
    COMPACT,
    FORMS,
    FULL,
    full_parts,
    is_large,
    line_metadata,
)
from middleware_hub.openai_session.export.records import classified, compact_answer, metadata_of, summary
from middleware_hub.openai_session.export.samples import SampleMaker, SamplePlan, SampleRequest
from middleware_hub.openai_session.sessions.rewards import read_rewards
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import SessionStore
from miles_router.errors import BadRequest, StateError
from miles_router.middlewares import Exchange, Pace, Scope, Watch
from miles_router.middlewares.rows import RowMatch, TrajectoryRows
from miles_router.trajectory import TeacherScores
from miles_router.trajectory.json_parts import list_parts
from miles_router.trajectory.rows import RowKind

SAFETENSORS, JSON = "application/octet-stream", "application/json"
Written = TypeVar("Written")


class SampleForm(Protocol):
    """A format of samples of another framework, with its own response."""

    def is_requested(self, body: Mapping[str, Any], accept: str) -> bool:
        """Return whether a request asks for this form. `accept` is the value of its header."""
        ...

    async def answer(self, request: Request, session: Session, body: Mapping[str, Any]) -> Response:
        """Return the response with the samples of a session."""
        ...


class SessionRoutes:
    """Handlers of `/sessions`, `/sessions/{id}`, its samples and its rewards. `stop` cancels the turns of a session."""

    def __init__(
        self,
        store: SessionStore,
        archive: SessionArchive,
        maker: SampleMaker,
        base_url: Callable[[Scope], str],
        stop: Callable[[Session, SessionStatus], None],
        teachers: Teachers,
    ) -> None:
        self.store = store
        self.archive = archive
        self.maker = maker
        self._base_url = base_url
        self._stop = stop
        self._teachers = teachers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        #: Forms that are tried in order for each request for samples, before the router's own form.
        self.forms: list[SampleForm] = []

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes in the order of matching."""
        return [
            Route("/sessions", self._create, methods=["POST"]),
            Route("/sessions", self._list, methods=["GET"]),
            Route("/sessions/{session_id}", self._read, methods=["GET"]),
            Route("/sessions/{session_id}", self._delete, methods=["DELETE"]),
            Route("/sessions/{session_id}/samples", self._samples, methods=["POST"]),
            Route("/sessions/{session_id}/rewards", self._rewards, methods=["POST"]),
        ]

    async def _create(self, request: Request) -> Response:
        parsed = await read_object(request)
        session_id, metadata = parsed.get("session_id"), parsed.get("metadata")
        if session_id is not None and not isinstance(session_id, str):
            raise BadRequest("session_id must be a string")
        if metadata is not None and not isinstance(metadata, dict):
            raise BadRequest("metadata must be an object")
        contract = read_contract(with_evaluation(parsed.get("contract"), parsed.get("evaluation")))
        address = self._base_url(request.scope)
        if session_id is not None:
            self.store.owners.require(request.scope, session_id)
            await self.archive.load(session_id)
        session = self.store.create(session_id, metadata, contract)
        try:
            await self.archive.save(session)
        except StateError:
            self.store.delete(session)
            raise
        url, key = f"{address}/sessions/{session.id}", session.episode.key
        own = {} if key is None else {"api_key": key}
        alone = self.store.owners.own_url(address)
        if alone is not None:
            own["owner_url"] = alone + Exchange.of(request.scope).mount
        return as_response({"session_id": session.id, "base_url": f"{url}/v1", "anthropic_base_url": url, **own})

    async def _list(self, request: Request) -> Response:
        """List the sessions for training; with `evaluation=true`, the evaluations instead."""
        wanted = request.query_params.get("evaluation", "false")
        if wanted not in ("true", "false"):
            raise BadRequest("evaluation must be true or false")
        self.store.expire()
        parts: list[tuple[bytes, ...]] = []
        pace = Pace()
        for session in self.store:
            if session.is_evaluation == (wanted == "true"):
                parts.append((orjson.dumps(summary(session)),))
            await pace.step()
        stored = [each for each in await self.archive.summaries() if each["evaluation"] == (wanted == "true")]
        parts += [(orjson.dumps(each),) for each in stored]
        for answer in await self.store.owners.answers(request.scope):
            parts += [(orjson.dumps(each),) for each in answer["sessions"]]
            await pace.step()
        return Response(b"".join((b'{"sessions":', *list_parts(parts), b"}")), media_type=JSON)

    async def _read(self, request: Request) -> Response:
        session = self._session(request)
        form = request.query_params.get("form", FULL)
        if form not in FORMS:
            raise BadRequest(f"form must be one of {', '.join(FORMS)}")
        if form == COMPACT:
            write = partial(compact_answer, session.id, classified(session), metadata_of(session))
            return Response(await self.run_in_thread(request, write), media_type=JSON)
        metadata = {**metadata_of(session), **line_metadata(session)}
        parts = full_parts(session.id, classified(session), metadata, self.maker.decode)
        if is_large(session.turns):
            return StreamingResponse(parts, media_type=JSON)
        return Response(await self.run_in_thread(request, partial(b"".join, parts)), media_type=JSON)

    async def _delete(self, request: Request) -> Response:
        """Delete a session. With `abort=true`, its turns in flight are cancelled; otherwise they finish."""
        try:
            session = self._session(request)
        except SessionLost:
            self.store.forget_lost(request.path_params["session_id"])
            raise
        abort = request.query_params.get("abort", "false")
        if abort not in ("true", "false"):
            raise BadRequest("abort must be true or false")
        async with self.archive.deleting([session]):
            if abort == "true":
                self._stop(session, SessionStatus.DISCARDED)
            self.store.delete(session)
        return Response(status_code=204)

    async def _samples(self, request: Request) -> Response:
        session = self._session(request)
        wanted = await read_object(request)
        accept = request.headers.get("accept", "")
        form = next((form for form in self.forms if form.is_requested(wanted, accept)), None)
        if form is not None:
            return await form.answer(request, session, wanted)
        sample_request = SampleRequest.read({name: wanted[name] for name in wanted if name != TEACHER})
        plan = self.maker.plan(session, sample_request)
        if wanted.get(TEACHER) is not None:
            plan = replace(plan, teacher=await self._scores(request, plan, TeacherRequest.read(wanted[TEACHER])))
        body = await self.run_in_thread(request, plan.write)
        return Response(body, media_type=SAFETENSORS if sample_request.format == "safetensors" else JSON)

    async def _scores(self, request: Request, plan: SamplePlan, wanted: TeacherRequest) -> list[TeacherScores]:
        """Return a teacher's scores of planned samples. Raises as `Teachers.find` and `Teacher.score`."""
        trajectories = await self.run_in_thread(request, plan.trajectories)
        with Watch(request.receive):
            return await (await self._teachers.find(wanted)).score(trajectories)

    async def _rewards(self, request: Request) -> Response:
        """Set rewards of turns, segments and spans; answer when they are durable."""
        exchange = Exchange.of(request.scope)
        given = exchange.loads(await exchange.read(request.receive))
        session = self._session(request)
        self.store.set_rewards(session, read_rewards(given, session.turns))
        held = len(session.rewards)
        await self.archive.save(session)
        return as_response({"session_id": session.id, "rewards": held})

    async def run_in_thread(self, request: Request, work: Callable[[], Written]) -> Written:
        """Run work in a single thread, one piece after another, and return its result.

        Several threads would compete for the interpreter's lock and block the event loop. Work that has not begun when
        its client disconnects is not done.

        Raises:
            ClientDisconnected: the client disconnected.
        """
        with Watch(request.receive):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def require(self, scope: Scope, session_id: str) -> None:
        """Continue only in the process that owns the session. Raises as `Owners.require`."""
        self.store.owners.require(scope, session_id)

    def rows(self, kind: RowKind, asked: Mapping[str, Any]) -> RowMatch:
        """Return the rows of one sample, by its session and leaf. `leaf` may be omitted if the session has only one.

        Raises:
            NotFound, BadRequest: there is no such session or turn.
        """
        session, leaf = self.store.get(asked["session_id"]), asked.get("leaf")
        leaves = [turn.number for turn in session.leaves()]
        if leaf is None and len(leaves) == 1:
            leaf = leaves[0]
        if type(leaf) is not int or not 0 <= leaf < len(session.turns):
            raise BadRequest(f"leaf must be the number of a turn; the session's leaves are {leaves}")
        turn = session.turns[leaf]
        return RowMatch(turn.rows.get(kind) or TrajectoryRows(None), turn.tokens, turn.facts.get("rid"))

    def _session(self, request: Request) -> Session:
        return self.store.get(request.path_params["session_id"])


async def read_object(request: Request) -> Mapping[str, Any]:
    """Return the JSON object in a request's body; an empty body is an empty object.

    Raises:
        BadRequest: the body is not a JSON object.
    """
    exchange = Exchange.of(request.scope)
    body = await exchange.read(request.receive)
    parsed = exchange.loads(body) if body.strip() else {}
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    return parsed


def as_response(content: object) -> Response:
    return Response(orjson.dumps(content, default=dict), media_type=JSON)
