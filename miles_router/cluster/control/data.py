"""A data process's part of a router: it takes clients' requests and sends them to workers, and decides nothing.

It follows what the control plane decides, goes on with the last of it while that is away, and reports what it sees.
What is asked of the whole fleet it hands to the control plane.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route

from miles_router import tasks
from miles_router.admin.routes import Admin
from miles_router.asgi.doors import READING
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.headers import HOP_BY_HOP, first_header, header_texts, raw_headers
from miles_router.cluster.control.channel import Channel, ChannelLost, Message
from miles_router.cluster.control.peer_loads import Row
from miles_router.cluster.control.plane import POOL, SHARD, SOCKET, pool_named
from miles_router.cluster.control.pools import FollowingPool
from miles_router.cluster.control.senders import Senders
from miles_router.cluster.control.state import followed, own_numbers
from miles_router.cluster.duty import Duty
from miles_router.cluster.peers import Peers
from miles_router.control.control import Control
from miles_router.control.fan_out import FleetAnswer
from miles_router.control.health import HealthMonitor
from miles_router.control.requests import OwnRequests
from miles_router.engines.facts import Facts
from miles_router.errors import ControlUnavailable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.workers import RankFault, Transition, Unit, Worker, WorkerState
from miles_router.forwarding.outgoing import Outgoing
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

#: Seconds between two tries to reach the control plane, and for which a request waits for it.
AGAIN, PATIENCE = 0.05, 30.0
#: What the control plane says that is followed in its order.
ORDERED = frozenset({"follow", "ping", "counts", "counted"})
#: How often a request that changes nothing is repeated.
REPEATS = 3
#: Of a request, what counted at the door alone.
AT_THE_DOOR = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", b"sec-fetch-site", b"x-request-id"}


class Link:
    """The connection to the control plane, made again whenever it is lost.

    Args:
        begin: is called before this process sends its first request.
        generation: of this process; no other has the same number.
        shard: its number among all that take requests.
    """

    def __init__(self, path: Path, begin: Callable[[], None], generation: int, shard: int) -> None:
        #: Its number for the control plane.
        self.process = os.getpid()
        self._shard = shard
        self._path = path
        self._begin = begin
        self._numbers = own_numbers(generation)
        self._pools: Pools
        self._hello: dict[str, Any] = {}
        self._admin: Admin
        self._channel: Channel | None = None
        self._connected = asyncio.Event()
        self._followed = asyncio.Event()
        self._at = 0
        self._sections: dict[str, Any] = {}

    @asynccontextmanager
    async def running(self, pools: Pools, stack: list[dict[str, object]], admin: Admin) -> AsyncIterator[None]:
        """While it is entered, this process follows. It is entered once there is something to follow."""
        self._pools, self._admin = pools, admin
        self._hello = {"process": self.process, "layered": pools.layered, "stack": stack}
        connecting = tasks.spawn(self._stay_connected(), name="control plane")
        try:
            await self._followed.wait()
            self._begin()
            yield
        finally:
            await tasks.cancelled(connecting)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._path)

    async def _stay_connected(self) -> None:
        while True:
            try:
                reader, writer = await self._connect()
            except OSError:
                await asyncio.sleep(AGAIN)
                continue
            self._channel = channel = Channel(reader, writer, self._handlers(), ORDERED)
            reading = tasks.spawn(channel.run(), name="control plane's channel")
            try:
                channel.tell("hello", **self._hello, at=self._at, sections=self._sections)
                await asyncio.wait({reading})
            finally:
                self._connected.clear()
                await tasks.cancelled(reading)
            logger.warning("control_plane_lost")

    def _handlers(self) -> dict[str, Callable[[Message], Awaitable[Message | None]]]:
        return {
            "follow": self._follow,
            "ping": self._ping,
            "abort": self._abort,
            "places": self._places,
            "end_group": self._end_group,
            "at": self._at_worker,
            "signs": self._signs,
            "numbers": self._tell_numbers,
            "metrics": self._tell_metrics,
            "counts": self._tell_counts,
            "counted": self._counted,
        }

    # Following

    async def _follow(self, message: Message) -> None:
        self._sections.update(message.fields["sections"])
        self._at = message.fields["at"]
        for name, record in message.fields["sections"].items():
            if name.startswith(POOL):
                self._follow_pool(await pool_named(self._pools, name[len(POOL) :]), record)
        self._followed.set()
        self._connected.set()  # not before: one that ends may still take connections

    def _follow_pool(self, pool: ModelPool, record: dict[str, Any]) -> None:
        fleet, control = pool.fleet, pool.router.control
        assert isinstance(control, DistantControl)
        followed(record, fleet, _following(pool), lambda: next(self._numbers))
        pool.peopled |= record["peopled"]
        self._pools.named |= pool.peopled and bool(pool.name)
        control.silence_is_no_sign = record["may_silence"]
        if control.sent != record["sent"]:
            control.sent = record["sent"]
            pool.forget_adapters()
        for worker in [each for each in fleet.pool if each.rank_fault and each.ranks]:
            fleet.drop_ranks(worker, worker.rank_fault or "")

    async def _ping(self, message: Message) -> None:
        """Being here is the answer."""

    # Answering

    def _requests(self, message: Message) -> OwnRequests:
        name = message.fields["pool"]
        pool = next((each for each in self._pools if each.name == name), self._pools.default)
        requests = pool.router.control.requests
        assert isinstance(requests, OwnRequests)
        return requests

    async def _abort(self, message: Message) -> Message:
        fields = message.fields
        return Message({"found": await self._requests(message).abort(fields["rid"], fields["elsewhere"])})

    async def _places(self, message: Message) -> Message:
        return Message({"found": await self._requests(message).places(message.fields["rid"])})

    async def _end_group(self, message: Message) -> Message:
        aborted, failures = await self._requests(message).end_group(message.fields["group"])
        return Message({"found": [[aborted, [each.written() for each in failures]]]})

    async def _at_worker(self, message: Message) -> Message:
        return Message({"found": sorted(await self._requests(message).at(message.fields["url"]))})

    async def _signs(self, message: Message) -> Message:
        name, url = message.fields["pool"], message.fields["url"]
        found = [(pool, each) for pool in self._pools if pool.name == name and (each := pool.fleet.pool.find(url))]
        return Message({"found": [await pool.health.signs(worker) for pool, worker in found]})

    async def _tell_numbers(self, message: Message) -> Message:
        held = {pool.name: pool.fleet.gate.held for pool in self._pools}
        numbers = {"numbers": self._admin.numbers(), "facts": self._admin.facts(), "held": held}
        return Message({}, orjson.dumps(numbers))  # as `GET /router/info` of one process

    async def _tell_metrics(self, message: Message) -> Message:
        return Message({SHARD: str(self._shard)}, self._pools.default.router.metrics.render())

    async def _tell_counts(self, message: Message) -> Message:
        return Message({"rows": {pool.name: _following(pool).peer_loads.own() for pool in self._pools}})

    async def _counted(self, message: Message) -> None:
        for pool in self._pools:
            if pool.name in message.fields["rows"]:
                _following(pool).peer_loads.told(Row(*message.fields["rows"][pool.name]))

    # Asking

    async def ask(self, what: str, blob: bytes = b"", **fields: Any) -> Message:
        """Ask the control plane.

        Raises:
            ControlUnavailable: it is away, or was lost while it was asked: nobody knows what it has done.
        """
        try:
            await tasks.within(PATIENCE, self._connected.wait(), name="wait for the control plane")
        except TimeoutError:
            raise ControlUnavailable("the control plane is away") from None
        channel = self._channel
        assert channel is not None
        try:
            return await channel.ask(what, blob, **fields)
        except ChannelLost:
            if self._channel is channel:
                self._connected.clear()
            raise ControlUnavailable("the control plane was lost while it was asked; it may have done it") from None

    def report(self, kind: str, pool: str, worker: Worker, serial: int | None, reason: str) -> None:
        """Say what was seen of a worker. While the control plane is away nobody hears it: it looks itself."""
        if self._channel is not None and serial is not None:
            self._channel.tell("report", kind=kind, pool=pool, url=worker.url, serial=serial, reason=reason)

    async def request(self, method: str, path: str, query: bytes, headers: Iterable[Any], body: bytes) -> Message:
        """One HTTP request; one that changes nothing is repeated where the control plane is lost. Raises as `ask`."""
        fields = {"method": method, "path": path, "query": query.decode("latin-1"), "headers": header_texts(headers)}
        for _ in range(REPEATS if method in READING else 0):
            with suppress(ControlUnavailable):
                return await self.ask("http", body, **fields)
        return await self.ask("http", body, **fields)


def _following(pool: ModelPool) -> FollowingPool:
    found = pool.fleet.pool
    assert isinstance(found, FollowingPool)
    return found


class DataDuty(Duty):
    """A data process.

    Args:
        peers: which of all data processes this one is.
        generation: of this process; no other has the same number.
    """

    checks = False

    def __init__(self, peers: Peers, *, generation: int) -> None:
        self.slots = peers.slots
        self._count = peers.count
        self._link = self._link_to(peers, generation)
        self._stack: list[dict[str, object]] = []
        self._admin: Admin

    def _link_to(self, peers: Peers, generation: int) -> Link:
        return Link(
            peers.directory / SOCKET, lambda: Senders(peers.directory).begin(peers.index), generation, peers.index
        )

    def config(self, config: RouterConfig) -> RouterConfig:
        """See `Duty`. Bounds of the whole router are shared out. Nothing moves: an engine that is told to abort one
        generation aborts all whose names begin with its name, and another process may have such a one."""
        return replace(
            config,
            move_after=0.0,
            max_connections=-(-config.max_connections // self._count),
            gate_max_held=-(-config.gate_max_held // self._count),
        )

    def first_workers(self, config: RouterConfig) -> Sequence[str]:
        """None: who the workers are is decided elsewhere."""
        return ()

    def pool(self, name: str, **settings: Any) -> FollowingPool:
        """See `Duty`."""

        def report(kind: str, worker: Worker, reason: str) -> None:
            self._link.report(kind, name, worker, made.serials.get(worker), reason)

        made = FollowingPool(report, **settings)
        return made

    def fleet(self, **parts: Any) -> Fleet:
        """See `Duty`."""
        return FollowingFleet(**parts)

    def control(self, name: str, **parts: Any) -> Control:
        """See `Duty`."""
        return DistantControl(name, self._link, **parts)

    def is_paused(self, name: str, health: HealthMonitor) -> Callable[[str], Awaitable[bool]]:
        """See `Duty`."""

        async def asked(url: str) -> bool:
            try:
                return bool((await self._link.ask("is_paused", pool=name, url=url)).fields["paused"])
            except ControlUnavailable:
                return False

        return asked

    def admin(self, pools: Pools, registrations: Registrations, stack: list[dict[str, object]]) -> Admin:
        """See `Duty`."""
        self._admin, self._stack = Admin(pools, registrations, stack), stack
        return self._admin

    def routes(self, routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
        """See `Duty`. The control plane answers them."""
        relay = Relay(self._link)
        return [Route(each.path, relay, methods=list(each.methods or ())) for each in routes if isinstance(each, Route)]

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        """See `Duty`."""
        async with self._link.running(pools, self._stack, self._admin):
            yield


class FollowingFleet(Fleet):
    """A data process's. What becomes of workers was logged where it was decided."""

    def _changed(self, transition: Transition) -> None:
        """The gate is followed like all else. What an engine has, each process asks it for itself: nobody checks it
        here, and who waits for room would not know whether there is some."""
        if transition.after is WorkerState.READY:
            self.ask_for_facts(transition.worker)

    def record_silence(self, worker: Worker, reason: str) -> None:
        """Report it: other processes may hear the worker."""
        assert isinstance(self.pool, FollowingPool)
        self.pool.report("silence", worker, reason)

    def _count_on_ranks(self, worker: Worker, facts: Facts) -> None:
        if worker.rank_fault is not None:  # another process has seen it
            facts.learned(RankFault).reason = worker.rank_fault
        super()._count_on_ranks(worker, facts)

    def rank_ignored(self, unit: Unit, reason: str) -> None:
        """As `Fleet.rank_ignored`; and it is reported."""
        if not unit.retired:
            assert isinstance(self.pool, FollowingPool)
            self.pool.report("ranks", unit.worker, reason)
        super().rank_ignored(unit, reason)


class DistantControl(Control):
    """Has the control plane run control requests."""

    def __init__(self, pool: str, link: Link, **parts: Any) -> None:
        super().__init__(**parts)
        #: Whether the control plane says that engines may be silent.
        self.silence_is_no_sign = False
        self._pool = pool
        self._link = link

    @property
    def may_silence(self) -> bool:
        """See `Control`."""
        return self.silence_is_no_sign

    async def send(self, path: str, request: Outgoing, request_id: str) -> FleetAnswer:
        """See `Control.send`; what that raises is an answer here.

        Raises:
            ControlUnavailable: see `Link.ask`.
        """
        query = b"model_id=" + self._pool.encode() if self._pool else b""
        headers = [*request.headers, (b"x-request-id", request_id.encode("ascii"))]
        answer = await self._link.request(request.method, path, query, headers, request.body)
        content_type = first_header(raw_headers(answer.fields["headers"]), b"content-type")
        return FleetAnswer(answer.fields["status"], answer.blob, content_type)


class Relay:
    """Answers a request with what the control plane says to it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request. Raises as `Link.ask`."""
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        headers = [pair for pair in scope["headers"] if pair[0] not in AT_THE_DOOR]
        headers.append((b"x-request-id", exchange.request_id.encode("ascii")))
        path = scope["raw_path"].decode("latin-1")
        answer = await self._link.request(scope["method"], path, scope["query_string"], headers, body)
        given = raw_headers(answer.fields["headers"])
        await send({"type": "http.response.start", "status": answer.fields["status"], "headers": given})
        await send({"type": "http.response.body", "body": answer.blob})
