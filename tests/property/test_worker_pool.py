"""The pool under any order of events: counts are exact, and only ready workers are routable."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.placement.sessions import Homes
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.worker_url import WorkerUrl, parse_worker_url
from miles_router.fleet.workers import Transition, Worker, WorkerState
from tests.support.tiers import examples

ADDRESSES = [parse_worker_url(f"http://worker-{number}") for number in range(4)]
THRESHOLD = 2


def busyness(worker: Worker) -> int:
    """What `LeastInFlight` goes by: its requests, and the sessions that are at home there."""
    return worker.in_flight + sum(unit.sessions for unit in worker.units)


class PoolMachine(RuleBasedStateMachine):
    """A model beside the pool: which leases are held, and which drains are waited for."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = WorkerPool(
            failure_threshold=THRESHOLD, readmit="same-weights", now=lambda: 0.0, homes=Homes(max_keys=3), admission=0.5
        )
        self.pool.listeners.append(self._heard)
        self.policy = LeastInFlight()
        self.held: list[Lease] = []
        self.ever: set[Worker] = set()
        self.drains: list[tuple[Worker, list[bool]]] = []
        self.ended_drains: list[list[bool]] = []  # by a new registration
        self.states: dict[Worker, WorkerState | None] = {}

    def _heard(self, transition: Transition) -> None:
        """What is told agrees with what was told before: nothing is skipped, nothing is told twice."""
        worker, before = transition.worker, transition.before
        assert self.states.get(worker) == before
        assert transition.reason
        self.states[worker] = transition.after
        self.ever.add(worker)

    def registered(self, position: int) -> Worker | None:
        workers = list(self.pool)
        return workers[position % len(workers)] if workers else None

    @rule(address=st.sampled_from(ADDRESSES))
    def add(self, address: WorkerUrl) -> None:
        worker = self.pool.add(address)
        assert worker in list(self.pool)
        assert worker.state is not WorkerState.DRAINING
        self.ended_drains += [told for drained, told in self.drains if drained is worker]
        self.drains = [(drained, told) for drained, told in self.drains if drained is not worker]

    @rule(position=st.integers(0, 3))
    def remove(self, position: int) -> None:
        if worker := self.registered(position):
            self.pool.remove(worker)
            self.pool.remove(worker)
            assert worker not in list(self.pool)

    @rule(position=st.integers(0, 3))
    def drain(self, position: int) -> None:
        if worker := self.registered(position):
            told: list[bool] = []
            self.drains.append((worker, told))
            self.pool.drain(worker, lambda: told.append(True))

    @rule(target=leases, key=st.none() | st.sampled_from("abcde"), excluded=st.sets(st.integers(0, 3), max_size=2))
    def lease(self, key: str | None, excluded: set[int]) -> object:
        barred = [worker for position in excluded if (worker := self.registered(position))]
        allowed = [worker for worker in self.pool.routable if worker not in barred]
        if not allowed:
            try:
                self.pool.lease(self.policy, key, barred)
            except NoWorkerAvailable:
                return multiple()
            raise AssertionError("leased a worker that was not to be had")
        lease = self.pool.lease(self.policy, key, barred, tokens=len(self.held) + 1)
        assert lease.worker in allowed
        if key is None:
            assert busyness(lease.worker) - 1 == min(busyness(w) - (w is lease.worker) for w in allowed)
        self.held.append(lease)
        return lease

    @rule(lease=consumes(leases), times=st.integers(1, 3), answered=st.booleans())
    def release(self, lease: Lease, times: int, answered: bool) -> None:
        self.held.remove(lease)
        for _ in range(times):
            lease.release(answered=answered)

    @rule(position=st.integers(0, 3), times=st.integers(1, THRESHOLD))
    def fail(self, position: int, times: int) -> None:
        if worker := self.registered(position):
            for _ in range(times):
                self.pool.record_failure(worker, "failed")

    @rule(position=st.integers(0, 3), version=st.none() | st.sampled_from("12"))
    def recover(self, position: int, version: str | None) -> None:
        if worker := self.registered(position):
            self.pool.record_alive(worker, version)
            refused = self.pool.readmission_refused(worker)
            if worker.state is WorkerState.QUARANTINED and refused:
                self.pool.set_quarantine_reason(worker, refused)
                assert not self.pool.readmit(worker, "back")
            elif worker.state is WorkerState.QUARANTINED:
                assert self.pool.readmit(worker, "back")

    @precondition(lambda self: self.ever)
    @rule(position=st.integers(0, 9))
    def hear_from_one_that_has_left(self, position: int) -> None:
        """A probe or a request that began before the removal ends after it."""
        gone = sorted((worker for worker in self.ever if worker not in list(self.pool)), key=lambda w: w.url)
        if gone:
            before = list(self.pool.routable)
            self.pool.record_failure(gone[position % len(gone)], "late")
            self.pool.record_alive(gone[position % len(gone)], "9")
            self.pool.remove(gone[position % len(gone)])
            assert list(self.pool.routable) == before

    @invariant()
    def every_slot_is_counted_once(self) -> None:
        assert self.pool.in_flight == len(self.held)
        for worker in self.ever:
            assert worker.in_flight == sum(lease.worker is worker for lease in self.held)

    @invariant()
    def tokens_are_those_of_requests_and_of_sessions_that_are_away(self) -> None:
        away = list(self.pool.homes.idle)
        assert not any(home.running for home in away)
        for worker in self.ever:
            for unit in worker.units:
                prompts = sum(lease.tokens for lease in self.held if lease.unit is unit)
                assert unit.tokens == prompts + sum(home.tokens for home in away if home.unit is unit)
                running = {id(lease.home) for lease in self.held if lease.home is not None and lease.home.unit is unit}
                assert unit.sessions == len(running) + sum(home.unit is unit for home in away)

    @invariant()
    def what_runs_of_a_session_has_begun(self) -> None:
        for lease in self.held:
            if lease.home is not None:
                assert lease.home.prompts == sum(other.home is lease.home for other in self.held)

    @rule(key=st.sampled_from("abcde"))
    def end_session(self, key: str) -> None:
        self.pool.homes.forget(key)

    @invariant()
    def ready_workers_are_routable_and_no_others(self) -> None:
        ready = [worker for worker in self.pool if worker.state is WorkerState.READY]
        assert list(self.pool.routable) == [unit.worker for unit in self.pool.snapshot.routable] == ready

    @invariant()
    def each_address_is_registered_once(self) -> None:
        urls = [worker.url for worker in self.pool]
        assert len(urls) == len({*urls}) == len(self.pool)

    @invariant()
    def quarantine_needs_failures(self) -> None:
        for worker in self.pool:
            assert worker.state is not WorkerState.READY or worker.failures < THRESHOLD

    @invariant()
    def drains_are_answered_exactly_once_and_drained_workers_vanish(self) -> None:
        for worker, told in self.drains:
            waiting = worker.state is WorkerState.DRAINING and worker.in_flight > 0
            assert len(told) == (0 if waiting else 1)
        assert all(len(told) == 1 for told in self.ended_drains)
        for worker in self.pool:
            assert worker.state is not WorkerState.DRAINING or worker.in_flight

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        assert self.pool.in_flight == 0
        assert not self.pool._leaving
        assert all(len(told) == 1 for told in [*self.ended_drains, *(told for _, told in self.drains)])


PoolMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestPool = PoolMachine.TestCase
