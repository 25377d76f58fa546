"""Text rollouts of processes that die: with a store they go on with the tokens that were held, wherever they land."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.http import RawReply
from tests.support.layers import layered, ports, post, process_at, written
from tests.support.processes import Processes, is_alive
from tests.support.session_trial import SESSIONS
from tests.support.waiting import until

ROLLOUTS = 6


def configured(directory: Path) -> Path:
    layers: tuple[tuple[str, dict[str, Any]], ...] = ((SESSIONS, {}), (CACHE, {}))
    return written(directory, layers, hf_checkpoint=checkpoint(), state_dir=str(directory / "state"))


def simulated() -> SimulatedWorker:
    return SimulatedWorker(tokenizer=checkpoint(), weight_version="1")


async def _killed(router: Processes) -> None:
    children = router.children
    router.router.process.kill()
    await until(lambda: not any(map(is_alive, children.values())), "all have ended")


class Rollout:
    """One text, and the tokens that it was given and answered so far."""

    def __init__(self, number: int, worker: SimulatedWorker) -> None:
        self.text = f"Question {number}: how many?"
        self.tokens: list[int] = []
        self.rid = ""
        self._worker = worker

    async def turn(self, url: str) -> None:
        """The next turn, which goes on from all tokens before it."""
        reply = await post(url, "/generate", {"text": self.text, "sampling_params": {"max_new_tokens": 8}})
        assert reply.status == 200, reply.body
        (generation,) = self._worker.log.at("/generate")[-1].generations
        assert generation.input_ids[: len(self.tokens)] == self.tokens, "the ids before, sampled ones included"
        self.tokens = [*generation.input_ids, *generation.output_ids]
        self.rid = generation.rid
        self.text += reply.json()["text"]
        assert await self.held(url) == self.tokens
        self.text += " And then?"

    async def held(self, url: str) -> list[int]:
        """What is retrieved of it, by its newest generation."""
        reply = await post(url, "/retrieve_from_text", {"rid": self.rid})
        assert reply.status == 200, reply.body
        found: list[int] = reply.json()["tokens"]
        return found


async def test_texts_of_a_killed_process_go_on_with_the_tokens_that_were_held(tmp_path: Path) -> None:
    async with simulated() as worker, layered(configured(tmp_path), worker) as router:
        own = await ports(router)
        rollouts = [Rollout(number, worker) for number in range(ROLLOUTS)]
        for number, each in enumerate(rollouts):
            await each.turn(own[number % 2].url)
        for victim in own:
            await router.kill(await process_at(router, victim))
            other = next(each for each in own if each is not victim)
            for each in rollouts:  # the first of them while it is being started again
                await each.turn(other.url)
            await router.whole()
        for each in rollouts:
            assert await each.held(own[0].url) == await each.held(own[1].url) == each.tokens


async def test_texts_come_back_in_a_router_of_another_number_of_processes(tmp_path: Path) -> None:
    async with simulated() as worker:
        rollouts = [Rollout(number, worker) for number in range(ROLLOUTS)]
        for count in (2, 3, 2):
            async with layered(configured(tmp_path), worker, count=count, expect_status=-signal.SIGKILL) as router:
                for each in rollouts:
                    await each.turn(router.url)
                await _killed(router)


async def test_new_texts_of_all_processes_wait_for_one_that_may_have_them(tmp_path: Path) -> None:
    async with simulated() as worker, layered(configured(tmp_path), worker) as router:
        own = await ports(router)
        each = Rollout(0, worker)
        await each.turn(own[0].url)
        for victim in [await process_at(router, place) for place in own]:
            await router.kill(victim)
        turns = [post(place.url, "/retrieve_from_text", {"text": each.text, "strict": False}) for place in own]
        replies: list[RawReply] = await asyncio.gather(*turns)
        assert [reply.json()["matched_tokens"] for reply in replies] == [len(each.tokens)] * 2
