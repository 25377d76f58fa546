"""The model of how large a router is: `tests/benchmarks/scale/model.py`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from miles_router.slots import SLOTS
from tests.benchmarks.scale.model import BUSY, Costs, Need, Rollout, bound, busiest, needed, wait

COSTS = Costs(
    request=1e-4, turn=2e-3, store=1e-3, row_byte=5e-10, disk_token=40.0, idle=12_000.0, held_token=13.0
)  # fmt: skip


def need(agents: int, costs: Costs = COSTS, *, rows: bool = False, state: bool = False) -> Need:
    return needed(agents, costs, Rollout(seconds=20.0, new_tokens=500), rows=rows, state=state)


def test_cores_and_bytes_grow_with_agents() -> None:
    one, ten = need(1_000, rows=True, state=True), need(10_000, rows=True, state=True)
    for name in ("turns", "cores", "memory", "network", "disk"):
        assert getattr(ten, name) == pytest.approx(10 * getattr(one, name))
    assert (one.turns, one.disk) == (50.0, 50 * 500 * 40.0)


def test_there_are_as_few_processes_as_are_not_too_busy() -> None:
    for agents in (1_000, 10_000, 100_000):
        found = need(agents)
        assert found.cores / found.processes * busiest(found.processes, agents) <= BUSY
        fewer = found.processes - 1
        assert not fewer or found.cores / fewer * busiest(fewer, agents) > BUSY


def test_the_busiest_process_has_more_than_its_share() -> None:
    assert busiest(1, 10) == 1
    assert busiest(48, 1e12) == pytest.approx(2 * 48 / SLOTS), "some have two slots, some one"
    assert busiest(16, 100) > busiest(16, 10_000) > 1


def test_what_no_number_of_processes_is_enough_for_is_said_to_be() -> None:
    assert need(100_000, replace(COSTS, turn=2e-2)).first == "slots"
    assert need(100_000, rows=True).first != "slots"


def test_a_queue_that_is_always_busy_never_ends() -> None:
    assert wait(2e-3, 0.5) == pytest.approx(2e-3)
    assert wait(2e-3, 1.0) == math.inf


def test_few_cores_bound_what_many_processes_show() -> None:
    assert bound(1, 2, 1e-3, 5e-4) == pytest.approx(1_000)
    assert bound(2, 2, 1e-3, 5e-4) == pytest.approx(2 / 1.5e-3)
