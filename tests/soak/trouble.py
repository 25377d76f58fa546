"""What a trainer and an unsteady cluster do to a fleet meanwhile: new weights, pauses, deaths."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import aiohttp

from tests.soak.processes import Fleet
from tests.support.waiting import PATIENCE

MODES = ("abort", "retract", "in_place")
#: Seconds between two troubles, at least and at most.
BETWEEN = (0.5, 2.0)
#: Seconds for which a worker is gone, at most.
AWAY = 0.5


class Trouble:
    """Makes trouble until a time of the loop's clock; afterwards all is well again."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._dice = dice
        self._version = 0

    async def make(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            if self._dice.random() < 0.35:
                await self._lose_a_worker()
            else:
                await self.update()
            await asyncio.sleep(self._dice.uniform(*BETWEEN))

    async def update(self) -> None:
        """What a trainer does between two steps."""
        self._version += 1
        mode = self._dice.choice(MODES)
        await self._order("/pause_generation", mode=mode)
        await self._order("/update_weight_version", new_version=str(self._version), abort_all_requests=False)
        await self._order("/continue_generation")
        self.counts[f"updates, {mode}"] += 1

    async def _lose_a_worker(self) -> None:
        worker = self._dice.choice(self._fleet.workers)
        await worker.kill()
        await asyncio.sleep(self._dice.random() * AWAY)
        await worker.start()
        self.counts["workers killed"] += 1
        await self.update()  # it came back with old weights

    async def _order(self, path: str, **body: object) -> None:
        """As a trainer gives an order: again and again, until all have done it."""
        async with aiohttp.ClientSession(self._fleet.router.url) as http:
            loop = asyncio.get_running_loop()
            end, said = loop.time() + PATIENCE, b""
            while loop.time() < end:
                async with http.post(path, json=body) as reply:
                    said = await reply.read()
                if reply.status == 200:
                    return
                await asyncio.sleep(0.1)
        raise AssertionError(f"{path} is not carried out: {said!r}")
