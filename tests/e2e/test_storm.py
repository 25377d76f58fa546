"""A storm over simulated workers: clients generate, whole and streamed, while the fleet is paused in every way and
updated, and its workers die and come back. Every answer is what went through the workers' proxies, and none is missing.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from miles_router.tasks import together
from miles_router.testing import MoeShape, SimulatedWorker
from tests.support.chains import chain, check, check_experts
from tests.support.events import answers_of
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.tiers import size
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.storm

CLIENTS, EACH, DISTURBANCES = size(heavy=(64, 24, 96), otherwise=(16, 6, 12))
TOKENS = 40
MOE = MoeShape(2, 8, 2)
ROW_BYTES = 2 * 2 * 4
MODES = ("abort", "retract", "in_place")
JSON = ("Content-Type", "application/json")
#: Probed often: workers that come back are let in.
SETTINGS: dict[str, Any] = {
    "partial_rollout": "resume",
    "resume_on_worker_loss": True,
    "max_retries": 9,
    "health_check_interval": 0.05,
    "health_check_timeout": PATIENCE,
    "health_check_failure_threshold": 1,
    "readmit": "healthy",
}


@dataclass
class Storm:
    """Clients of one router, what happens to its workers, and how much was compared."""

    router: RunningRouter
    workers: list[SimulatedWorker]
    proxies: list[RecordingProxy]
    dice: random.Random
    answered: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    async def client(self, number: int) -> None:
        """One generation after the other, each held against the proxies."""
        for turn in range(EACH):
            request_id, stream = f"{number}.{turn}", (number + turn) % 2 == 0
            params = {"max_new_tokens": TOKENS, "ignore_eos": True}
            body = {"text": f"{number}, {turn}: 世界", "sampling_params": params, "stream": stream}
            body |= {"return_logprob": True, "return_routed_experts": True}
            data = json.dumps(body).encode()
            reply = await self.router.ask("POST", "/generate", [JSON, ("X-Request-Id", request_id)], data)
            assert reply.status == 200, reply.body
            (answer,) = answers_of(reply.body, stream=stream)
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
            pieces = chain(self.proxies, request_id, answer)
            self.counts["positions"] += check(answer, pieces)
            self.counts["rows"] += check_experts(answer, pieces, row=ROW_BYTES)
            self.counts["goes"] += len(pieces)
            self.answered += 1

    async def disturb(self) -> None:
        """Spread over the generations: a worker dies, or a trainer pauses the fleet and gives it new weights."""
        for number in range(1, DISTURBANCES + 1):
            least = CLIENTS * EACH * number // (DISTURBANCES + 1)
            await until(partial(self._answered, least), f"{least} answers", deadline=10 * PATIENCE)
            if self.dice.random() < 0.3:
                await self._lose(self.dice.choice(self.workers))
            else:
                await self._update(self.dice.choice(MODES), f"v{number}")

    def _answered(self, least: int) -> bool:
        return self.answered >= least

    async def _lose(self, worker: SimulatedWorker) -> None:
        self.counts["deaths"] += 1
        await worker.kill()
        await worker.restart()

    async def _update(self, mode: str, version: str) -> None:
        self.counts[mode] += 1
        await self._control("/pause_generation", mode=mode)
        await self._control("/update_weight_version", new_version=version, abort_all_requests=False)
        await self._control("/continue_generation")

    async def _control(self, path: str, **body: Any) -> None:
        """As a trainer does it, which asks again where a worker is not there at the moment."""
        data = json.dumps(body).encode()
        while (await self.router.ask("POST", path, [JSON], data)).status != 200:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)


async def test_no_token_is_lost_or_made_up_in_a_storm(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    kind: dict[str, Any] = {"moe": MOE, "token_latency_s": 0.002, "stop_probability": 0.0}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(SimulatedWorker(**kind, replica=number)) for number in range(3)]
        proxies = [await stack.enter_async_context(RecordingProxy(worker.url)) for worker in workers]
        router = await stage.router(*(proxy.url for proxy in proxies), **SETTINGS)
        storm = Storm(router, workers, proxies, random.Random(0))
        clients = [storm.client(number) for number in range(CLIENTS)]
        await together([*clients, storm.disturb()], name="storm")
        await stage.nothing_under_way()
        # Where the router leaves a worker in the middle of its answer, that one's server may log a defect.
        stage.defects[:] = [defect for defect in stage.defects if not defect.startswith("aiohttp.server")]
    with capsys.disabled():
        print(f"\n{storm.answered} answers: {dict(storm.counts)}")
    assert storm.answered == CLIENTS * EACH
    assert storm.counts["positions"] == TOKENS * CLIENTS * EACH
    assert storm.counts["goes"] > CLIENTS * EACH, "some were cut"
    for proxy in proxies:  # an engine that was lost may go on with what it was asked, and aborts it when it looks
        names = Counter(str(each.body.get("rid") or "") for each in proxy.begun)
        assert not [name for name, times in names.items() if name and times > 1]
