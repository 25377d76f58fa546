"""What of fleets outlives the process, as a router finds it at its start."""

from __future__ import annotations

from pathlib import Path

from miles_router.app import create_app
from miles_router.settings.config import RouterConfig


async def test_a_start_commits_nothing_that_is_held_already(tmp_path: Path) -> None:
    """A disk that is full keeps no router from starting."""
    commits = []
    for _ in range(2):
        app = create_app(RouterConfig(state_dir=str(tmp_path)))
        assert app.router.store is not None
        async with app.running():
            commits.append(app.router.store.commits)
    assert commits == [1, 0]
