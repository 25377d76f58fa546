"""The fan-out and its effects, against workers that are functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from miles_router.asgi.exchange import Exchange
from miles_router.control.fan_out import Control, PartlyFailed
from miles_router.errors import BadRequest, NoWorkerAvailable, UpstreamUnreachable
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker, WorkerPool, WorkerState
from miles_router.forwarding.connection import Reply
from miles_router.forwarding.forwarder import Forwarder, Outgoing

Says = Callable[[Outgoing], "tuple[int, bytes]"]


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


class Fleet:
    """Workers by name, what each was asked, and what it says (a failure is raised)."""

    def __init__(self, names: str) -> None:
        self.pool = WorkerPool(failure_threshold=1)
        self.gate = Gate(max_held=10, timeout=0)
        self.in_flight = InFlight()
        self.asked: list[tuple[str, str, Any]] = []
        self.says: dict[str, Says | Exception] = {}
        self.replies: list[FakeReply] = []
        self.refreshed = 0
        self.control = Control(
            pool=self.pool,
            forwarder=cast(Forwarder, self),
            gate=self.gate,
            in_flight=self.in_flight,
            on_new_weights=self._refresh,
        )
        for name in names:
            self.pool.add(parse_worker_url(f"http://{name}"))

    def _refresh(self) -> None:
        self.refreshed += 1

    def __getitem__(self, name: str) -> Worker:
        return self.pool.get(f"http://{name}")

    async def send_to(self, worker: Worker, request: Outgoing, *, slot: bool = True) -> Reply:
        assert not slot, "it must get through while all connections are taken"
        name = worker.address.host
        self.asked.append((name, request.target.decode(), orjson.loads(request.body)))
        await asyncio.sleep(0)
        said = self.says.get(name, agrees)
        if isinstance(said, Exception):
            raise said
        self.replies.append(FakeReply(*said(request)))
        return cast(Reply, self.replies[-1])

    async def ask(self, path: str, **fields: Any) -> tuple[int, Any]:
        answer = await self.control.send(path, Outgoing("POST", path.encode(), [], orjson.dumps(fields)), "id")
        assert all(reply.closed for reply in self.replies)
        return answer.status, orjson.loads(answer.body)


def refuses(*paths: str) -> Says:
    return lambda request: (500 if request.target.decode() in paths else 200, b"{}")


def notes_the_gate(fleet: Fleet, seen: list[bool]) -> Says:
    def says(request: Outgoing) -> tuple[int, bytes]:
        seen.append(fleet.gate.closed)
        return 200, b"{}"

    return says


def agrees(request: Outgoing) -> tuple[int, bytes]:
    return 200, b"{}"


GONE = UpstreamUnreachable("gone")


async def test_a_pause_closes_the_gate_before_any_worker_is_asked() -> None:
    fleet = Fleet("ab")
    seen: list[bool] = []
    fleet.says["a"] = notes_the_gate(fleet, seen)
    assert await fleet.ask("/pause_generation", mode="retract") == (200, {})
    assert (seen, fleet.gate.mode) == ([True], "retract")


async def test_the_gate_stays_closed_until_every_worker_was_told_to_go_on() -> None:
    fleet = Fleet("ab")
    await fleet.ask("/pause_generation")
    seen: list[bool] = []
    fleet.says["b"] = notes_the_gate(fleet, seen)
    await fleet.ask("/continue_generation")
    assert (seen, fleet.gate.closed) == ([True], False)


async def test_a_pause_that_failed_is_undone_where_it_succeeded_and_only_there() -> None:
    fleet = Fleet("ab")
    fleet.says["b"] = refuses("/pause_generation")
    status, said = await fleet.ask("/pause_generation")
    assert (status, said["error"]["type"], fleet.gate.closed) == (502, "fan_out_failed", False)
    assert fleet.asked[2:] == [("a", "/continue_generation", {})]


async def test_a_worker_whose_pause_could_not_be_undone_takes_no_traffic() -> None:
    fleet = Fleet("ab")
    fleet.says = {"a": refuses("/continue_generation"), "b": refuses("/pause_generation")}
    await fleet.ask("/pause_generation")
    assert (fleet["a"].state, fleet["b"].state) == (WorkerState.PAUSED, WorkerState.READY)


async def test_a_second_pause_that_fails_does_not_undo_the_first() -> None:
    fleet = Fleet("ab")
    await fleet.ask("/pause_generation", mode="abort")
    fleet.says["b"] = refuses("/pause_generation")
    assert (await fleet.ask("/pause_generation", mode="abort"))[0] == 502
    assert fleet.gate.closed
    assert "/continue_generation" not in [path for _, path, _ in fleet.asked]


async def test_control_requests_run_one_after_the_other_and_aborts_beside_them() -> None:
    fleet = Fleet("a")
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(worker: Worker, request: Outgoing, *, slot: bool = True) -> Reply:
        if request.target == b"/update_weights_from_disk":
            started.set()
            await go_on.wait()
        return await Fleet.send_to(fleet, worker, request, slot=slot)

    fleet.send_to = slowly  # type: ignore[method-assign]
    updating = asyncio.ensure_future(fleet.ask("/update_weights_from_disk", model_path="m"))
    await started.wait()
    flushing = asyncio.ensure_future(fleet.ask("/flush_cache"))
    assert (await fleet.ask("/abort_request", abort_all=True))[0] == 200
    assert not flushing.done()
    go_on.set()
    await asyncio.gather(updating, flushing)
    assert [path for _, path, _ in fleet.asked] == ["/abort_request", "/update_weights_from_disk", "/flush_cache"]


@pytest.mark.parametrize("path", ["/update_weight_version", "/update_weights_from_disk", "/end_weight_update"])
async def test_after_new_weights_every_worker_is_asked_for_its_version(path: str) -> None:
    fleet = Fleet("ab")
    await fleet.ask(path, new_version="7", model_path="m")
    assert fleet.refreshed == 1
    assert {worker.weight_version for worker in fleet.pool} == {"7"}
    await fleet.ask("/flush_cache")
    assert fleet.refreshed == 1


async def test_only_those_that_were_updated_have_the_new_version() -> None:
    fleet = Fleet("ab")
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
    fleet = Fleet("a")
    for action, tags, asleep in steps:
        await fleet.ask(f"/{action}_memory_occupation", **({} if tags is None else {"tags": tags}))
        assert (fleet.gate.asleep_since is not None) is asleep, (action, tags)


def running(fleet: Fleet, rid: str, name: str | None) -> Exchange:
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
    fleet = Fleet("ab")
    flying = {rid: running(fleet, rid, name) for rid, name in (("one", "a"), ("two", "b"), ("waiting", None))}
    await fleet.ask("/abort_request", **fields)
    assert [name for name, _, _ in fleet.asked] == list(asked)
    assert [rid for rid, exchange in flying.items() if exchange.flight.aborted] == aborted


async def test_a_newcomer_is_paused_as_the_fleet_is() -> None:
    fleet = Fleet("a")
    newcomer = parse_worker_url("http://new")
    await fleet.control.pause_newcomer(newcomer, None)
    assert fleet.asked == []
    await fleet.ask("/pause_generation", mode="in_place")
    await fleet.control.pause_newcomer(newcomer, None)
    assert fleet.asked[-1] == ("new", "/pause_generation", {"mode": "in_place"})
    fleet.says["new"] = GONE
    with pytest.raises(PartlyFailed, match="http://new could not be: gone"):
        await fleet.control.pause_newcomer(newcomer, None)


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"mode": "none"}'])
async def test_bad_input_closes_no_gate(body: bytes) -> None:
    fleet = Fleet("a")
    with pytest.raises(BadRequest):
        await fleet.control.send("/pause_generation", Outgoing("POST", b"/pause_generation", [], body), "id")
    assert (fleet.asked, fleet.gate.closed) == ([], False)


async def test_without_workers_nothing_is_paused() -> None:
    fleet = Fleet("")
    with pytest.raises(NoWorkerAvailable):
        await fleet.ask("/pause_generation")
    assert not fleet.gate.closed
