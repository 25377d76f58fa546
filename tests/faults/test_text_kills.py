"""Text rollouts while their router is killed, again and again: what a client was answered is there, and exact."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, truth
from tests.support.running_router import RouterProcess, router_process
from tests.support.waiting import until

KILLS = 3
PARAMS = {"max_new_tokens": 8, "ignore_eos": True}


class Rollouts:
    """Rollouts that go on turn by turn, and what was answered whole."""

    def __init__(self) -> None:
        self.answered: dict[str, tuple[str, list[int]]] = {}  # by id: the whole text, and what was sampled
        self.texts = [f"Rollout {number}:" for number in range(6)]

    async def run(self, url: str, number: int) -> None:
        async with aiohttp.ClientSession(url) as http:
            with contextlib.suppress(aiohttp.ClientError):
                while True:
                    await self._turn(http, number)

    async def _turn(self, http: aiohttp.ClientSession, number: int) -> None:
        stream = bool(number % 2)
        body = {"text": self.texts[number], "sampling_params": PARAMS, "stream": stream}
        async with http.post("/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer: dict[str, Any] = await (_last_event(reply) if stream else reply.json())
        whole = self.texts[number] + answer["text"]
        self.answered[answer["meta_info"]["id"]] = whole, answer["output_ids"]
        self.texts[number] = whole + " Go on:" if len(whole) < 400 else f"Rollout {number}:"

    async def check(self, url: str) -> None:
        """Everything that was answered, by its id and by its text, and its rows of experts."""
        async with aiohttp.ClientSession(url) as http:
            for rid, (text, sampled) in self.answered.items():
                for asked in ({"rid": rid}, {"rid": rid, "text": text}):
                    async with http.post("/retrieve_from_text", json=asked) as reply:
                        found = await reply.json()
                    assert reply.status == 200, found
                    assert (found["response"], found["rid"], found["finished"]) == (text, rid, True)
                    assert found["tokens"][-len(sampled) :] == sampled
                    assert found["loss_mask"][-len(sampled) :] == [1] * len(sampled)
                async with http.post("/routed_experts", json={"rid": rid}) as reply:
                    assert reply.status == 200, await reply.text()
                    assert await reply.read() == truth(found["tokens"]).astype(np.uint8).tobytes()


async def _last_event(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    """The event that ends the answer: whoever has it takes the answer for whole."""
    async for line in reply.content:
        if line.startswith(b"data: {"):
            answer: dict[str, Any] = orjson.loads(line[6:])
            if answer["meta_info"]["finish_reason"] is not None:
                return answer
    raise aiohttp.ClientError("cut")


async def test_no_kill_loses_a_text_that_was_answered(tmp_path: Path) -> None:
    rollouts = Rollouts()
    async with SimulatedWorker(tokenizer=checkpoint(), weight_version="1", moe=MOE) as worker:
        command = ["--worker-urls", worker.url, "--hf-checkpoint", checkpoint(), "--middleware-paths", CACHE, EXPERTS]
        command += ["--set", f"routed_experts_middleware.moe_shape={SHAPE}"]
        command += ["--state-dir", str(tmp_path / "state"), "--state-rows", "true"]
        for _ in range(KILLS):
            async with router_process(*command, expect_status=-signal.SIGKILL) as router:
                await rollouts.check(router.url)
                await _killed_in_the_midst(router, rollouts)
        async with router_process(*command) as router:
            await rollouts.check(router.url)


async def _killed_in_the_midst(router: RouterProcess, rollouts: Rollouts) -> None:
    enough = len(rollouts.answered) + 20
    running = [spawn(rollouts.run(router.url, each), name=f"rollout {each}") for each in range(6)]
    await until(lambda: len(rollouts.answered) >= enough or any(each.done() for each in running), "answers")
    router.process.kill()
    await asyncio.gather(*running)
    assert len(rollouts.answered) >= enough
