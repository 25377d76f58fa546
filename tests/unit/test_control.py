"""The fan-out and its effects, against workers that are functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from miles_router.asgi.exchange import Exchange
from miles_router.asgi.headers import RawHeaders
from miles_router.control.control import Control
from miles_router.control.fan_out import FanOut
from miles_router.control.health import HealthMonitor
from miles_router.control.probes import Probes
from miles_router.control.requests import OwnRequests
from miles_router.errors import BadRequest, NoWorkerAvailable, UpstreamUnreachable
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import WorkerUrl, parse_worker_url
from miles_router.fleet.workers import Signs, Worker, WorkerState
from miles_router.forwarding.outgoing import Outgoing
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.upstream import Upstream
from tests.support.waiting import until

Says = Callable[["str"], "tuple[int, bytes]"]


class FakeReply:
    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.headers = [(b"content-type", b"application/json")]
        self.body = body
        self.closed = False

    async def read_all(self, limit: int) -> bytes:
        return self.body

    def close(self) -> None:
        self.closed = True


class Workers:
    """Workers by name behind a connection of functions: what each was asked, and what it says (a failure is raised)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.probed: list[str] = []
        self.says: dict[str, Says | Exception] = {}
        self.replies: list[FakeReply] = []
        self.waits: dict[str, asyncio.Event] = {}  # before it answers at this path

    async def open(
        self,
        address: WorkerUrl,
        method: str,
        target: bytes,
        headers: RawHeaders,
        body: bytes,
        **how: object,
    ) -> Reply:
        twice = method == "GET" or target == b"/abort_request"  # what may come twice
        assert how == {"slot": False, "admit": None, "pulse": None, "once": False, "fresh": not twice}, (
            "it must get through while all connections are taken"
        )
        path = target.decode()
        if path in self.waits:
            await self.waits[path].wait()
        self.asked.append((address.host, path, orjson.loads(body)))
        await asyncio.sleep(0)
        said = self.says.get(address.host, agrees)
        if isinstance(said, Exception):
            raise said
        self.replies.append(FakeReply(*said(path)))
        return cast(Reply, self.replies[-1])

    async def fetch(
        self, address: WorkerUrl, path: str, *, headers: RawHeaders, timeout: float, limit: int
    ) -> tuple[int, bytes]:
        if path == "/model_info":
            self.probed.append(address.host)
        return 200, b"{}"

    def process(self, address: WorkerUrl) -> None:
        return None


class Scene(Workers):
    """A fleet of such workers, and its control."""

    def __init__(self, names: str) -> None:
        super().__init__()
        upstream = cast(Upstream, self)
        probes, fan_out = Probes(upstream, timeout=1.0), FanOut(upstream)
        self.pool = WorkerPool(failure_threshold=1)
        self.gate = Gate(self.pool.admission, max_held=10, timeout=0)
        self.in_flight = InFlight()
        self.fleet = Fleet(pool=self.pool, gate=self.gate, policy=LeastInFlight(), questions=probes, orders=fan_out)

        async def signs(worker: Worker) -> Signs:
            return Signs(worker.pulse.heard_at, runs=False)

        health = HealthMonitor(self.fleet, probes, signs, interval=1.0, deep_interval=0.0)
        requests = OwnRequests(self.in_flight, self.gate)
        self.control = Control(fleet=self.fleet, fan_out=fan_out, requests=requests, health=health)
        for name in names:
            self.pool.add(parse_worker_url(f"http://{name}"))

    def __getitem__(self, name: str) -> Worker:
        return self.pool.get(f"http://{name}")

    async def ask(self, path: str, **fields: Any) -> tuple[int, Any]:
        answer = await self.control.send(path, Outgoing("POST", path.encode(), [], orjson.dumps(fields)), "id")
        assert all(reply.closed for reply in self.replies)
        return answer.status, orjson.loads(answer.body)


def refuses(*paths: str) -> Says:
    return lambda path: (500 if path in paths else 200, b"{}")


def notes_the_gate(fleet: Scene, seen: list[bool]) -> Says:
    def says(path: str) -> tuple[int, bytes]:
        seen.append(fleet.gate.closed)
        return 200, b"{}"

    return says


def agrees(path: str) -> tuple[int, bytes]:
    return 200, b"{}"


GONE = UpstreamUnreachable("gone")


async def test_a_pause_closes_the_gate_before_any_worker_is_asked() -> None:
    fleet = Scene("ab")
    seen: list[bool] = []
    fleet.says["a"] = notes_the_gate(fleet, seen)
    assert await fleet.ask("/pause_generation", mode="retract") == (200, {})
    assert (seen, fleet.gate.mode) == ([True], "retract")


async def test_the_gate_stays_closed_until_every_worker_was_told_to_go_on() -> None:
    fleet = Scene("ab")
    await fleet.ask("/pause_generation")
    seen: list[bool] = []
    fleet.says["b"] = notes_the_gate(fleet, seen)
    await fleet.ask("/continue_generation")
    assert (seen, fleet.gate.closed) == ([True], False)


async def test_a_pause_that_failed_is_undone_where_it_succeeded_and_only_there() -> None:
    fleet = Scene("ab")
    fleet.says["b"] = refuses("/pause_generation")
    status, said = await fleet.ask("/pause_generation")
    assert (status, said["error"]["type"], fleet.gate.closed) == (502, "fan_out_failed", False)
    assert fleet.asked[2:] == [("a", "/continue_generation", {})]


async def test_a_worker_whose_pause_could_not_be_undone_takes_no_traffic() -> None:
    fleet = Scene("ab")
    fleet.says = {"a": refuses("/continue_generation"), "b": refuses("/pause_generation")}
    await fleet.ask("/pause_generation")
    assert (fleet["a"].state, fleet["b"].state) == (WorkerState.PAUSED, WorkerState.READY)


async def test_a_second_pause_that_fails_does_not_undo_the_first() -> None:
    fleet = Scene("ab")
    await fleet.ask("/pause_generation", mode="abort")
    fleet.says["b"] = refuses("/pause_generation")
    assert (await fleet.ask("/pause_generation", mode="abort"))[0] == 502
    assert fleet.gate.closed
    assert "/continue_generation" not in [path for _, path, _ in fleet.asked]


async def test_control_requests_run_one_after_the_other_and_aborts_beside_them() -> None:
    fleet = Scene("a")
    fleet.waits["/update_weights_from_disk"] = go_on = asyncio.Event()
    updating = asyncio.ensure_future(fleet.ask("/update_weights_from_disk", model_path="m"))
    flushing = asyncio.ensure_future(fleet.ask("/flush_cache"))
    assert (await fleet.ask("/abort_request", abort_all=True))[0] == 200
    assert not flushing.done()
    go_on.set()
    await asyncio.gather(updating, flushing)
    assert [path for _, path, _ in fleet.asked] == ["/abort_request", "/update_weights_from_disk", "/flush_cache"]


@pytest.mark.parametrize("path", ["/update_weight_version", "/update_weights_from_disk", "/end_weight_update"])
async def test_after_new_weights_every_worker_is_asked_for_its_version(path: str) -> None:
    fleet = Scene("ab")
    await fleet.ask(path, new_version="7", model_path="m")
    await until(lambda: {*fleet.probed} == {"a", "b"}, "both are asked")
    assert {worker.weight_version for worker in fleet.pool} == {"7"}


async def test_only_those_that_were_updated_have_the_new_version() -> None:
    fleet = Scene("ab")
    await fleet.ask("/update_weight_version", new_version="1")
    fleet.says["b"] = GONE
    assert (await fleet.ask("/update_weight_version", new_version="2"))[0] == 502
    assert (fleet.pool.weight_version, fleet["a"].weight_version, fleet["b"].weight_version) == ("2", "2", "1")
    assert (fleet["a"].state, fleet["b"].state) == (WorkerState.READY, WorkerState.OUTDATED)


Steps = list["tuple[str, list[str] | None, bool]"]


@pytest.mark.parametrize(
    "steps",
    [
        [("release", None, True), ("resume", None, False)],
        [("release", None, True), ("resume", ["weights"], True), ("resume", ["kv_cache"], False)],
        [("release", None, True), ("resume", ["kv_cache", "cuda_graph"], True), ("resume", ["weights"], False)],
        [("release", ["kv_cache"], True), ("release", ["weights"], True), ("resume", ["weights"], True)],
        [("release", ["cuda_graph"], True), ("resume", ["kv_cache"], True), ("resume", [], False)],
        [("release", ["kv_cache"], True), ("resume", ["kv_cache"], False)],
        [("resume", ["weights"], False)],
    ],
)
async def test_the_fleet_sleeps_until_every_part_it_released_is_back(steps: Steps) -> None:
    fleet = Scene("a")
    for action, tags, asleep in steps:
        await fleet.ask(f"/{action}_memory_occupation", **({} if tags is None else {"tags": tags}))
        assert (fleet.gate.asleep_since is not None) is asleep, (action, tags)


def running(fleet: Scene, rid: str, name: str | None) -> Exchange:
    exchange = Exchange("id")
    exchange.flight.worker_url = name and f"http://{name}"
    fleet.in_flight.enter(exchange, orjson.dumps({"rid": rid}))
    return exchange


@pytest.mark.parametrize(
    ("fields", "asked", "aborted"),
    [
        ({"rid": "one"}, "a", ["one"]),
        ({"rid": "two"}, "b", ["two"]),
        ({"rid": "waiting"}, "ab", ["waiting"]),
        ({"rid": "nobody"}, "ab", []),
        ({"abort_all": True}, "ab", ["one", "two", "waiting"]),
        ({"rid": "one", "abort_all": True}, "ab", ["one", "two", "waiting"]),
    ],
)
async def test_an_abort_goes_where_it_is_meant(fields: dict[str, Any], asked: str, aborted: list[str]) -> None:
    fleet = Scene("ab")
    flying = {rid: running(fleet, rid, name) for rid, name in (("one", "a"), ("two", "b"), ("waiting", None))}
    await fleet.ask("/abort_request", **fields)
    assert [name for name, _, _ in fleet.asked] == list(asked)
    assert [rid for rid, exchange in flying.items() if exchange.flight.aborted] == aborted


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"mode": "none"}'])
async def test_bad_input_closes_no_gate(body: bytes) -> None:
    fleet = Scene("a")
    with pytest.raises(BadRequest):
        await fleet.control.send("/pause_generation", Outgoing("POST", b"/pause_generation", [], body), "id")
    assert (fleet.asked, fleet.gate.closed) == ([], False)


async def test_without_workers_nothing_is_paused() -> None:
    fleet = Scene("")
    with pytest.raises(NoWorkerAvailable):
        await fleet.ask("/pause_generation")
    assert not fleet.gate.closed
