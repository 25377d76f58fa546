"""A storm over a router of two processes with a store: they are killed again and again while agents and text rollouts
go on, and in the middle a trainer pauses the fleet and gives it new weights."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from miles_router.tasks import together
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.layers import layered, written
from tests.support.persistence import Agent, Persistence, Rollout
from tests.support.processes import Processes
from tests.support.session_trial import SESSIONS
from tests.support.tiers import size
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.storm

CLIENTS, KILLS, EVERY = size(heavy=(64, 30, 2.0), otherwise=(6, 2, 0.0))  # of each kind; every so many seconds
#: Answers between two kills, at least.
ANSWERS = CLIENTS


class Storm:
    """All clients of one router, and what happens to its processes."""

    def __init__(self, router: Processes, worker: SimulatedWorker) -> None:
        self.router = router
        self.worker = worker
        self.agents = [Agent(f"agent-{number}") for number in range(CLIENTS)]
        self.rollouts = [Rollout(f"{number}") for number in range(CLIENTS)]
        self.dice = random.Random(0)
        self.killed = 0
        self.broken: Counter[str] = Counter()
        self.over = False

    async def run(self) -> int:
        """Until all is checked; how many tokens were compared."""
        everybody: list[Agent | Rollout] = [*self.agents, *self.rollouts]
        clients = [
            (each, Persistence(self.router.url, kept=number % 2 == 0, broken=self.broken))
            for number, each in enumerate(everybody)
        ]
        trainer = Persistence(self.router.url, kept=False, broken=Counter())
        try:
            for agent in self.agents:
                await trainer.ask("/sessions", {"session_id": agent.name})
            going = [each.run(client, lambda: not self.over) for each, client in clients]
            await together([*going, self._disturb(trainer)], name="storm")
            await self.router.whole()
            await self.router.becomes_idle()
            sampled = {each.rid: each for each in self.worker.log.generations}
            return sum([await each.check(trainer, sampled) for each, _ in clients])
        finally:
            for client in (trainer, *(client for _, client in clients)):
                await client.close()

    @property
    def answered(self) -> int:
        texts = sum(len(turns) for each in self.rollouts for turns in each.answered)
        return texts + sum(len(each.answers) for each in self.agents)

    async def _disturb(self, trainer: Persistence) -> None:
        try:
            for number in range(KILLS):
                if number == KILLS // 2:
                    await self._update(trainer)
                await self._go_on(number)
                self._kill()
            await self._go_on(KILLS)
        finally:
            self.over = True

    async def _go_on(self, number: int) -> None:
        due, enough = time.monotonic() + EVERY, self.answered + ANSWERS
        await until(lambda: self.answered >= enough and time.monotonic() >= due, f"answers behind kill {number}")

    def _kill(self) -> None:
        if alive := sorted(self.router.children):
            os.kill(self.dice.choice(alive), signal.SIGKILL)
            self.killed += 1

    async def _update(self, trainer: Persistence) -> None:
        """Behind the answered pause nothing is sent to the engine, though processes die and come."""
        await trainer.ask("/pause_generation", {"mode": "retract"})
        sent = len(self.worker.log.generations)
        self._kill()
        await self.router.whole()
        await trainer.ask("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert len(self.worker.log.generations) == sent, "nothing is generated behind an answered pause"
        await trainer.ask("/continue_generation", {})


async def test_no_kill_of_any_process_loses_or_alters_what_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"hf_checkpoint": checkpoint(), "state_dir": str(tmp_path / "state")}
    config = written(tmp_path, ((SESSIONS, {}), (CACHE, {})), **settings)
    kind: dict[str, Any] = {"tokenizer": checkpoint(), "weight_version": "1", "log_limit": 1_000_000}
    worker = SimulatedWorker(**kind, token_latency_s=0.005, stop_probability=0.0)
    async with worker, layered(config, worker) as router:
        storm = Storm(router, worker)
        compared = await asyncio.wait_for(storm.run(), 10 * PATIENCE)
        assert worker.running == 0
    with capsys.disabled():
        print(
            f"\n{storm.killed} kills, {storm.answered} answers, {compared} positions, broken off {dict(storm.broken)}"
        )
    assert all(each.answers for each in storm.agents)
    assert all(each.answered[0] for each in storm.rollouts)
