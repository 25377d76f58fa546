"""Whether a fleet stands still, as it outlives the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_router.engines.actions import Pause
from miles_router.errors import StateError
from miles_router.pools.registrations import StandstillRow
from miles_router.slots import CONTROL
from miles_router.state.journal import Journal
from miles_router.state.store import StateStore
from tests.support.quiet_fleet import quiet_fleet


def count_no_more(journal: Journal) -> None:
    """Have the next commit be held, and fail behind that."""
    readable = os.open(os.devnull, os.O_RDONLY)
    os.dup2(readable, journal._count)
    os.close(readable)


async def test_a_pause_that_was_refused_is_not_found_by_the_next_router(tmp_path: Path) -> None:
    store, fleet = StateStore(tmp_path), quiet_fleet()
    row = StandstillRow(store, "", fleet)
    await row.keep()
    await store._ask(CONTROL, count_no_more)
    fleet.begin_pause(Pause("abort"))
    with pytest.raises(StateError):
        await row.keep()
    fleet.end_pause()
    await row.keep()
    assert [each async for each in store.owners(CONTROL)] == []
    await store.close()
