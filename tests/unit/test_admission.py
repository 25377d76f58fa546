"""Whether a new session may begin, on which worker, and who waits for room in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from miles_router.asgi.exchange import Routing
from miles_router.engines.facts import Facts
from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.evaluation import Evaluation
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.placement.sessions import LONGEST, Homes
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Unit, Worker
from tests.support.waiting import Clock, settled, soon, until

MEMORY, SHARE = 1_000, 0.5
POLICY = LeastInFlight()


class Who(Routing):
    """A request that came at this place."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number


class Scene:
    """A fleet, its gate, and those who want to begin."""

    def __init__(
        self, *memories: int | None, share: float = SHARE, max_held: int = 10_000, timeout: float = 0.0
    ) -> None:
        self.clock = Clock()
        self.pool = WorkerPool(homes=Homes(now=self.clock), admission=share)
        self.gate = Gate(self.pool.admission, max_held=max_held, timeout=timeout)
        self.began: list[str] = []
        self.leases: dict[str, Lease] = {}
        for number, memory in enumerate(memories):
            self.add(f"worker-{number}", memory)

    def add(self, name: str, memory: int | None) -> Worker:
        worker = self.pool.add(parse_worker_url(f"http://{name}"))
        worker.asked, worker.facts = True, Facts(token_capacity=memory)
        return worker

    @property
    def first(self) -> Worker:
        return next(iter(self.pool))

    @property
    def tokens(self) -> list[int]:
        return [unit.tokens for worker in self.pool for unit in worker.units]

    def lease(self, key: str, tokens: int, preferred: Unit | None = None) -> Lease:
        url = None if preferred is None else preferred.worker.url
        return self.pool.lease(POLICY, key, tokens=tokens, generates=True, preferred=url)

    def turn(self, key: str, tokens: int) -> Unit:
        lease = self.lease(key, tokens)
        lease.release()
        return lease.unit

    async def begin(self, key: str, tokens: int, who: Who | None = None) -> None:
        """As the forwarder does it, but for the request."""
        if self.gate.queue.must_wait(key, tokens):
            await self.gate.queue.wait(who or Who(), key, tokens, asyncio.get_running_loop().time())
        if who is None or not who.aborted:
            self.began.append(key)
            self.leases[key] = self.lease(key, tokens)

    def come(self, key: str, tokens: int, who: Who | None = None) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.begin(key, tokens, who))

    async def have_begun(self, count: int) -> None:
        await until(lambda: len(self.began) == count, f"{count} have begun")

    def end(self, key: str) -> None:
        self.leases.pop(key).release()
        self.pool.homes.forget(key)


def test_it_goes_where_the_room_is_whatever_the_policy_prefers() -> None:
    scene = Scene(MEMORY, MEMORY)
    idle, busy = scene.turn("a", 400), scene.lease("b", 100).unit
    assert idle is not busy
    assert (idle.in_flight, busy.in_flight) == (0, 1)
    assert scene.turn("c", 300) is busy
    assert scene.turn("a", 450) is idle, "who has begun goes home"


@pytest.mark.parametrize("prompts", [1, 2], ids=["alone", "beside another turn"])
def test_a_first_turn_that_failed_holds_nothing(prompts: int) -> None:
    scene = Scene(MEMORY)
    leases = [scene.lease("a", 400) for _ in range(prompts)]
    assert scene.gate.queue.must_wait("b", 300)
    assert not scene.gate.queue.must_wait("a", 400), "it has begun"
    for lease in leases:
        lease.release(answered=False)
    assert scene.tokens == [0]
    scene.turn("b", 300)
    assert scene.gate.queue.must_wait("a", 400), "it begins anew"


def _expires(scene: Scene) -> None:
    scene.leases["a"].release()
    scene.clock.now += LONGEST + 1


def _is_quarantined(scene: Scene) -> None:
    for _ in range(3):
        scene.pool.record_failure(scene.first, "refused")


def _is_drained(scene: Scene) -> None:
    scene.add("new", MEMORY)
    scene.pool.drain(scene.first, lambda: None)


HAPPENS: dict[str, Callable[[Scene], object]] = {
    "the session ends": lambda scene: scene.end("a"),
    "the session expires": _expires,
    "a worker joins": lambda scene: scene.add("new", MEMORY),
    "more memory": lambda scene: setattr(scene.first, "facts", Facts(token_capacity=2 * MEMORY)),
    "ranks": lambda scene: scene.pool.set_ranks(scene.first, 2),
    "the worker is lost": lambda scene: scene.pool.remove(scene.first),
    "quarantine": _is_quarantined,
    "drain": _is_drained,
}


@pytest.mark.parametrize("happens", HAPPENS.values(), ids=HAPPENS)
async def test_whatever_gives_room_is_noticed(happens: Callable[[Scene], object]) -> None:
    """Where no worker is left, whoever looks for one says so."""
    scene = Scene(MEMORY)
    await scene.begin("a", 400)
    scene.leases["a"].release()
    scene.leases["a"] = scene.lease("a", 400)
    waits = asyncio.ensure_future(scene.gate.queue.wait(Who(), "b", 400, asyncio.get_running_loop().time()))
    await settled()
    assert not waits.done()
    happens(scene)
    await soon(waits)
    assert scene.gate.held == 0


async def test_whoever_waits_for_room_gets_it_in_the_order_of_coming() -> None:
    scene = Scene(MEMORY)
    await scene.begin("a", 500)
    tasks = [scene.come(str(number), 200, Who(number)) for number in (2, 0, 3, 1)]
    await settled()
    assert (scene.gate.held, scene.began) == (4, ["a"])
    scene.end("a")
    await until(lambda: scene.gate.held == 2, "two have room")
    await settled()
    assert (scene.gate.held, scene.began) == (2, ["a", "0", "1"])
    scene.end("0")
    await until(lambda: scene.gate.held == 1, "one more has")
    scene.end("1")
    await soon(asyncio.gather(*tasks))
    assert scene.began == ["a", "0", "1", "2", "3"]


class Evaluating(Who):
    """A request of an evaluation."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        pool, nobody = WorkerPool(), cast("Any", None)
        gate = Gate(pool.admission, max_held=0, timeout=0.0)
        self.evaluation = Evaluation(Fleet(pool=pool, gate=gate, policy=POLICY, probes=nobody, fan_out=nobody))


@pytest.mark.parametrize(("many", "few"), [(Who, Evaluating), (Evaluating, Who)], ids=["training", "evaluations"])
async def test_training_and_evaluations_take_turns_however_many_come(many: type[Who], few: type[Who]) -> None:
    scene = Scene(MEMORY, max_held=6)
    await scene.begin("0", 500)
    tasks = [scene.come(f"m{number}", 500, many(number)) for number in range(6)]
    await settled()
    tasks += [scene.come(f"f{number}", 500, few(10 + number)) for number in range(2)]
    await settled()
    with pytest.raises(NoWorkerAvailable, match="6 requests wait already"):
        await scene.begin("m6", 500, many(6))
    expected = ["0", "m0", "f0", "m1", "f1", "m2", "m3", "m4", "m5"]
    for begun, key in enumerate(expected, 1):
        await scene.have_begun(begun)
        scene.end(key)
    await soon(asyncio.gather(*tasks))
    assert scene.began == expected


@pytest.mark.parametrize(("many", "few"), [(Who, Evaluating), (Evaluating, Who)], ids=["training", "evaluations"])
async def test_they_take_turns_beside_a_kept_worker_too(many: type[Who], few: type[Who]) -> None:
    for line in (Who, Evaluating):
        scene = Scene(MEMORY, MEMORY)
        for key in "ab":
            await scene.begin(key, 400)
        large = scene.come("large", 500, line(1))
        await settled()
        kinds = [("m", many)] * 4 + [("f", few)] * 2
        small = [scene.come(f"{name}{place}", 50, kind(2 + place)) for place, (name, kind) in enumerate(kinds)]
        await scene.have_begun(4)
        assert (large.done(), sorted(key[0] for key in scene.began[2:])) == (False, ["f", "m"])
        for key in "ab":
            scene.end(key)
        await soon(asyncio.gather(large, *small))


async def test_who_wants_much_keeps_one_worker_and_the_others_go_on() -> None:
    scene = Scene(MEMORY, MEMORY)
    for key in "ab":
        await scene.begin(key, 300)
    large = scene.come("large", 500, Who(1))
    await settled()
    small = [scene.come(str(number), 50, Who(2 + number)) for number in range(6)]
    await until(lambda: len(scene.began) == 6, "four have room on the other worker")
    await settled()
    assert (scene.began, sorted(scene.tokens)) == (["a", "b", "0", "1", "2", "3"], [300, 500])
    assert not large.done()
    (home,) = (key for key in "ab" if scene.leases[key].unit.tokens == 300)
    kept = scene.leases[home].unit
    _running = [scene.pool.lease(POLICY, preferred=kept.worker.url) for _ in range(9)]
    scene.end(home)
    await soon(asyncio.gather(large))
    assert sorted(scene.tokens) == [500, 500]
    scene.end("large")
    await soon(asyncio.gather(*small))
    assert scene.began[6:] == ["large", "4", "5"]


async def test_the_worker_that_is_kept_stays_the_same() -> None:
    """Else who wants much might never find one with so much room."""
    scene = Scene(MEMORY, MEMORY)
    for key, tokens in (("a", 300), ("b", 390), ("b2", 10)):
        await scene.begin(key, tokens)
    kept, other = scene.leases["a"].unit, scene.leases["b"].unit
    scene.leases["b2"].release()
    scene.pool.homes.forget("b2")
    last = scene.lease("b2", 10, other)
    large = scene.come("large", 500, Who(1))
    await settled()
    scene.end("b")
    assert (kept.tokens, other.tokens) == (300, 10)
    await soon(scene.come("small", 50, Who(2)))
    assert (kept.tokens, other.tokens, large.done()) == (300, 60, False)
    last.release()
    scene.end("a")
    await soon(large)
    assert (kept.tokens, other.tokens) == (500, 60)


async def test_waiting_for_room_is_bounded_and_refused_with_the_reason() -> None:
    scene = Scene(MEMORY, max_held=1, timeout=0.05)
    scene.turn("a", 500)
    waits = scene.come("b", 500)
    await settled()
    with pytest.raises(
        NoWorkerAvailable, match=r"no worker has room for this session; 1 requests wait already \(--gate-max-held\)"
    ):
        await scene.begin("c", 500)
    with pytest.raises(NoWorkerAvailable, match=r"has waited 0\.05 s \(--gate-timeout\)"):
        await soon(waits)
    assert scene.gate.held == 0
    waits = scene.come("b", 500)
    await settled()
    scene.pool.homes.forget("a")
    await soon(waits)


async def test_those_who_wait_for_room_take_nobody_s_place_in_a_pause() -> None:
    scene = Scene(MEMORY, max_held=1)
    scene.turn("a", 500)
    new = scene.come("b", 500)
    await settled()
    scene.gate.pause("retract")
    running = asyncio.ensure_future(scene.gate.wait(Who()))
    await settled()
    assert (scene.gate.held, running.done()) == (2, False)
    scene.pool.homes.forget("a")
    scene.gate.resume()
    await soon(asyncio.gather(running, new))


async def test_nobody_begins_while_the_gate_is_closed() -> None:
    scene = Scene(MEMORY)
    scene.turn("a", 500)
    looks = scene.come("b", 500)
    await settled()
    scene.gate.pause("abort")
    scene.pool.homes.forget("a")
    leaves = asyncio.ensure_future(scene.gate.queue.wait(Who(1), "c", 500, asyncio.get_running_loop().time()))
    await settled()
    leaves.cancel()  # which has the first one look
    await settled()
    assert (scene.began, looks.done(), scene.gate.held) == ([], False, 1)
    scene.gate.resume()
    await soon(looks)
