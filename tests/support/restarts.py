"""Routers one after the other, each on a state directory as a kill at that moment would have left it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.running_router import RunningRouter, running_router


class StateDirectories:
    """Each router has a copy of the directory of the one before it, made while that one still runs."""

    def __init__(self, worker: SimulatedWorker, place: Path) -> None:
        self.worker = worker
        self._place = place
        self._number = 0

    @contextlib.asynccontextmanager
    async def router(self, *middlewares: MiddlewareSpec, **settings: Any) -> AsyncIterator[RunningRouter]:
        """On what the last one had written when this was called."""
        before, self._number = self.directory, self._number + 1
        if before.exists():
            shutil.copytree(before, self.directory)
        settings |= {"middlewares": middlewares, "state_dir": str(self.directory)}
        async with running_router(self.worker.url, **settings) as router:
            await router.probed()
            yield router

    @property
    def directory(self) -> Path:
        return self._place / str(self._number)
