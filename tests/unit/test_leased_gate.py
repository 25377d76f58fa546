"""The gate of a shard of several machines: without a lease no generation passes, nobody waits for one, and who waited
for something else goes on when that is over."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from miles_router.errors import Unavailable
from miles_router.fleet.gate import Gate
from miles_router.fleet.pool import WorkerPool
from miles_router.shards.membership import Membership
from tests.support.waiting import until
from tests.unit.test_gate import Who


class Lease:
    """What a gate asks of a membership."""

    def __init__(self) -> None:
        self.is_fresh = True

    def check(self) -> None:
        if not self.is_fresh:
            raise Unavailable("not fresh")


def made(lease: Lease) -> Gate:
    gate = Gate(WorkerPool().admission, max_held=10, timeout=0.0)
    gate.lease = cast(Membership, lease)
    return gate


async def test_without_a_lease_no_generation_passes_and_none_waits() -> None:
    lease = Lease()
    gate = made(lease)
    assert gate.is_open()
    lease.is_fresh = False
    assert gate.closed
    assert not gate.is_open()
    with pytest.raises(Unavailable):
        await gate.wait(Who())
    lease.is_fresh = True
    assert not gate.closed


async def test_request_behind_a_pause_and_a_lost_lease_continues_with_the_next_lease() -> None:
    lease = Lease()
    gate = made(lease)
    gate.pause("in_place")
    waiting = asyncio.ensure_future(gate.wait(Who()))
    await until(lambda: gate.held == 1, "it waits")
    lease.is_fresh = False
    gate.resume()
    assert gate.held == 1
    lease.is_fresh = True
    gate.update()
    await waiting
