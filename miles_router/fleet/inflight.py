"""The requests that are being answered now, so that an abort finds the one it means.

Bodies are not parsed on their way: an abort looks for its `rid` among the bodies in flight, and pays for that itself.
There may be gigabytes of them, so that it looks in steps.
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
from miles_router.engines.names import may_prefix_others
from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.errors import BadRequest
from miles_router.tasks import Pace

RID_FIELD = Field(RID)
#: Bytes of a body that are looked through in one step: about a millisecond.
STEP = 1 << 20
#: Fields of one body that are looked at one by one: parsing it is quicker than that where there are more.
MANY = 256
IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}  # SGLang's words
LOGPROB_LISTS = ("input_token_logprobs", "output_token_logprobs")


class InFlight:
    """Exchanges by identity, each for as long as some layer holds it.

    Args:
        private: their clients have several keys, and share no names.
    """

    def __init__(self, *, private: bool = False) -> None:
        self.private = private
        self._bodies: dict[Exchange, bytes] = {}
        self._holders: dict[Exchange, int] = {}
        #: Names that a worker is told to abort though no client has asked for that, by what ends with the order.
        self.orders: dict[asyncio.Future[None], str] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def enter(self, exchange: Exchange, body: bytes) -> None:
        """A layer begins to answer a request; the body is the one it sends, for those who look for an id in it."""
        self._bodies[exchange] = body
        self._holders[exchange] = self._holders.get(exchange, 0) + 1

    def leave(self, exchange: Exchange) -> None:
        """It is done with it."""
        self._holders[exchange] -= 1
        if not self._holders[exchange]:
            del self._holders[exchange], self._bodies[exchange]

    @contextmanager
    def ordered(self, rid: str) -> Iterator[None]:
        """Within this a worker is told to abort what has this name, and nothing comes to it that it would take for
        that."""
        over = asyncio.get_running_loop().create_future()
        self.orders[over] = rid
        try:
            yield
        finally:
            del self.orders[over]
            over.set_result(None)

    async def past_orders(self, body: bytes) -> None:
        """Returns when no order is under way that could mean a generation which this body names."""
        pace, seen = Pace(), set[asyncio.Future[None]]()
        while new := {over: rid for over, rid in self.orders.items() if over not in seen}:
            seen |= new.keys()
            for over, rid in new.items():
                if not over.done() and await _may_name(body, rid, pace):
                    await asyncio.wait({over})

    def at(self, url: str) -> set[str]:
        """The ids of the requests that the worker at this URL has."""
        return {exchange.request_id for exchange in self._bodies if url in exchange.flight.urls}

    def requests(self) -> Iterable[tuple[Exchange, bytes]]:
        """All of them, each with the body that is sent, oldest first."""
        return self._bodies.items()

    async def named(self, rid: str, url: str) -> set[Exchange]:
        """Those at the worker at this URL that have a generation whose id, as the worker knows it, begins with `rid`:
        all that it would abort."""
        pace, found = Pace(), set()
        for exchange, body in list(self._bodies.items()):
            if exchange.flight.worker_url != url:
                continue
            given = _given(exchange, body) if await _may_name(body, rid, pace) else set()
            if any(each.startswith(rid) for each in exchange.flight.rids | given):
                found.add(exchange)
            await pace.step()
        return found

    async def abort(self, rid: str | None, elsewhere: Collection[str | None] = ()) -> dict[Exchange, set[str]]:
        """Mark the requests that an abort means (all for None), so that nothing carries them on; give them, and their
        clients' names of the generations that it names.

        SGLang aborts every generation whose id begins with `rid`, on workers where one has exactly this id, and so does
        this. What engines call otherwise than its client is meant by exactly its own name. One of several generations
        ends the carrying on of all; a request that no worker has had is ended whole or not at all. Those that come
        while it looks are not meant.

        Args:
            elsewhere: further workers where one has exactly this id; None among them where one waits that no worker
                has.
        """
        found: dict[Exchange, set[str]] = (
            {each: set() for each in self._bodies} if rid is None else await self._meant(rid, elsewhere)
        )
        for exchange in found:
            exchange.flight.aborted = True
        return found

    def of_group(self, group: bytes) -> dict[Exchange, set[str]]:
        """The requests of a group, each with the ids by which workers know its generations."""
        members = [(exchange, body) for exchange, body in self._bodies.items() if exchange.flight.group == group]
        return {exchange: exchange.flight.rids | _given(exchange, body) for exchange, body in members}

    async def places(self, rid: str) -> set[str | None]:
        """The workers where a generation has exactly this id; None among them where one waits that no worker has."""
        return _places(await self._ids(rid), rid)

    async def _ids(self, rid: str) -> dict[Exchange, set[str]]:
        """All ids of each request, as far as they may begin with this one."""
        pace, given = Pace(), {}
        for exchange, body in list(self._bodies.items()):
            given[exchange] = _given(exchange, body) if await _may_name(body, rid, pace) else set()
            await pace.step()
        # From here on nothing waits: where requests are, and what workers called them, is of one moment.
        return {exchange: exchange.flight.rids | own for exchange, own in given.items() if exchange in self._bodies}

    async def _meant(self, rid: str, elsewhere: Collection[str | None]) -> dict[Exchange, set[str]]:
        ids = await self._ids(rid)
        where = _places(ids, rid) | {*elsewhere}
        alone = self.private or may_prefix_others(rid)
        named = {
            exchange: {each for each in own if each.startswith(rid) and (each == rid or not alone)}
            for exchange, own in ids.items()
            if rid in own or not exchange.flight.private
        }
        return {
            exchange: names
            for exchange, names in named.items()
            if names and exchange.flight.worker_url in where and (exchange.flight.worker_url or names == ids[exchange])
        }


def _places(ids: Mapping[Exchange, set[str]], rid: str) -> set[str | None]:
    return {exchange.flight.worker_url for exchange, own in ids.items() if rid in own}


def _given(exchange: Exchange, body: bytes) -> set[str]:
    """The ids that a request's body gives its generations."""
    try:
        parsed = exchange.loads(body)
    except BadRequest:
        return set()
    return {each for each in _named(parsed) if isinstance(each, str)}


async def _may_name(body: bytes, rid: str, pace: Pace) -> bool:
    """Whether a body could give this id, or one that begins with it, to a generation: `r_1` belongs to a list with the
    id `r`. Looks at the bytes, whatever they are."""
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


def _named(parsed: object) -> list[Any]:
    """The ids that a client gave its generations."""
    try:
        return GenerateRequest.read(parsed).rids
    except UnknownShape:  # a chat request, say, which may have one too
        rid = parsed.get(RID) if isinstance(parsed, Mapping) else None
        return rid if isinstance(rid, list) else [rid]


def aborted_in_the_queue(body: object) -> tuple[bytes, bytes]:
    """What SGLang says to a `/generate` that it aborts before it has begun: content type and body.

    Raises:
        UnknownShape: it is no request for an engine.
    """
    request = GenerateRequest.read(body)
    nothing: dict[str, Any] = {name: [] for name in LOGPROB_LISTS} if request.body.get("return_logprob") else {}
    answers: list[dict[str, Any]] = []
    for rid in request.rids:
        meta = {"id": rid or uuid.uuid4().hex, "finish_reason": IN_THE_QUEUE, "completion_tokens": 0, **nothing}
        answers.append({"text": "", "output_ids": [], "meta_info": meta})
    if not request.stream:
        return b"application/json", orjson.dumps(answers if request.indexed else answers[0])
    events = [write_event({**each, "index": place} if request.indexed else each) for place, each in enumerate(answers)]
    return b"text/event-stream; charset=utf-8", b"".join([*events, LAST_EVENT])
