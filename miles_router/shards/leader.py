"""The leader: a router without clients and middlewares, which decides for all shards.

Its requests come from shards, which have already checked keys and routes. The leader replies only when every shard
acts by the reply.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_router import tasks
from miles_router.admin.routes import Admin
from miles_router.asgi.exchange import Scope
from miles_router.asgi.wire import header_texts, raw_headers
from miles_router.control.fan_out import FanOut
from miles_router.edge import RouterApp
from miles_router.errors import ConfigError, StateError, StateOutdated
from miles_router.fleet.caches import space_numbers
from miles_router.fleet.standstill import restore_standstill
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Transition, Worker, WorkerActivity
from miles_router.forwarding.upstream import Upstream
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import RouterConfig
from miles_router.shards.all_requests import AllRequests
from miles_router.shards.channel import Channel, Message
from miles_router.shards.coordinator import ShardConnection, ShardCoordinator
from miles_router.shards.leadership import Leadership, StoredLeadership
from miles_router.shards.merged_view import MergedView
from miles_router.shards.pools import (
    distrust_weights,
    make_leader_pool,
    release_idle_workers,
    retiring_workers,
    set_loads,
)
from miles_router.shards.process_table import ProcessTable
from miles_router.shards.proof import prove
from miles_router.shards.protocol import Ack, Join
from miles_router.shards.role import ProcessRole
from miles_router.shards.state import Record, apply_fleet, dump_fleet, own_cache_numbers
from miles_router.shards.topology import SOCKET, Shards, clock
from miles_router.slots import CONTROL
from miles_router.version import __version__

logger = logging.getLogger(__name__)

#: Seconds between two checks for changes that no request has asked for, and between two reports of loads.
INTERVAL = 0.1
#: The most connections that have not proved yet that they know the secret. Further ones are closed.
MAX_UNPROVEN = 256


class LeaderRole(ProcessRole):
    """The role of the leader.

    Args:
        directory: the directory of the router's sockets, on one machine.
        listener: the listening socket, on several machines.
        term: how often the platform has started a leader, if it counts that.
        on_replaced: called when another leader has taken over.
    """

    serves_clients = False
    sends_requests = False
    slots = (CONTROL,)

    def __init__(
        self,
        shards: Shards,
        *,
        directory: Path | None = None,
        listener: socket.socket | None = None,
        term: int | None = None,
        on_replaced: Callable[[], None],
    ) -> None:
        #: The app that answers requests; set after construction.
        self.edge: RouterApp
        self.shards = shards
        self.shares_state = shards.shared_state
        self._directory = directory
        self._listener = listener
        self._on_replaced = on_replaced
        self._leadership = Leadership(term)
        self._config: RouterConfig  # the settings as given: shards need what this process leaves out
        self._pools: Pools
        self._channels: set[Channel] = set()
        self._unproven = 0
        self._admin: Admin
        self._registrations: Registrations
        process_id_at = None if directory is None else ProcessTable(directory).process_id
        self.coordinator = ShardCoordinator(shards, self._dump_state, self.confirm_leadership, process_id_at)
        space_numbers()

    # The parts of the router

    def config(self, config: RouterConfig) -> RouterConfig:
        """Return the settings without keys and middlewares, since only shards reach this process, and without workers:
        it is not known yet whether an earlier leader ran.
        """
        self._config = config
        nothing: dict[str, Any] = dict.fromkeys(("api_key", "api_key_file", "admin_api_key", "admin_api_key_file"))
        return replace(config, worker_urls=(), middlewares=(), otel=False, dashboard=False, **nothing)

    def fan_out(self, upstream: Upstream) -> FanOut:
        return FanOut(upstream) if self.shards.local else FanOut(upstream, self.confirm_leadership, self.is_sole_leader)

    def connect(self, pool: ModelPool) -> None:
        fleet = pool.fleet
        make_leader_pool(fleet.pool)
        fleet.wait_until_applied = self.coordinator.wait_for_shards
        fleet.subscribe(self._publish_soon)
        pool.router.control.requests = AllRequests(pool.name, self.coordinator)
        pool.health.activity = partial(self._activity, pool.name)

    async def _activity(self, pool: str, worker: Worker) -> WorkerActivity:
        """Ask the shards, which have the requests, for a worker's activity."""
        answers = await self.coordinator.ask_all("activity", pool=pool, url=worker.url)
        found = [WorkerActivity(*each) for answer in answers for each in answer.fields["found"]]
        return WorkerActivity(
            min((each.silent_seconds for each in found), default=math.inf), any(each.has_requests for each in found)
        )

    def show(self, pools: Pools, admin: Admin) -> None:
        self._pools, self._admin = pools, admin
        MergedView(admin, pools, self.coordinator, self._config)

    async def restore(self, registrations: Registrations) -> None:
        """Claim the leadership. Workers are restored once it is known whether an earlier leader ran."""
        self._registrations = registrations
        try:
            if not self.shards.local and registrations.store is not None:
                await registrations.check_model()
                self._leadership = StoredLeadership(registrations.store)
            term, first = await self._leadership.claim()
        except StateError as error:
            raise ConfigError(f"state_dir: {error}") from None
        self.coordinator.start_term(term, first=first)

    @asynccontextmanager
    async def running(self, pools: Pools) -> AsyncIterator[None]:
        """Listen for shards and lead. Connected shards provide the state that an earlier leader decided."""
        leading = [tasks.spawn(self.coordinator.lead(), name="lead")]
        server = await self._listen()
        try:
            while not self.coordinator.leader.open:  # noqa: ASYNC110  # shards, and time, are waited for
                await asyncio.sleep(INTERVAL / 10)
            await self._take_over(self.coordinator.leader.state)
            leading += [
                tasks.spawn(self._publish_changes(), name="publish changes"),
                tasks.spawn(self._send_peer_loads(), name="send peer loads"),
            ]
            yield
        finally:
            for each in leading:
                await tasks.cancelled(each)
            server.close()
            for channel in tuple(self._channels):
                channel.close()

    async def _listen(self) -> asyncio.AbstractServer:
        if self._directory is None:
            return await asyncio.start_server(self._admit, sock=self._listener)
        path = self._directory / SOCKET
        with suppress(FileNotFoundError):
            os.unlink(path)
        return await asyncio.start_unix_server(self._welcome, path)

    async def _refresh_loads(self) -> bool:
        """Refresh the counts of requests in flight; return whether all acting shards have answered."""
        whole = await self.coordinator.refresh_loads()
        for pool in self._pools:
            set_loads(pool.fleet.pool, self.coordinator.load_of(pool.name))
        return whole

    # Leadership

    async def confirm_leadership(self) -> bool:
        """Return whether there is no later leader. If there is one, end this leader."""
        try:
            return await self._leadership.confirm()
        except StateOutdated:
            logger.warning("leader_succeeded")
            self._on_replaced()
            return False

    def is_sole_leader(self) -> bool:
        """Return whether no later leader can have decided anything yet, even if this process is stopped meanwhile."""
        return self.coordinator.leader.is_sole_leader(clock())

    # Taking over

    async def _take_over(self, state: bytes | None) -> None:
        if state:
            for name, record in json.loads(state)["pools"].items():
                fleet = (await self._pools.open(name)).fleet
                restore_standstill(fleet, record)
                apply_fleet(record, fleet, own_cache_numbers(0).__next__)
            space_numbers(max((each.caches.number for each in self._pools.workers), default=0))
            for pool in self._pools:
                distrust_weights(pool.fleet.pool)
            logger.warning("leader_took_over", extra={"fields": {"workers": len(self._pools.workers)}})
            await self._registrations.restore(of_this_run=True)
            for pool in self._pools:  # the previous leader may have been lost between keeping two of these
                await pool.router.control.save_standstill()
        else:
            await self._registrations.restore()
            for url in self._config.worker_urls:
                self._pools.default.fleet.pool.add_unreached(parse_worker_url(url))
            await self._pools.default.health.first_checks()
        self.coordinator.restored.set()
        self.coordinator.publish()

    # Decisions

    def _dump_state(self) -> dict[str, Any]:
        return {"urls": self.coordinator.urls(), "pools": {pool.name: self._section(pool) for pool in self._pools}}

    def _section(self, pool: ModelPool) -> Record:
        control = pool.router.control
        return {
            **dump_fleet(pool.fleet),
            "selectable": pool.selectable,
            "may_silence": control.may_silence,
            "sent": control.sent,
        }

    def _publish_soon(self, transition: Transition) -> None:
        """Publish the state in the next loop iteration, after all changes that belong together."""
        asyncio.get_running_loop().call_soon(self.coordinator.publish)

    async def _send_peer_loads(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self.coordinator.send_peer_loads([pool.name for pool in self._pools])

    async def _publish_changes(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self.coordinator.publish()
            leaving = [(pool.fleet.pool, each) for pool in self._pools if (each := retiring_workers(pool.fleet.pool))]
            if leaving:
                await self.coordinator.wait_for_shards()
                if await self._refresh_loads():
                    for pool, workers in leaving:
                        release_idle_workers(pool, workers)

    # Shards

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unproven >= MAX_UNPROVEN:
            writer.close()
            return
        self._unproven += 1
        try:
            await prove(reader, writer, self.shards.secret, accepts=True)
        except OSError as error:
            if not isinstance(error, ConnectionAbortedError):  # a probe: it only tested whether the port listens
                logger.warning("connection_not_authenticated", extra={"fields": {"reason": str(error)}})
            writer.close()
            return
        finally:
            self._unproven -= 1
        await self._welcome(reader, writer)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        joined: ShardConnection | None = None  # None for a refused shard

        async def join(message: Message) -> None:
            nonlocal joined
            fields = message.fields
            if (reason := self._refusal(fields)) is not None:
                logger.error("shard_refused", extra={"fields": {"url": fields["url"], "reason": reason}})
                channel.send("refused", reason=reason)
                return
            shard, instance, has_lease, (term, number) = fields["join"]
            if term > self.coordinator.leader.term:  # this leader's clock is behind the previous leader's clock
                logger.error("leader_outdated", extra={"fields": {"term": term}})
                self._on_replaced()
                return
            self._pools.one_model_only |= fields["one_model_only"]
            self._admin.stack = fields["stack"]
            asked = Join(shard, instance, has_lease, (term, number), message.blob)
            joined = ShardConnection(channel, asked, fields["url"])
            self.coordinator.add_connection(joined)

        async def ack(message: Message) -> None:
            if joined is not None:
                self.coordinator.record_ack(joined, Ack(**message.fields))

        async def loads(message: Message) -> None:
            if joined is not None:
                self.coordinator.record_loads(joined, message)

        handlers = {
            "join": join,
            "ack": ack,
            "loads": loads,
            "http": self._http,
            "is_paused": self._is_paused,
            "term": self._term,
            "report": self._report,
        }
        channel = Channel(reader, writer, handlers)
        self._channels.add(channel)
        try:
            await channel.run()
        finally:
            self._channels.discard(channel)
            if joined is not None:
                self.coordinator.remove_connection(joined)

    def _refusal(self, fields: Mapping[str, Any]) -> str | None:
        count = self.shards.count
        if fields["version"] != __version__:
            return f"the shard runs version {fields['version']}, and the leader {__version__}"
        shard = fields["join"][0]
        if fields["shards"] != count or shard not in range(count):
            return f"it is configured as shard {shard} of {fields['shards']}, but the leader has {count} shards"
        model, own = fields["model_id"], self._config.model_id
        if None not in (model, own) and model != own:  # its state directory has sessions of the leader's model
            return f"its --model-id is {model!r}, and the leader's is {own!r}: start all processes with the same one"
        return None

    async def _is_paused(self, message: Message) -> Message:
        pool, fields = self._find(message), message.fields
        return Message({"paused": await pool.health.is_paused(fields["url"]) if pool is not None else False})

    async def _term(self, message: Message) -> Message:
        return Message({"term": self.coordinator.leader.term})

    async def _report(self, message: Message) -> None:
        """Apply what a shard has observed of a worker."""
        fields, pool = message.fields, self._find(message)
        worker = None if pool is None else pool.fleet.pool.find(fields["url"])
        if pool is None or worker is None or worker.serial != fields["serial"]:
            return
        if fields["kind"] == "silence":  # in the background: it asks the shards, which answer on these connections
            silence = pool.health.record_silence(worker, fields["reason"], self._config.connect_timeout)
            tasks.spawn(silence, name="record silence")
        elif fields["kind"] == "failure":
            pool.fleet.pool.record_failure(worker, fields["reason"])
        elif fields["kind"] == "stall":
            pool.fleet.pool.record_stall(worker, fields["reason"])
        else:
            pool.fleet.drop_ranks(worker, fields["reason"])

    def _find(self, message: Message) -> ModelPool | None:
        return self._pools.find(message.fields["pool"])

    async def _http(self, message: Message) -> Message:
        """Answer a request once every shard acts by the answer."""
        await self.coordinator.restored.wait()
        await self._refresh_loads()
        answer = await run_app(self.edge, message)
        await self.coordinator.wait_for_shards()
        return answer


async def run_app(app: RouterApp, message: Message) -> Message:
    """Run an HTTP request that came as a message through an app, and return the reply as a message."""
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
