"""A simulated engine that is stopped between two tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.generation import Generation


class Brake:
    """Stops an engine between two tokens until it is paused or the brake is off."""

    def __init__(self, engine: Engine) -> None:
        self.on = False
        #: Once this is true of a generation the brake is on.
        self.when: Callable[[Generation], bool] | None = None
        self._engine = engine
        self._thaw = engine.thaw
        engine.thaw = self._held  # type: ignore[method-assign]

    async def _held(self, generation: Generation) -> None:
        await self._thaw(generation)
        if self.when is not None and self.when(generation):
            self.on, self.when = True, None
        while self.on and self._engine.paused is None:
            await asyncio.sleep(0.0002)
            await self._thaw(generation)
