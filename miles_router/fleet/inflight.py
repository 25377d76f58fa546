"""A table of the requests in flight, in which an abort finds its request.

Request bodies are not parsed when they are forwarded. An abort searches the bodies in flight for its `rid` instead, so
only aborts pay. The bodies may be gigabytes in total, so the search yields to the event loop between steps.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from miles_router.asgi.exchange import Exchange
from miles_router.engines.events import LAST_EVENT, write_event
from miles_router.engines.generate import RID, GenerateRequest, UnknownShape
from miles_router.engines.json_bytes import Field, Incomplete, value_at
from miles_router.engines.names import may_prefix_others
from miles_router.errors import BadRequest
from miles_router.tasks import Pace

RID_FIELD = Field(RID)
#: Bytes of a body that are searched in one step: about a millisecond.
STEP = 1 << 20
#: `rid` fields of one body that are checked one by one. With more of them, parsing the whole body is quicker.
MANY = 256
IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}  # SGLang's words
LOGPROB_LISTS = ("input_token_logprobs", "output_token_logprobs")


class InFlight:
    """The exchanges in flight with their bodies, each kept while at least one layer works on it.

    Args:
        private: clients have different keys, so one client's `rid` must not match another client's requests.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.private = private
        self._bodies: dict[Exchange, bytes] = {}
        self._holders: dict[Exchange, int] = {}
        #: `rid` of each abort that the router itself sends to a worker, by a future that is done when the abort is.
        self.pending_aborts: dict[asyncio.Future[None], str] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def enter(self, exchange: Exchange, body: bytes) -> None:
        """Record that a layer begins to answer a request. `body` is the body this layer sends, searched by aborts."""
        self._bodies[exchange] = body
        self._holders[exchange] = self._holders.get(exchange, 0) + 1

    def leave(self, exchange: Exchange) -> None:
        """Record that a layer has finished; forget the exchange when it was the last layer."""
        self._holders[exchange] -= 1
        if not self._holders[exchange]:
            del self._holders[exchange], self._bodies[exchange]

    @contextmanager
    def sending_abort(self, rid: str) -> Iterator[None]:
        """Hold back new generations that an abort of `rid` would match, while the router sends that abort."""
        over = asyncio.get_running_loop().create_future()
        self.pending_aborts[over] = rid
        try:
            yield
        finally:
            del self.pending_aborts[over]
            over.set_result(None)

    async def wait_for_aborts(self, body: bytes) -> None:
        """Wait until no abort of the router is under way that could match a generation of this body."""
        pace, seen = Pace(), set[asyncio.Future[None]]()
        while new := {over: rid for over, rid in self.pending_aborts.items() if over not in seen}:
            seen |= new.keys()
            for over, rid in new.items():
                if not over.done() and await _may_contain_id(body, rid, pace):
                    await asyncio.wait({over})

    def ids_at(self, url: str) -> set[str]:
        """Return the request ids of the requests at the worker with this URL."""
        return {exchange.request_id for exchange in self._bodies if url in exchange.routing.urls}

    def requests(self) -> Iterable[tuple[Exchange, bytes]]:
        """Return all exchanges in flight with the bodies that are sent, oldest first."""
        return self._bodies.items()

    async def matching(self, rid: str, url: str) -> set[Exchange]:
        """Return the exchanges that the worker at `url` would abort: an id the worker knows begins with `rid`."""
        pace, found = Pace(), set()
        for exchange, body in list(self._bodies.items()):
            if exchange.routing.worker_url != url:
                continue
            given = _body_ids(exchange, body) if await _may_contain_id(body, rid, pace) else set()
            if any(each.startswith(rid) for each in exchange.routing.rids | given):
                found.add(exchange)
            await pace.step()
        return found

    async def abort(self, rid: str | None, elsewhere: Collection[str | None] = ()) -> dict[Exchange, set[str]]:
        """Mark the requests that an abort matches as aborted, so that they are not resumed, and return them.

        Like SGLang, an abort matches every generation whose id begins with `rid`, on the workers where one generation
        has exactly this id. A generation whose id at the engine differs from the client's is matched only by its exact
        id. A match of one of several generations stops the resuming of the whole request. A request that no worker has
        yet is matched only if all its generations match. Requests that arrive during the search are not matched.

        Args:
            rid: the id, or None for all requests.
            elsewhere: further workers where one generation has exactly this id. None in it stands for a request that
                still waits for a worker.

        Returns:
            For each matched request, the client's ids of the matched generations; empty sets when `rid` is None.
        """
        found: dict[Exchange, set[str]] = (
            {each: set() for each in self._bodies} if rid is None else await self._matches(rid, elsewhere)
        )
        for exchange in found:
            exchange.routing.aborted = True
        return found

    def in_group(self, group: bytes) -> dict[Exchange, set[str]]:
        """Return the requests of a group, each with the ids of its generations at the workers."""
        members = [(exchange, body) for exchange, body in self._bodies.items() if exchange.routing.group == group]
        return {exchange: exchange.routing.rids | _body_ids(exchange, body) for exchange, body in members}

    async def workers_with(self, rid: str) -> set[str | None]:
        """Return the URLs of the workers where a generation has exactly this id. None in it: one still waits here."""
        return _workers_with_id(await self._ids(rid), rid)

    async def _ids(self, rid: str) -> dict[Exchange, set[str]]:
        """Return the ids of each request. A body's ids are read only if one of them may match `rid`."""
        pace, given = Pace(), {}
        for exchange, body in list(self._bodies.items()):
            given[exchange] = _body_ids(exchange, body) if await _may_contain_id(body, rid, pace) else set()
            await pace.step()
        # No await from here on: the workers of the requests and their ids are of the same moment.
        return {exchange: exchange.routing.rids | own for exchange, own in given.items() if exchange in self._bodies}

    async def _matches(self, rid: str, elsewhere: Collection[str | None]) -> dict[Exchange, set[str]]:
        ids = await self._ids(rid)
        where = _workers_with_id(ids, rid) | {*elsewhere}
        alone = self.private or may_prefix_others(rid)
        named = {
            exchange: {each for each in own if each.startswith(rid) and (each == rid or not alone)}
            for exchange, own in ids.items()
            if rid in own or not exchange.routing.private
        }
        return {
            exchange: names
            for exchange, names in named.items()
            if names
            and exchange.routing.worker_url in where
            and (exchange.routing.worker_url or names == ids[exchange])
        }


def _workers_with_id(ids: Mapping[Exchange, set[str]], rid: str) -> set[str | None]:
    return {exchange.routing.worker_url for exchange, own in ids.items() if rid in own}


def _body_ids(exchange: Exchange, body: bytes) -> set[str]:
    """Return the ids that a request's body gives its generations."""
    try:
        parsed = exchange.loads(body)
    except BadRequest:
        return set()
    return {each for each in _ids_in(parsed) if isinstance(each, str)}


async def _may_contain_id(body: bytes, rid: str, pace: Pace) -> bool:
    """Return True if a body may contain this id, a longer id that begins with it, or a shorter id that it begins with.

    The last case is a list of prompts with one id: `r` becomes `r_0`, `r_1`. The bytes need not be valid JSON.
    """
    seen = 0
    for start in range(0, len(body), STEP):
        for at in RID_FIELD.places(body, start, start + STEP):
            seen += 1
            try:
                given = value_at(body, at)
            except Incomplete:
                return True
            if seen > MANY:
                return True
            names = given if isinstance(given, list) else [given]
            if any(isinstance(name, str) and (name.startswith(rid) or rid.startswith(name)) for name in names):
                return True
        await pace.step()
    return False


def _ids_in(parsed: object) -> list[Any]:
    try:
        return GenerateRequest.read(parsed).rids
    except UnknownShape:  # for example a chat request, which may contain an `rid` too
        rid = parsed.get(RID) if isinstance(parsed, Mapping) else None
        return rid if isinstance(rid, list) else [rid]


def aborted_in_the_queue(body: object) -> tuple[bytes, bytes]:
    """Return SGLang's reply to a `/generate` that is aborted in the waiting queue: content type and body.

    Raises:
        UnknownShape: `body` is not a `/generate` request.
    """
    request = GenerateRequest.read(body)
    nothing: dict[str, Any] = {name: [] for name in LOGPROB_LISTS} if request.body.get("return_logprob") else {}
    answers: list[dict[str, Any]] = []
    for rid in request.rids:
        meta = {"id": rid or uuid.uuid4().hex, "finish_reason": IN_THE_QUEUE, "completion_tokens": 0, **nothing}
        answers.append({"text": "", "output_ids": [], "meta_info": meta})
    if not request.stream:
        return b"application/json", orjson.dumps(answers if request.indexed else answers[0])
    events = [write_event({**each, "index": index} if request.indexed else each) for index, each in enumerate(answers)]
    return b"text/event-stream; charset=utf-8", b"".join([*events, LAST_EVENT])
