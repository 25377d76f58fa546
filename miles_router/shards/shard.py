"""A shard's part of a router: it takes clients' requests and sends them to workers, and decides nothing.

It applies what the leader decides, and reports what it observes. While the leader is away, it acts by the last state
until its lease ends. Requests that concern the whole fleet go to the leader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route

from miles_router.admin.routes import Admin
from miles_router.asgi.access import READING
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.wire import HOP_BY_HOP, first_header, header_texts, raw_headers
from miles_router.control.control import Control
from miles_router.control.fan_out import FleetAnswer
from miles_router.control.health import HealthMonitor
from miles_router.control.requests import OwnRequests
from miles_router.errors import Unavailable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker
from miles_router.forwarding.forwarded import Outgoing
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig
from miles_router.shards.channel import Message
from miles_router.shards.leader import POOL, get_or_open_pool
from miles_router.shards.membership import Membership
from miles_router.shards.merged_view import SHARD
from miles_router.shards.peer_loads import PeerLoads, PoolLoad
from miles_router.shards.pools import shard_pool
from miles_router.shards.role import ProcessRole
from miles_router.shards.state import apply_fleet, own_cache_numbers

#: How often a request that changes nothing is tried again.
REPEATS = 3
#: Headers that are not relayed to the leader: they concern only the connection to this shard.
EDGE_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", b"sec-fetch-site", b"x-request-id"}


class ShardRole(ProcessRole):
    """The role of a shard.

    Args:
        generation: a number that no other process of this router has.
    """

    checks_health = False

    def __init__(self, membership: Membership, *, generation: int = 0) -> None:
        self.membership = membership
        self.slots = membership.shard.slots
        self.shares_state = membership.shard.shards.shared_state
        self._shards = membership.shard.shards
        self.lease = None if self._shards.local else membership
        self._numbers = own_cache_numbers(generation)
        self._stack: list[dict[str, object]] = []
        #: The loads of other processes, by pool name.
        self._peer_loads: dict[str, PeerLoads] = {}
        self._admin: Admin
        self._pools: Pools
        membership.follow = self._follow
        membership.handlers = {
            "abort": self._abort,
            "workers_with": self._workers_with,
            "end_group": self._end_group,
            "ids_at": self._ids_at,
            "activity": self._activity,
            "numbers": self._report_numbers,
            "metrics": self._report_metrics,
            "loads": self._report_loads,
            "peer_loads": self._update_peer_loads,
        }

    # The parts of the router

    def config(self, config: RouterConfig) -> RouterConfig:
        """Return the settings with this shard's share of the whole router's bounds.

        Moving requests between workers is off. An engine that aborts one generation aborts all whose ids begin with
        the same text, and another process may have such a generation.
        """
        return replace(
            config,
            move_after=0.0,
            max_connections=-(-config.max_connections // self._shards.count),
            gate_max_held=-(-config.gate_max_held // self._shards.count),
        )

    def first_workers(self, config: RouterConfig) -> Sequence[str]:
        """Return no workers: the leader decides which workers there are."""
        return ()

    def pool(self, name: str, **settings: Any) -> WorkerPool:
        def report(kind: str, worker: Worker, reason: str) -> None:
            """Report an observation to the leader. It is lost while the leader is away, which checks the workers
            itself.
            """
            if worker.serial:
                fields = {"url": worker.url, "serial": worker.serial, "reason": reason}
                self.membership.try_send("report", kind=kind, pool=name, **fields)

        pool = shard_pool(report, **settings)
        self._peer_loads[name] = PeerLoads(pool)
        return pool

    def fleet(self, **parts: Any) -> Fleet:
        fleet = Fleet(**parts)
        fleet.report = parts["pool"].report
        return fleet

    def control(self, name: str, **parts: Any) -> Control:
        async def relay(path: str, request: Outgoing, request_id: str) -> FleetAnswer:
            query = b"model_id=" + name.encode() if name else b""
            headers = [*request.headers, (b"x-request-id", request_id.encode("ascii"))]
            answer = await request_leader(self.membership, request.method, path, query, headers, request.body)
            content_type = first_header(raw_headers(answer.fields["headers"]), b"content-type")
            return FleetAnswer(answer.fields["status"], answer.blob, content_type)

        control = Control(**parts)
        control.relay = relay
        return control

    def is_paused(self, name: str, health: HealthMonitor) -> Callable[[str], Awaitable[bool]]:
        """Return a function that asks the leader, and returns False while the leader is away."""

        async def asked(url: str) -> bool:
            try:
                return bool((await self.membership.ask("is_paused", pool=name, url=url)).fields["paused"])
            except Unavailable:
                return False

        return asked

    def admin(self, pools: Pools, registrations: Registrations, stack: list[dict[str, object]]) -> Admin:
        self._admin, self._stack = Admin(pools, registrations, stack), stack
        return self._admin

    def routes(self, routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
        """Return the same routes, relayed to the leader."""
        relay = Relay(self.membership)
        return [Route(each.path, relay, methods=list(each.methods or ())) for each in routes if isinstance(each, Route)]

    async def restore(self, registrations: Registrations) -> None:
        """Do nothing: the leader decides the workers."""

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        self._pools = pools
        self.membership.store = pools.default.router.store
        one_model, model = pools.one_model_only, pools.default.name or None
        self.membership.join_fields = {"one_model_only": one_model, "stack": self._stack, "model_id": model}
        self.membership.on_lease_gained = self._open_gates
        async with self.membership.running():
            yield

    def _open_gates(self) -> None:
        for pool in self._pools:
            pool.fleet.gate.update()

    # Following

    async def _follow(self, state: dict[str, Any]) -> None:
        for name, record in state.items():
            if name.startswith(POOL):
                self._follow_pool(await get_or_open_pool(self._pools, name[len(POOL) :]), record)

    def _follow_pool(self, pool: ModelPool, record: dict[str, Any]) -> None:
        fleet, control = pool.fleet, pool.router.control
        apply_fleet(record, fleet, lambda: next(self._numbers))
        pool.selectable |= record["selectable"]
        self._pools.named |= pool.selectable and bool(pool.name)
        control.leader_may_silence = record["may_silence"]
        if control.sent != record["sent"]:
            control.sent = record["sent"]
            pool.forget_adapters()
        for worker in [each for each in fleet.pool if each.rank_fault and each.ranks]:
            fleet.drop_ranks(worker, worker.rank_fault or "")

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

    async def _workers_with(self, message: Message) -> Message:
        return Message({"found": await self._requests(message).workers_with(message.fields["rid"])})

    async def _end_group(self, message: Message) -> Message:
        aborted, failures = await self._requests(message).end_group(message.fields["group"])
        return Message({"found": [[aborted, [each.written() for each in failures]]]})

    async def _ids_at(self, message: Message) -> Message:
        return Message({"found": sorted(await self._requests(message).ids_at(message.fields["url"]))})

    async def _activity(self, message: Message) -> Message:
        name, url = message.fields["pool"], message.fields["url"]
        found = [(pool, each) for pool in self._pools if pool.name == name and (each := pool.fleet.pool.find(url))]
        return Message({"found": [await pool.health.activity(worker) for pool, worker in found]})

    async def _report_numbers(self, message: Message) -> Message:
        gates = {pool.name: pool.fleet.gate.describe() for pool in self._pools}
        numbers = {"numbers": self._admin.numbers(), "facts": self._admin.facts(), "gates": gates}
        return Message({}, orjson.dumps(numbers))  # the same content as `GET /router/info` of one process

    async def _report_metrics(self, message: Message) -> Message:
        return Message({SHARD: str(self.membership.shard.index)}, self._pools.default.router.metrics.render())

    async def _report_loads(self, message: Message) -> Message:
        return Message({"loads": {name: loads.own_load() for name, loads in self._peer_loads.items()}})

    async def _update_peer_loads(self, message: Message) -> None:
        for name, loads in self._peer_loads.items():
            if name in message.fields["loads"]:
                loads.update(PoolLoad(*message.fields["loads"][name]))


async def request_leader(
    membership: Membership, method: str, path: str, query: bytes, headers: Iterable[Any], body: bytes
) -> Message:
    """Send one HTTP request to the leader and return its reply. Repeat a request that only reads if the leader is
    lost.

    Raises:
        Unavailable: as for `Membership.ask`.
    """
    fields = {"method": method, "path": path, "query": query.decode("latin-1"), "headers": header_texts(headers)}
    for _ in range(REPEATS if method in READING else 0):
        with suppress(Unavailable):
            return await membership.ask("http", body, **fields)
    return await membership.ask("http", body, **fields)


class Relay:
    """An ASGI app that relays a request to the leader."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one request to the leader, and its reply to the client. Raises the errors of `Membership.ask`."""
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        headers = [pair for pair in scope["headers"] if pair[0] not in EDGE_HEADERS]
        headers.append((b"x-request-id", exchange.request_id.encode("ascii")))
        path = exchange.mount + scope["raw_path"].decode("latin-1")
        answer = await request_leader(self._membership, scope["method"], path, scope["query_string"], headers, body)
        replied = raw_headers(answer.fields["headers"])
        await send({"type": "http.response.start", "status": answer.fields["status"], "headers": replied})
        await send({"type": "http.response.body", "body": answer.blob})
