"""Requests in flight of several processes, whatever happens in which order: once everybody has followed, each sees the
same whole, and nothing is left when all is given back. Processes die in between."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from miles_router.errors import NoWorkerAvailable
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.worker_url import WorkerUrl, parse_worker_url
from tests.support.shared_pools import SharedPools
from tests.support.tiers import examples

ADDRESSES = [parse_worker_url(f"http://worker-{number}") for number in range(3)]
PROCESSES = st.integers(0, 1)


class MachineOfProcesses(RuleBasedStateMachine):
    """A leader and two data processes, as far as their pools go; beside it, which leases are held where."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = SharedPools(2)
        self.control, self.data = self.pools.control, self.pools.data
        self.leases: list[list[Lease]] = [[], []]

    @rule(address=st.sampled_from(ADDRESSES))
    def add(self, address: WorkerUrl) -> None:
        self.control.add(address)

    @rule(address=st.sampled_from(ADDRESSES))
    def remove(self, address: WorkerUrl) -> None:
        for worker in [each for each in self.control if each.url == address.url]:
            self.control.remove(worker)

    @rule(address=st.sampled_from(ADDRESSES))
    def drain(self, address: WorkerUrl) -> None:
        for worker in [each for each in self.control if each.url == address.url]:
            self.control.drain(worker, lambda: None)

    @rule(address=st.sampled_from(ADDRESSES), ranks=st.integers(1, 3), where=st.sets(st.integers(0, 2)))
    def learn_ranks(self, address: WorkerUrl, ranks: int, where: set[int]) -> None:
        pools = [self.control, *self.data]
        for pool in [pools[each] for each in where]:
            for worker in [each for each in pool if each.url == address.url]:
                pool.set_ranks(worker, ranks)

    @rule(row=PROCESSES)
    def catch_up(self, row: int) -> None:
        self.pools.follow(self.data[row])

    @rule()
    def tell(self) -> None:
        self.pools.tell()

    @rule(row=PROCESSES, key=st.none() | st.sampled_from("abc"), tokens=st.integers(0, 9))
    def lease(self, row: int, key: str | None, tokens: int) -> None:
        try:
            self.leases[row].append(self.data[row].lease(LeastInFlight(), key, tokens=tokens))
        except NoWorkerAvailable:
            assert not self.data[row].snapshot.routable

    @rule(row=PROCESSES, which=st.integers(0, 99))
    def release(self, row: int, which: int) -> None:
        if self.leases[row]:
            lease = self.leases[row].pop(which % len(self.leases[row]))
            lease.release()
            lease.release()

    @rule(row=PROCESSES, key=st.sampled_from("abc"))
    def end_session(self, row: int, key: str) -> None:
        self.data[row].homes.forget(key)

    @rule(row=PROCESSES)
    def die(self, row: int) -> None:
        self.leases[row] = []
        self.data[row] = self.pools.started()

    @rule()
    def settle(self) -> None:
        self.pools.follow(*self.data)
        self.pools.shown()

    @invariant()
    def nothing_is_negative(self) -> None:
        for pool in (self.control, *self.data):
            for worker in pool:
                assert worker.in_flight >= 0
                assert all(unit.in_flight >= 0 for unit in worker.units)

    def teardown(self) -> None:
        """Everybody follows: the leader sees the leases of all, and of all units that all know alike each sees
        the same. All is given back: nothing is left."""
        self.settle()
        held = Counter(lease.worker.url for leases in self.leases for lease in leases)
        for worker in self.control:
            assert worker.in_flight == held[worker.url], worker
        for leases in self.leases:
            for lease in leases:
                lease.release()
        for pool in self.data:
            for key in "abc":
                pool.homes.forget(key)
        self.pools.tell()
        pools: list[WorkerPool] = [self.control, *self.data]
        for each in pools:
            for worker in each:
                numbers = {(unit.in_flight, unit.tokens, unit.sessions) for unit in worker.units}
                assert (worker.in_flight, numbers) == (0, {(0, 0, 0)}), worker
        assert not self.control.in_flight


TestMachineOfProcesses = MachineOfProcesses.TestCase
TestMachineOfProcesses.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
