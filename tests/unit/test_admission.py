"""Whether a new session may begin, on which worker, and who waits for room in which order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from miles_router.asgi.flight import Flight
from miles_router.engines.facts import Facts
from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.admission_queue import AdmissionQueue
from miles_router.fleet.gate import Gate
from miles_router.fleet.lease import Lease
from miles_router.fleet.placement.admission import Admission
from miles_router.fleet.placement.homes import LONGEST, Homes
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Unit, Worker
from tests.support.waiting import soon, until

MEMORY, SHARE = 1_000, 0.5
POLICY = LeastInFlight()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Who(Flight):
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
    def rules(self) -> Admission:
        return self.pool.admission

    @property
    def units(self) -> list[Unit]:
        return [unit for worker in self.pool for unit in worker.units]

    @property
    def tokens(self) -> list[int]:
        return [unit.tokens for unit in self.units]

    def lease(self, key: str, tokens: int, preferred: Unit | None = None) -> Lease:
        url = None if preferred is None else preferred.worker.url
        return self.pool.lease(POLICY, key, tokens=tokens, generates=True, preferred=url)

    def turn(self, key: str, tokens: int, *, answered: bool = True) -> Unit:
        lease = self.lease(key, tokens)
        lease.release(answered=answered)
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

    def end(self, key: str) -> None:
        """A session is over."""
        self.leases.pop(key).release()
        self.pool.homes.forget(key)


async def settled() -> None:
    """Let everything that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


# Where there is room


def test_a_session_begins_where_there_is_room() -> None:
    scene = Scene(MEMORY, MEMORY)
    assert scene.rules.most() > MEMORY, "a worker without sessions takes any"
    assert scene.turn("a", 400) is not scene.turn("b", 300)
    assert scene.rules.most() == 200
    scene.pool.homes.forget("a")
    assert scene.rules.most() > MEMORY
    for worker in scene.pool:
        scene.pool.remove(worker)
    assert scene.rules.most() > MEMORY, "whoever looks for a worker says that there is none"


def test_it_goes_where_the_room_is_whatever_the_policy_prefers() -> None:
    scene = Scene(MEMORY, MEMORY)
    idle, busy = scene.turn("a", 400), scene.lease("b", 100).unit
    assert idle is not busy
    assert (idle.in_flight, busy.in_flight) == (0, 1)
    assert scene.turn("c", 300) is busy
    assert scene.turn("a", 450) is idle, "who has begun goes home"


def test_where_admission_is_off_all_begin() -> None:
    scene = Scene(MEMORY, share=0.0)
    scene.turn("a", 1_000)
    assert not scene.gate.queue.must_wait("b", 1_000)


def test_text_rollouts_keep_no_session_away_from_a_worker_that_has_none() -> None:
    scene = Scene(MEMORY)
    scene.pool.lease(POLICY, tokens=900, generates=True)
    assert not scene.gate.queue.must_wait("a", 400)
    assert not scene.gate.queue.must_wait(None, 400), "and they wait for nobody"


def test_what_asked_for_something_else_before_begins_with_its_first_generation() -> None:
    scene = Scene(MEMORY, MEMORY)
    full = scene.lease("a", 0).unit
    held = scene.lease("b", 400, preferred=full)
    assert held.unit is full
    assert scene.turn("c", 300) is not full
    assert scene.gate.queue.must_wait("a", 300), "that it asked for the models is no beginning"
    assert scene.turn("a", 200) is not full, "nothing of it is cached there"


def test_a_prompt_for_which_no_worker_has_memory_waits_for_nothing() -> None:
    """What is told from bytes may be wrong: its engine refuses it, and knows."""
    scene = Scene(MEMORY, 2 * MEMORY)
    for key in "ab":
        scene.turn(key, 400)
    assert scene.gate.queue.must_wait("c", 2 * MEMORY)
    assert not scene.gate.queue.must_wait("c", 2 * MEMORY + 1)


def test_memory_that_no_engine_names_bounds_nothing() -> None:
    scene = Scene(None, MEMORY)
    for key in "abcd":
        scene.turn(key, 900)
    assert not scene.gate.queue.must_wait("e", 900)


def test_a_worker_whose_engine_was_not_asked_yet_takes_one_session() -> None:
    scene = Scene(MEMORY)
    scene.turn("a", 400)
    newcomer = scene.pool.add(parse_worker_url("http://new"))
    assert not scene.gate.queue.must_wait("b", 400)
    assert scene.turn("b", 400) is newcomer.units[0]
    assert scene.gate.queue.must_wait("c", 400), "nobody knows how many it may take"
    newcomer.asked = True
    assert not scene.gate.queue.must_wait("c", 400), "it was asked, and does not say"


def test_a_worker_that_does_not_answer_for_once_has_the_memory_that_it_had() -> None:
    scene = Scene(MEMORY)
    scene.turn("a", 400)
    (worker,) = scene.pool
    for _ in range(2):
        scene.pool.record_failure(worker, "refused")
    assert worker.facts is None
    assert scene.gate.queue.must_wait("b", 400)


def test_both_halves_of_a_pair_need_room() -> None:
    scene = Scene(MEMORY, MEMORY)
    prefill, decode = scene.pool
    scene.pool.add(prefill.address, attributes={"worker_type": "prefill"})
    scene.pool.add(decode.address, attributes={"worker_type": "decode"})
    for key in "ab":
        scene.turn(key, 100)
    assert not scene.gate.queue.must_wait("c", 300)
    scene.pool.lease_prefill(POLICY, "a", (), 300, b"")
    assert scene.gate.queue.must_wait("c", 300)
    assert not scene.gate.queue.must_wait("c", 200)


# What gives room back


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


def test_a_later_turn_that_failed_leaves_what_was_held() -> None:
    scene = Scene(MEMORY)
    scene.turn("a", 300)
    scene.turn("a", 900, answered=False)
    assert scene.tokens == [300]
    assert not scene.gate.queue.must_wait("a", 400)


def test_a_first_turn_that_was_lost_and_answered_elsewhere_has_begun_there() -> None:
    scene = Scene(MEMORY, MEMORY)
    lost = scene.lease("a", 400)
    lost.release(answered=False)
    again = scene.pool.lease(POLICY, "a", [lost.worker], tokens=400, generates=True)
    again.release()
    assert (lost.unit.tokens, again.unit.tokens) == (0, 400)
    assert scene.turn("a", 400) is again.unit
    assert not scene.gate.queue.must_wait("a", 400)


def test_a_session_whose_worker_is_gone_goes_on_at_once() -> None:
    scene = Scene(MEMORY, MEMORY)
    home = scene.turn("a", 400)
    scene.turn("b", 400)
    scene.pool.remove(home.worker)
    assert scene.gate.queue.must_wait("c", 400)
    assert not scene.gate.queue.must_wait("a", 400)
    scene.turn("a", 400)
    assert scene.tokens == [800]


def _ends(scene: Scene) -> None:
    scene.end("a")


def _expires(scene: Scene) -> None:
    scene.leases["a"].release()
    scene.clock.now += LONGEST + 1


def _joins(scene: Scene) -> None:
    scene.add("new", MEMORY)


def _has_more_memory(scene: Scene) -> None:
    next(iter(scene.pool)).facts = Facts(token_capacity=2 * MEMORY)


def _has_ranks(scene: Scene) -> None:
    scene.pool.set_ranks(next(iter(scene.pool)), 2)


def _is_lost(scene: Scene) -> None:
    scene.pool.remove(next(iter(scene.pool)))


def _is_quarantined(scene: Scene) -> None:
    for _ in range(3):
        scene.pool.record_failure(next(iter(scene.pool)), "refused")


def _is_drained(scene: Scene) -> None:
    scene.add("new", MEMORY)
    scene.pool.drain(next(iter(scene.pool)), lambda: None)


@pytest.mark.parametrize(
    "happens", [_ends, _expires, _joins, _has_more_memory, _has_ranks, _is_lost, _is_quarantined, _is_drained]
)
async def test_whatever_gives_room_is_noticed(happens: Callable[[Scene], None]) -> None:
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


# In which order


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
    last = scene.pool.lease(POLICY, "b2", tokens=10, preferred=other.worker.url, generates=True)
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


async def test_on_the_only_worker_nobody_goes_before_who_wants_much() -> None:
    scene = Scene(MEMORY)
    await scene.begin("a", 300)
    large, small = scene.come("large", 500, Who(1)), scene.come("small", 50, Who(2))
    await settled()
    await soon(until(lambda: scene.gate.held == 2, "both wait"))
    scene.end("a")
    await soon(large)
    scene.end("large")
    await soon(small)
    assert scene.began == ["a", "large", "small"]


async def test_what_is_kept_is_free_again_when_its_session_waits_no_more() -> None:
    scene = Scene(MEMORY)
    await scene.begin("a", 300)
    who = Who(1)
    large, small = scene.come("large", 500, who), scene.come("small", 50, Who(2))
    await settled()
    who.aborted = True
    scene.gate.release(who)
    await soon(asyncio.gather(large, small))
    assert scene.began == ["a", "small"]


async def test_the_turns_of_a_session_begin_with_the_first_of_them() -> None:
    scene = Scene(MEMORY)
    await scene.begin("a", 500)
    tasks = [scene.come("b", 300, Who(1)), scene.come("c", 300, Who(2)), scene.come("b", 400, Who(3))]
    await settled()
    scene.end("a")
    await soon(asyncio.gather(tasks[0], tasks[2]))
    await settled()
    assert (scene.began, scene.gate.held, tasks[1].done()) == (["a", "b", "b"], 1, False)
    tasks[1].cancel()


# Who waits no longer


async def test_who_is_aborted_or_leaves_lets_the_next_one_look() -> None:
    scene = Scene(MEMORY)
    await scene.begin("a", 500)
    who = Who(1)
    tasks = [scene.come("b", 600, who), scene.come("c", 600, Who(2)), scene.come("d", 200, Who(3))]
    await settled()
    who.aborted = True
    scene.gate.release(who)
    await soon(tasks[0])
    tasks[1].cancel()
    await asyncio.wait({tasks[1]})
    assert scene.gate.held == 1
    scene.end("a")
    await soon(tasks[2])
    assert scene.began == ["a", "d"]


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


# Many


async def test_only_the_first_of_those_who_wait_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_router.fleet.admission_queue.GLANCE", 0.001)
    scene, looks = Scene(MEMORY), Counter[str]()
    goes = AdmissionQueue._goes

    def counted(self: AdmissionQueue, place: Any) -> bool:
        looks[place.key] += 1
        return goes(self, place)

    monkeypatch.setattr(AdmissionQueue, "_goes", counted)
    scene.turn("a", 500)
    tasks = [scene.come(str(number), 500, Who(number)) for number in range(50)]
    await until(lambda: looks["0"] > 20, "it looks again and again")
    assert {looks[str(number)] for number in range(1, 50)} == {1}
    for task in tasks:
        task.cancel()


async def test_a_thousand_waiters_are_woken_as_often_as_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each release wakes those that begin, not all that wait."""
    scene, looks = Scene(MEMORY * 1_000), [0]
    counted = Admission.most

    def most(self: Admission, *, spare: bool = False) -> float:
        looks[0] += 1
        return counted(self, spare=spare)

    monkeypatch.setattr(Admission, "most", most)
    await scene.begin("a", 500_000)
    tasks = [scene.come(str(number), 500, Who(number)) for number in range(1_000)]
    await settled()
    assert scene.gate.held == 1_000
    looks[0] = 0
    scene.end("a")
    await soon(asyncio.gather(*tasks))
    assert scene.began[1:] == [str(number) for number in range(1_000)]
    assert looks[0] <= 3 * 1_000 + 100
    assert scene.gate.held == 0
