"""A shard's part of a router: it takes clients' requests and sends them to workers, and decides nothing.

It applies what the leader decides, and reports what it observes. While the leader is away, it acts by the last state
until its lease ends. Requests that concern the whole fleet go to the leader.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from miles_router import tasks
from miles_router.admin.routes import Admin
from miles_router.asgi.access import READING
from miles_router.asgi.exchange import Exchange
from miles_router.asgi.wire import HOP_BY_HOP, first_header, header_texts, raw_headers
from miles_router.control.fan_out import FleetAnswer
from miles_router.control.requests import OwnRequests
from miles_router.errors import Unavailable
from miles_router.fleet.workers import Worker
from miles_router.forwarding.forwarded import Outgoing
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig
from miles_router.shards.channel import Message
from miles_router.shards.leader import INTERVAL
from miles_router.shards.membership import Membership
from miles_router.shards.merged_view import SHARD
from miles_router.shards.peer_loads import PeerLoads, PoolLoad
from miles_router.shards.pools import make_shard_pool
from miles_router.shards.role import ProcessRole
from miles_router.shards.state import apply_fleet, own_cache_numbers

#: How often a request that changes nothing is tried again.
REPEATS = 3
#: Headers that are not relayed to the leader: they concern only the connection to this shard.
EDGE_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", b"sec-fetch-site", b"x-request-id"}


class ShardRole(ProcessRole):
    """The role of a shard."""

    checks_health = False

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.slots = membership.shard.slots
        self.shares_state = membership.shard.shards.shared_state
        self._shards = membership.shard.shards
        self._numbers = own_cache_numbers(secrets.randbits(31))
        #: The loads of other processes, by pool name.
        self._peer_loads: dict[str, PeerLoads] = {}
        self._admin: Admin
        self._pools: Pools
        membership.follow = self._follow
        membership.handlers = {
            **{each: partial(self._ask_requests, each) for each in ("abort", "workers_with", "ids_at")},
            "end_group": self._end_group,
            "activity": self._activity,
            "numbers": self._report_numbers,
            "metrics": self._report_metrics,
            "loads": self._tell_loads,
            "peer_loads": self._update_peer_loads,
        }

    # The parts of the router

    def config(self, config: RouterConfig) -> RouterConfig:
        """Return the settings with this shard's share of the router's bounds, and without workers: the leader has them.

        Moving requests between workers is off. An engine that aborts one generation aborts all whose ids begin with
        the same text, and another process may have such a generation.
        """
        return replace(
            config,
            worker_urls=(),
            move_after=0.0,
            max_connections=-(-config.max_connections // self._shards.count),
            gate_max_held=-(-config.gate_max_held // self._shards.count),
        )

    def connect(self, pool: ModelPool) -> None:
        def report(kind: str, worker: Worker, reason: str) -> None:
            """Report an observation. It is lost while the leader is away, which checks the workers itself."""
            if worker.serial:
                fields = {"url": worker.url, "serial": worker.serial, "reason": reason}
                self.membership.try_send("report", kind=kind, pool=pool.name, **fields)

        async def is_paused(url: str) -> bool:
            try:
                return bool((await self.membership.ask("is_paused", pool=pool.name, url=url)).fields["paused"])
            except Unavailable:
                return False

        async def relay(path: str, request: Outgoing, request_id: str) -> FleetAnswer:
            query = b"model_id=" + pool.name.encode() if pool.name else b""
            headers = [*request.headers, (b"x-request-id", request_id.encode("ascii"))]
            answer = await self._ask_leader(request.method, path, query, headers, request.body)
            content_type = first_header(raw_headers(answer.fields["headers"]), b"content-type")
            return FleetAnswer(answer.fields["status"], answer.blob, content_type)

        fleet = pool.fleet
        make_shard_pool(fleet.pool, report)
        fleet.report = report
        if not self._shards.local:
            fleet.gate.lease = self.membership
        pool.health.is_paused = is_paused
        pool.router.control.relay = relay
        self._peer_loads[pool.name] = PeerLoads(fleet.pool)

    def show(self, pools: Pools, admin: Admin) -> None:
        self._pools, self._admin = pools, admin

    def routes(self, routes: Sequence[BaseRoute]) -> Sequence[BaseRoute]:
        """Return the same routes, relayed to the leader."""
        return [
            Route(each.path, self._relay, methods=list(each.methods or ()))
            for each in routes
            if isinstance(each, Route)
        ]

    async def _relay(self, request: Request) -> Response:
        """Return the leader's reply to a request. Raises the errors of `Membership.ask`."""
        scope, exchange = request.scope, Exchange.of(request.scope)
        body = await exchange.read(request.receive)
        headers = [pair for pair in scope["headers"] if pair[0] not in EDGE_HEADERS]
        headers.append((b"x-request-id", exchange.request_id.encode("ascii")))
        path = exchange.mount + scope["raw_path"].decode("latin-1")
        answer = await self._ask_leader(scope["method"], path, scope["query_string"], headers, body)
        response = Response(answer.blob, answer.fields["status"])
        response.raw_headers = raw_headers(answer.fields["headers"])
        return response

    async def _ask_leader(self, method: str, path: str, query: bytes, headers: Iterable[Any], body: bytes) -> Message:
        """Send an HTTP request to the leader and return its reply. Repeat one that only reads if the leader is lost.

        Raises:
            Unavailable: as for `Membership.ask`.
        """
        fields = {"method": method, "path": path, "query": query.decode("latin-1"), "headers": header_texts(headers)}
        for _ in range(REPEATS if method in READING else 0):
            with suppress(Unavailable):
                return await self.membership.ask("http", body, **fields)
        return await self.membership.ask("http", body, **fields)

    async def restore(self, registrations: Registrations) -> None:
        """Do nothing: the leader decides the workers."""

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        self.membership.store = pools.default.router.store
        one_model, model = pools.one_model_only, pools.default.name or None
        self.membership.join_fields = {"one_model_only": one_model, "stack": self._admin.stack, "model_id": model}
        self.membership.on_lease_gained = self._open_gates
        async with self.membership.running():
            reporting = tasks.spawn(self._report_loads(), name="report loads")
            try:
                yield
            finally:
                await tasks.cancelled(reporting)

    def _open_gates(self) -> None:
        for pool in self._pools:
            pool.fleet.gate.update()

    # Following

    async def _follow(self, state: dict[str, Any]) -> None:
        for name, record in state["pools"].items():
            self._follow_pool(await self._pools.open(name), record)

    def _follow_pool(self, pool: ModelPool, record: dict[str, Any]) -> None:
        fleet, control = pool.fleet, pool.router.control
        apply_fleet(record, fleet, self._numbers.__next__)
        pool.selectable |= record["selectable"]
        self._pools.named |= pool.selectable and bool(pool.name)
        control.leader_may_silence = record["may_silence"]
        if control.sent != record["sent"]:
            control.sent = record["sent"]
            pool.forget_adapters()
        for worker in [each for each in fleet.pool if each.rank_fault and each.ranks]:
            fleet.drop_ranks(worker, worker.rank_fault or "")

    # Answering

    def _requests(self, name: str) -> OwnRequests:
        pool = self._pools.find(name) or self._pools.default
        requests = pool.router.control.requests
        assert isinstance(requests, OwnRequests)
        return requests

    async def _ask_requests(self, method: str, message: Message) -> Message:
        fields = dict(message.fields)
        return Message({"found": await getattr(self._requests(fields.pop("pool")), method)(**fields)})

    async def _end_group(self, message: Message) -> Message:
        aborted, failures = await self._requests(message.fields["pool"]).end_group(message.fields["group"])
        return Message({"found": [[aborted, [each.written() for each in failures]]]})

    async def _activity(self, message: Message) -> Message:
        pool = self._pools.find(message.fields["pool"])
        worker = None if pool is None else pool.fleet.pool.find(message.fields["url"])
        return Message({"found": [] if pool is None or worker is None else [await pool.health.activity(worker)]})

    async def _report_numbers(self, message: Message) -> Message:
        gates = {pool.name: pool.fleet.gate.describe() for pool in self._pools}
        numbers = {"numbers": self._admin.numbers(), "facts": self._admin.facts(), "gates": gates}
        return Message({}, orjson.dumps(numbers))  # the same content as `GET /router/info` of one process

    async def _report_metrics(self, message: Message) -> Message:
        return Message({SHARD: str(self.membership.shard.index)}, self._pools.default.router.metrics.render())

    def _loads(self) -> dict[str, PoolLoad]:
        return {name: loads.own_load() for name, loads in self._peer_loads.items()}

    async def _report_loads(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self.membership.try_send("loads", loads=self._loads())

    async def _tell_loads(self, message: Message) -> Message:
        return Message({"loads": self._loads()})

    async def _update_peer_loads(self, message: Message) -> None:
        for name, loads in self._peer_loads.items():
            if name in message.fields["loads"]:
                loads.update(PoolLoad(*message.fields["loads"][name]))
