"""The routes of the sessions themselves: made, listed, read, deleted, and turned into samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from middleware_hub.openai_session.export.records import describe, summary
from middleware_hub.openai_session.export.samples import SampleMaker, SampleRequest, write_samples
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.tree import Session
from miles_router.errors import BadRequest
from miles_router.middlewares import Exchange, RowMatch, TrajectoryRows

SAFETENSORS, JSON = "application/octet-stream", "application/json"
#: Samples with more bytes of routed experts are written in a thread.
OFF_LOOP = 1 << 20


class SampleForm(Protocol):
    """A form of samples that is not ours, with an answer of its own."""

    def is_meant(self, body: Mapping[str, Any], accept: str) -> bool:
        """Whether a request asks for this form; `accept` is its header."""
        ...

    async def answer(self, session: Session, body: Mapping[str, Any]) -> Response:
        """The samples of a session."""
        ...


class SessionRoutes:
    """Answers `/sessions`, `/sessions/{id}` and `/sessions/{id}/samples`."""

    def __init__(self, store: SessionStore, maker: SampleMaker) -> None:
        self.store = store
        self.maker = maker
        #: Looked through for each request for samples, in order, before our own.
        self.forms: list[SampleForm] = []

    def routes(self) -> Sequence[BaseRoute]:
        """In the order in which they are looked up."""
        return [
            Route("/sessions", self._create, methods=["POST"]),
            Route("/sessions", self._list, methods=["GET"]),
            Route("/sessions/{session_id}", self._read, methods=["GET"]),
            Route("/sessions/{session_id}", self._delete, methods=["DELETE"]),
            Route("/sessions/{session_id}/samples", self._samples, methods=["POST"]),
        ]

    async def _create(self, request: Request) -> Response:
        parsed = await read_object(request)
        session_id, metadata = parsed.get("session_id"), parsed.get("metadata")
        if session_id is not None and not isinstance(session_id, str):
            raise BadRequest("session_id must be a string")
        if metadata is not None and not isinstance(metadata, dict):
            raise BadRequest("metadata must be an object")
        session = self.store.create(session_id, metadata)
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{session.id}/v1"
        return as_response({"session_id": session.id, "base_url": base_url})

    async def _list(self, request: Request) -> Response:
        self.store.expire()
        return as_response({"sessions": [summary(session) for session in self.store]})

    async def _read(self, request: Request) -> Response:
        return as_response(describe(self._session(request)))

    async def _delete(self, request: Request) -> Response:
        self.store.delete(self._session(request))
        return Response(status_code=204)

    async def _samples(self, request: Request) -> Response:
        session = self._session(request)
        wanted = await read_object(request)
        accept = request.headers.get("accept", "")
        form = next((form for form in self.forms if form.is_meant(wanted, accept)), None)
        if form is not None:
            return await form.answer(session, wanted)
        sample_request = SampleRequest.read(wanted)
        samples = self.maker.make(session, sample_request)
        write = partial(write_samples, session, samples, sample_request)
        large = sum(each.routed_experts.nbytes for each in samples if each.routed_experts is not None) > OFF_LOOP
        body = await asyncio.to_thread(write) if large else write()
        return Response(body, media_type=SAFETENSORS if sample_request.format == "safetensors" else JSON)

    def experts(self, asked: Mapping[str, Any]) -> RowMatch:
        """The routed experts of one sample, by its session and, where that has several, its leaf.

        Raises:
            SessionNotFound, BadRequest: there is no such session or leaf.
        """
        session, leaf = self.store.get(asked["session_id"]), asked.get("leaf")
        leaves = [turn.number for turn in session.leaves()]
        if leaf is None and len(leaves) == 1:
            leaf = leaves[0]
        if type(leaf) is not int or not 0 <= leaf < len(session.turns):
            raise BadRequest(f"leaf must be the number of a turn; the session's leaves are {leaves}")
        turn = session.turns[leaf]
        return RowMatch(turn.experts or TrajectoryRows(None), turn.tokens, turn.facts.get("rid"))

    def _session(self, request: Request) -> Session:
        return self.store.get(request.path_params["session_id"])


async def read_object(request: Request) -> Mapping[str, Any]:
    """The JSON object in a request's body; no body is an empty one.

    Raises:
        BadRequest: it is something else.
    """
    exchange = Exchange.of(request.scope)
    body = await exchange.read(request.receive)
    parsed = exchange.loads(body) if body.strip() else {}
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    return parsed


def as_response(content: object, status: int = 200) -> Response:
    """JSON."""
    return Response(orjson.dumps(content, default=dict), status, media_type=JSON)
