"""Weight updates of a fleet of two real SGLang workers with generations in flight: nothing is lost, nothing made up.

What each client got is held against what went through the doors of the workers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from miles_router.workers import Transition
from tests.sglang_worker import RealWorker
from tests.support.chains import chain, check, spread
from tests.support.door import Door, Generation
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

GENERATIONS, TOKENS = 64, 200
SAMPLING = {"temperature": 1, "max_new_tokens": TOKENS, "ignore_eos": True}


@dataclass
class Rollout:
    """One generation as its client sees it."""

    number: int
    body: dict[str, Any]
    status: int = 0
    raw: bytes = b""

    @property
    def request_id(self) -> str:
        return f"rollout-{self.number}"

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def events(self) -> list[Any]:
        """Of a stream, which must be whole."""
        *events, done = [event for event in self.raw.split(b"\n\n") if event]
        assert done == b"data: [DONE]"
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def answer(self) -> Any:
        """The whole answer; a stream is checked on the way."""
        assert self.status == 200, self.raw
        if not self.stream:
            return json.loads(self.raw)
        events = self.events()
        for before, after in pairwise(events):
            count = len(before["output_ids"])
            assert after["output_ids"][:count] == before["output_ids"], "a stream never takes back an id"
            assert after["text"].startswith(before["text"]), "or a text"
            assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])
        assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]
        return events[-1]


@dataclass
class Fleet:
    """A router, the doors of its two workers, and what became of the workers' states."""

    router: RunningRouter
    doors: list[Door]
    http: aiohttp.ClientSession
    transitions: list[Transition] = field(default_factory=list)

    async def control(self, path: str, **body: Any) -> Any:
        async with self.http.post(path, json=body) as reply:
            assert reply.status == 200, (path, await reply.text())
            return await reply.text()

    async def run(self, rollout: Rollout) -> Rollout:
        headers = {"X-Request-Id": rollout.request_id}
        async with self.http.post("/generate", json=rollout.body, headers=headers) as reply:
            rollout.status = reply.status
            rollout.raw = await reply.read()
        return rollout

    def goes(self) -> list[Generation]:
        return [go for door in self.doors for go in door.begun]

    def streamed(self) -> int:
        """Tokens of streams that went through the doors by now."""
        return sum(len(go.sampled) for go in self.goes() if go.body.get("stream"))

    def aborted(self) -> int:
        return sum((go.finish or {}).get("type") == "abort" for go in self.goes())

    def states(self) -> set[str]:
        """Every state that any worker has been in since the start."""
        return {str(each.after and each.after.value) for each in self.transitions}

    async def update(self, mode: str, version: str) -> None:
        """What a trainer does between two steps."""
        await self.control("/pause_generation", mode=mode)
        await self.control("/update_weight_version", new_version=version, abort_all_requests=False)
        if mode != "in_place":  # what it holds in place keeps its memory
            await self.control("/flush_cache")
        info = json.loads(await (await self.http.get("/router/info")).read())
        assert info["gate"]["mode"] == mode
        assert info["weight_version"] == version
        await self.control("/continue_generation")


@asynccontextmanager
async def fleet(workers: list[RealWorker], **settings: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(Door(worker.url)) for worker in workers]
        settings = {"health_check_interval": 0.2, "health_check_timeout": 2.0, **settings}
        router = await stack.enter_async_context(running_router(*(door.url for door in doors), **settings))
        timeout = aiohttp.ClientTimeout(total=200)
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(router.url, timeout=timeout, connector=connector))
        made = Fleet(router, doors, http)
        router.pool.listeners.append(made.transitions.append)
        await until(lambda: all(w.weight_version for w in router.pool), "probes have passed", deadline=20)
        try:
            yield made
            await until(lambda: router.pool.in_flight == 0, "every lease is given back")
        finally:
            await made.control("/continue_generation")
            await made.control("/update_weight_version", new_version="default", abort_all_requests=True)


def rollouts() -> list[Rollout]:
    """Half of them streams; of either half, some with texts and some with ids."""
    made = []
    for number in range(GENERATIONS):
        prompt: dict[str, Any] = {"text": f"Rollout {number} tells:"}
        if number % 4 < 2:
            prompt = {"input_ids": [1000 + number, *range(100, 100 + number % 7)]}
        body = {**prompt, "sampling_params": SAMPLING, "return_logprob": True, "stream": number % 2 == 0}
        made.append(Rollout(number, body))
    return made


async def while_generating(fleet: Fleet, disturb: Callable[[int], Awaitable[None]], rounds: int) -> list[Rollout]:
    """All rollouts at once, disturbed when their streams have got to equal parts of their tokens."""
    await fleet.control("/update_weight_version", new_version="v0", abort_all_requests=False)
    tasks = [asyncio.ensure_future(fleet.run(rollout)) for rollout in rollouts()]
    try:
        for number in range(1, rounds + 1):
            share = GENERATIONS // 2 * TOKENS * number // (rounds + 1)
            await _until_streamed(fleet, share)
            await disturb(number)
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _until_streamed(fleet: Fleet, tokens: int) -> None:
    await until(lambda: fleet.streamed() >= tokens, f"{tokens} tokens", deadline=100)


def verify(fleet: Fleet, done: list[Rollout]) -> Counter[str]:
    """Every answer is whole and is what was sampled. Counts what was compared."""
    counts: Counter[str] = Counter()
    for rollout in done:
        answer = rollout.answer()
        pieces = chain(fleet.doors, rollout.request_id, answer)
        counts["positions"] += check(answer, pieces, prompt=rollout.body.get("input_ids"))
        counts["goes"] += len(pieces)
        meta = answer["meta_info"]
        assert len(answer["output_ids"]) == TOKENS
        assert meta["finish_reason"] == {"type": "length", "length": TOKENS}
        assert len(spread(meta["weight_versions"])) == TOKENS
        assert meta["output_token_logprobs_length"] == TOKENS
        counts["resumed"] += meta.get("resumed", 0)
        counts["mixed"] += len(meta["weight_versions"]) > 1
    return counts


@pytest.mark.parametrize("modes", [("abort",) * 3, ("retract", "in_place") * 3], ids=["abort", "retract, in_place"])
async def test_generations_outlive_updates(sglang_workers: list[RealWorker], modes: tuple[str, ...]) -> None:
    async with fleet(sglang_workers, partial_rollout="resume") as made:
        done = await while_generating(made, lambda n: made.update(modes[n - 1], f"v{n}"), len(modes))
        counts = verify(made, done)
        assert counts["resumed"] == made.aborted()
        assert bool(made.aborted()) is ("abort" in modes)
        assert counts["goes"] == GENERATIONS + made.aborted()
        assert counts["mixed"] >= GENERATIONS // 2
        assert made.states() <= {"ready"}
        print(modes, counts, made.aborted())


async def test_without_resume_aborts_come_as_the_engine_gave_them(sglang_workers: list[RealWorker]) -> None:
    async with fleet(sglang_workers) as made:
        done = await while_generating(made, lambda number: made.update("abort", f"v{number}"), 1)
        replies = {each.headers.get("X-Request-Id"): each for door in made.doors for each in door.exchanges}
        cut = 0
        for rollout in done:
            assert rollout.raw == replies[rollout.request_id].reply
            answer = rollout.answer()
            cut += answer["meta_info"]["finish_reason"]["type"] == "abort"
            check(answer, chain(made.doors, rollout.request_id, answer))
        assert cut == made.aborted() >= GENERATIONS // 2
        assert made.states() <= {"ready"}


async def test_generations_outlive_the_death_of_their_worker(sglang_workers: list[RealWorker]) -> None:
    """Streams are carried on from what came; requests without a byte of an answer begin anew."""
    victim = sglang_workers[0]

    async def disturb(number: int) -> None:
        if number == 2:
            victim.kill()
        else:
            await made.update("abort", f"v{number}")

    try:
        async with fleet(sglang_workers, partial_rollout="resume", resume_on_worker_loss=True) as made:
            done = await while_generating(made, disturb, 2)
            counts = verify(made, done)
            print(counts, made.aborted())
            assert made.states() <= {"quarantined"}
            lost = [go for go in made.doors[0].begun if go.finish is None]
            assert len(lost) > GENERATIONS // 4
            streams = sum(1 for go in lost if go.body.get("stream"))
            assert counts["resumed"] == made.aborted() + streams
    finally:
        await asyncio.to_thread(victim.restart)
