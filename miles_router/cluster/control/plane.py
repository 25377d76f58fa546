"""The control plane's part of a router: it decides, for all processes, and sends no request of a client.

It is the same router without clients: what is asked of it comes from data processes, whose own keys and doors let it
in. Each answer is given when everybody acts by what it says.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from miles_router import tasks
from miles_router.admin.routes import Admin, Json
from miles_router.asgi.exchange import Exchange, Scope
from miles_router.asgi.headers import header_texts, raw_headers
from miles_router.cluster.control.channel import Channel, Handler, Message
from miles_router.cluster.control.followers import AllRequests, Follower, Followers
from miles_router.cluster.control.pools import DecidingPool
from miles_router.cluster.control.senders import Senders
from miles_router.cluster.control.state import Record, followed, own_numbers, written
from miles_router.cluster.duty import Duty, without_keys
from miles_router.control.control import Control
from miles_router.control.engine_metrics import MEDIA_TYPE, merge
from miles_router.edge import RouterApp
from miles_router.fleet.caches import set_apart
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.standstill import stand_still
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Signs, Transition, Worker
from miles_router.forwarding.upstream import Upstream
from miles_router.metrics import Statistics, gauge
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import FIELDS, RouterConfig, shown
from miles_router.slots import CONTROL

logger = logging.getLogger(__name__)

#: Seconds between two looks whether something was decided that no request has asked for.
BEAT = 0.1
#: The name of the control plane's socket, in the directory of the router's processes.
SOCKET = "control"
#: The names of what is decided: each pool's behind this mark.
POOL = "pool "
#: The label of all that `GET /metrics` shows of several processes, and its value for the control plane.
SHARD, LEADER = "shard", "leader"


class InnerApp(RouterApp):
    """The control plane's edge. Requests were counted where they came in."""

    def _finished(self, scope: Scope, exchange: Exchange, status: int, started_at: float) -> None:
        """Nothing."""


class ControlDuty(Duty):
    """The control plane.

    Args:
        directory: of the router's sockets.
    """

    app = InnerApp
    sends = False
    slots = (CONTROL,)

    def __init__(self, directory: Path) -> None:
        #: Who answers requests; set once it is made.
        self.edge: RouterApp
        self._path = directory / SOCKET
        self._serials = itertools.count(1)
        self._config: RouterConfig  # as it was given: what this process leaves out, others do
        self._pools: Pools
        self._channels: set[Channel] = set()
        self._states: dict[int, tuple[int, dict[str, Any]]] = {}
        self._ready = asyncio.Event()
        self._admin: WholeAdmin
        self._registrations: Registrations
        self.followers = self._followers(directory)
        set_apart()

    def _followers(self, directory: Path) -> Followers:
        return Followers(Senders(directory).processes, self._written)

    # The parts of the router

    def config(self, config: RouterConfig) -> RouterConfig:
        """See `Duty`."""
        self._config = config
        return without_keys(config)

    def first_workers(self, config: RouterConfig) -> Sequence[str]:
        """None before it is known whether this control plane follows another one."""
        return ()

    def pool(self, name: str, **settings: Any) -> DecidingPool:
        """See `Duty`."""
        return DecidingPool(lambda: next(self._serials), **settings)

    def fleet(self, **parts: Any) -> Fleet:
        """See `Duty`."""
        fleet = Fleet(**parts)
        fleet.everywhere = self.followers.caught_up
        fleet.subscribe(self._moved)
        return fleet

    def control(self, name: str, **parts: Any) -> Control:
        """See `Duty`."""
        return Control(**{**parts, "requests": AllRequests(name, self.followers)})

    def signs(self, name: str, upstream: Upstream) -> Callable[[Worker], Awaitable[Signs]]:
        """See `Duty`. Data processes have the requests."""

        async def asked(worker: Worker) -> Signs:
            answers = await self.followers.ask_all("signs", pool=name, url=worker.url)
            found = [Signs(*each) for answer in answers for each in answer.fields["found"]]
            return Signs(min((each.heard for each in found), default=math.inf), any(each.runs for each in found))

        return asked

    def admin(self, pools: Pools, registrations: Registrations, stack: list[dict[str, object]]) -> Admin:
        """See `Duty`."""
        self._admin = WholeAdmin(pools, registrations, self.followers, self._config, self._shards())
        return self._admin

    def _shards(self) -> int:
        """How many processes take requests."""
        return self._config.processes

    async def restore(self, registrations: Registrations) -> None:
        """See `Duty`. Not before it is known whether this control plane follows another one."""
        self._registrations = registrations

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        """Listens for data processes. What was decided before is taken over from them, if they are there already."""
        self._pools = pools
        server = await self._listen()
        try:
            await self._gather()
            await self._begin(self._newest())
            beating = [
                tasks.spawn(self._beat(), name="control plane"),
                tasks.spawn(self._tell_counts(), name="tell counts"),
            ]
            try:
                yield
            finally:
                for each in beating:
                    await tasks.cancelled(each)
        finally:
            server.close()
            for channel in tuple(self._channels):
                channel.close()

    async def _listen(self) -> asyncio.AbstractServer:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        return await asyncio.start_unix_server(self._welcome, self._path)

    async def _gather(self) -> None:
        """Return when everybody is there who may know what was decided before."""
        await self.followers.connected()

    async def _count(self) -> bool:
        """Know what is in flight; whether all have told it."""
        whole = await self.followers.count()
        for pool in self._pools:
            _deciding(pool).counted(self.followers.in_flight(pool.name))
        return whole

    # Taking over

    def _newest(self) -> tuple[int, dict[str, Any]]:
        return max(self._states.values(), key=lambda state: state[0], default=(0, {}))

    async def _begin(self, state: tuple[int, dict[str, Any]]) -> None:
        number, sections = state
        self.followers.number = number  # before anything is decided, which counts on from there
        for name, record in sections.items():
            if name.startswith(POOL):
                await self._restore(await pool_named(self._pools, name[len(POOL) :]), record)
        if sections:
            set_apart(max((each.caches.number for each in self._pools.workers), default=0))
            for pool in self._pools:
                _deciding(pool).restore()
            logger.warning("control_plane_took_over", extra={"fields": {"workers": len(self._pools.workers)}})
            await self._registrations.restore(of_this_run=True)
            for pool in self._pools:  # the one before may have been lost between two of these
                await pool.router.control.keep()
        else:
            await self._registrations.restore()
            for url in self._config.worker_urls:
                self._pools.default.fleet.pool.expect(parse_worker_url(url))
            await self._pools.default.health.first_look()
        self.followers.changed()
        self._ready.set()

    async def _restore(self, pool: ModelPool, record: Record) -> None:
        fleet = pool.fleet
        serials = [each["serial"] for each in record["workers"]]
        self._serials = itertools.count(max([*serials, next(self._serials)]) + 1)
        stand_still(fleet, record)
        numbers = own_numbers(0)
        followed(record, fleet, _deciding(pool), lambda: next(numbers))

    # What is decided

    def _written(self) -> dict[str, Any]:
        return {POOL + pool.name: self._section(pool) for pool in self._pools}

    def _section(self, pool: ModelPool) -> Record:
        control = pool.router.control
        return {
            **written(pool.fleet, _deciding(pool)),
            "peopled": pool.peopled,
            "may_silence": control.may_silence,
            "sent": control.sent,
        }

    def _moved(self, transition: Transition) -> None:
        """Behind all that changes together."""
        asyncio.get_running_loop().call_soon(self.followers.changed)

    async def _tell_counts(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            await self.followers.count_who_answers(BEAT)
            self.followers.tell_counts([pool.name for pool in self._pools])

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self.followers.changed()
            ending = {pool: each for pool in map(_deciding, self._pools) if (each := pool.ending)}
            if ending:
                await self.followers.caught_up()
                if await self._count():
                    for pool, workers in ending.items():
                        pool.settle(workers)

    # Data processes

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving: list[asyncio.Task[None]] = []

        async def hello(message: Message) -> None:
            fields = message.fields
            self._pools.layered |= fields["layered"]
            self._admin.stack = fields["stack"]
            self._states[fields["process"]] = (fields["at"], fields["sections"])
            follower = Follower(channel, fields["process"])
            serving.append(tasks.spawn(self._serve(follower), name=f"lead {follower.process}"))

        handlers = {"hello": hello, **self._handlers()}
        channel = Channel(reader, writer, handlers, ordered=frozenset({"hello"}))
        self._channels.add(channel)
        try:
            await channel.run()
        finally:
            self._channels.discard(channel)
            for task in serving:
                await tasks.cancelled(task)

    def _handlers(self) -> dict[str, Handler]:
        return {"http": self._http, "is_paused": self._is_paused, "report": self._report}

    async def _serve(self, follower: Follower) -> None:
        if not self._ready.is_set():
            self.followers.greet(follower)
            await self._ready.wait()
        self._states.clear()
        await self.followers.serve(follower)

    async def _is_paused(self, message: Message) -> Message:
        pool, fields = self._find(message), message.fields
        return Message({"paused": await pool.health.is_paused(fields["url"]) if pool is not None else False})

    async def _report(self, message: Message) -> None:
        """What a data process has seen of a worker."""
        fields, pool = message.fields, self._find(message)
        worker = None if pool is None else pool.fleet.pool.find(fields["url"])
        if pool is None or worker is None or _deciding(pool).serials.get(worker) != fields["serial"]:
            return
        if fields["kind"] == "silence":
            await pool.health.record_silence(worker, fields["reason"], self._config.connect_timeout)
        elif fields["kind"] == "failure":
            pool.fleet.pool.record_failure(worker, fields["reason"])
        elif fields["kind"] == "stall":
            pool.fleet.pool.record_stall(worker, fields["reason"])
        else:
            pool.fleet.drop_ranks(worker, fields["reason"])

    def _find(self, message: Message) -> ModelPool | None:
        name = message.fields["pool"]
        return next((pool for pool in self._pools if pool.name == name), None)

    async def _http(self, message: Message) -> Message:
        """Answer a request, once everybody acts by the answer."""
        await self._ready.wait()
        await self._count()
        answer = await answered(self.edge, message)
        await self.followers.caught_up()
        return answer


async def pool_named(pools: Pools, name: str) -> ModelPool:
    """The pool of this name, made where there is none."""
    return pools.default if name == pools.default.name else await pools.open(name)


def _deciding(pool: ModelPool) -> DecidingPool:
    found = pool.fleet.pool
    assert isinstance(found, DecidingPool)
    return found


async def answered(app: RouterApp, message: Message) -> Message:
    """A request that came as a message, answered by an app."""
    fields = message.fields
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": fields["method"],
        "raw_path": fields["path"].encode("latin-1"),
        "path": "",
        "query_string": fields["query"].encode("latin-1"),
        "headers": raw_headers(fields["headers"]),
        "server": ("127.0.0.1", 0),
        "client": None,
    }
    started: dict[str, Any] = {}
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": message.blob, "more_body": False}

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start":
            started.update(status=event["status"], headers=header_texts(event.get("headers", ())))
        else:
            parts.append(event.get("body", b""))

    await app(scope, receive, send)
    return Message(started, b"".join(parts))


class ShardStatistics(Statistics, prefix="miles_router_shard"):
    """The processes of a router that has several."""

    up = gauge("1: the process tells its numbers.", by=SHARD)


class WholeAdmin(Admin):
    """Shows all processes as one router.

    Args:
        shards: how many of them take requests.
    """

    def __init__(
        self,
        pools: Pools,
        registrations: Registrations,
        followers: Followers,
        config: RouterConfig,
        shards: int,
    ) -> None:
        self.stack: list[dict[str, object]] = []
        super().__init__(pools, registrations, self.stack)
        self._followers = followers
        self._config = config
        #: Of which processes the numbers are known, as of the last look.
        self._up = dict.fromkeys(map(str, range(shards)), 0)
        self._router.metrics.register(ShardStatistics(up=lambda: self._up))

    async def metrics(self, request: Request) -> Response:
        """Those of all processes, each by itself."""
        told = {answer.fields[SHARD]: answer.blob.decode() for answer in await self._followers.tell("metrics")}
        self._up = {shard: int(shard in told) for shard in self._up}
        own = {LEADER: self._router.metrics.render().decode()}
        return Response(await asyncio.to_thread(merge, own | told, SHARD), media_type=MEDIA_TYPE)

    async def info(self, request: Request) -> Response:
        """The router, with what all processes hold."""
        told = [orjson.loads(answer.blob) for answer in await self._followers.ask_all("numbers")]
        described = self.described()
        described["middlewares"] = self.stack
        described["config"] = {name: shown(self._config, name) for name in FIELDS}
        described["statistics"] = _statistics(told)
        for each in told:
            for name, held in each["held"].items():
                if name == self._pools.default.name:
                    described["gate"]["held"] += held
                if name in described.get("pools", ()):
                    described["pools"][name]["gate"]["held"] += held
        described["processes"] = sorted(self._followers.senders)
        return Json(described)


def _statistics(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the layers of all processes show: numbers are added up; of all else, who was asked last and knows has its
    word."""
    numbers: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for each in told:
        numbers = _sum(numbers, each["numbers"])
        for name, own in each["facts"].items():
            known = facts.setdefault(name, {})
            known |= {fact: value for fact, value in own.items() if value is not None or fact not in known}
    return {name: {**numbers.get(name, {}), **own} for name, own in facts.items()}


def _sum(one: Any, other: Any) -> Any:
    """Numbers of two processes, by the same names."""
    if isinstance(one, Mapping):
        return {**one, **{name: _sum(one[name], each) if name in one else each for name, each in other.items()}}
    return one + other
