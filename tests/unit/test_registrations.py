"""What of fleets outlives the process, as a router finds it at its start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_router.app import create_app
from miles_router.settings.config import RouterConfig
from miles_router.slots import CONTROL
from miles_router.testing import SimulatedWorker
from tests.support.fleet import post
from tests.support.stage import Stage


async def test_a_start_commits_nothing_that_is_held_already(tmp_path: Path) -> None:
    """A disk that is full keeps no router from starting."""
    commits = []
    for _ in range(2):
        app = create_app(RouterConfig(state_dir=str(tmp_path)))
        assert app.router.store is not None
        async with app.running():
            commits.append(app.router.store.commits)
    assert commits == [1, 0]


@pytest.mark.parametrize("drain", [False, True])
async def test_a_worker_that_is_removed_and_registered_at_once_is_held_as_it_is_registered(
    stage: Stage, tmp_path: Path, drain: bool
) -> None:
    async with SimulatedWorker() as worker:
        router = await stage.router(worker.url, state_dir=str(tmp_path))
        store = router.app.router.store
        assert store is not None
        for _ in range(20):
            await asyncio.gather(
                post(router, "/remove_worker", url=worker.url, drain=drain), post(router, "/add_worker", url=worker.url)
            )
            held = [owner async for owner, _ in store.owners(CONTROL) if owner.startswith("worker")]
            assert held == [f"worker {each.url}" for each in router.pool], "what the next router would have"
            assert (await post(router, "/add_worker", url=worker.url)).status == 200
