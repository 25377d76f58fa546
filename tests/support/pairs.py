"""Prefill/decode pairs of simulated workers, a router that knows them, and what tests ask of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from miles_router.tasks import spawn
from miles_router.testing import MoeShape
from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.brake import Brake
from tests.support.events import events_of
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter
from tests.support.simulated.half_worker import HalfWorker
from tests.support.simulated.pairing import Pairing
from tests.support.stage import Stage
from tests.support.waiting import until

JSON = [("Content-Type", "application/json")]
MOE = MoeShape(3, 40, 2)
#: Workers that tell their experts.
TELLING = {"moe": MOE}
SHORT = {"max_new_tokens": 6, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]


@dataclass
class Halves:
    """The halves, and the router before them."""

    router: RunningRouter
    prefills: Sequence[HalfWorker]
    decodes: Sequence[HalfWorker]

    def __post_init__(self) -> None:
        self.brakes = {worker: Brake(worker.engine) for worker in self.workers}

    @property
    def prefill(self) -> HalfWorker:
        return self.prefills[0]

    @property
    def decode(self) -> HalfWorker:
        return self.decodes[0]

    @property
    def workers(self) -> list[HalfWorker]:
        return [*self.prefills, *self.decodes]

    async def post(self, path: str, **body: Any) -> RawReply:
        return await self.router.ask("POST", path, JSON, orjson.dumps(body))

    async def generate(self, **body: Any) -> RawReply:
        return await self.post("/generate", **{"input_ids": PROMPT, "sampling_params": SHORT, **body})

    async def answer(self, **body: Any) -> Any:
        """One good answer, or the last event of a good stream."""
        reply = await self.generate(**body)
        assert reply.status == 200, reply.body
        return events_of(reply.body)[-1] if body.get("stream") else reply.json()

    def generating(self, **body: Any) -> asyncio.Task[RawReply]:
        return spawn(self.generate(**body), name="a client")

    def asked(self, worker: HalfWorker, path: str = "/generate") -> list[Any]:
        return [exchange.json() for exchange in worker.log.at(path)]

    def truth(self, at: int = 0) -> GenerationRecord:
        return self.decodes[at].log.generations[-1]

    async def prefilling(self, count: int = 1) -> None:
        """Wait until prefill halves have so many generations, and decode halves wait for them."""
        await until(lambda: self._running(self.prefills) == count == self._running(self.decodes), "both halves wait")

    async def decoding(self) -> None:
        """Wait until a generation has a token, and its prompt is no prefill half's any more."""

        def far() -> bool:
            running = [each for worker in self.decodes for each in worker.engine.running.values()]
            return any(each.output_ids for each in running) and not self._running(self.prefills)

        await until(far, "a token")

    async def free(self) -> None:
        """Wait until no engine works on anything, and every lease is back."""
        await until(lambda: not self._running(self.workers), "the engines are free")
        await until(lambda: not self.router.pool.in_flight, "every lease is back")

    def hold(self, workers: Sequence[HalfWorker]) -> None:
        """Let none of these sample until it is paused, or `release` is called."""
        for worker in workers:
            self.brakes[worker].on = True

    def release(self) -> None:
        for brake in self.brakes.values():
            brake.on = False

    def _running(self, workers: Sequence[HalfWorker]) -> int:
        return sum(worker.running for worker in workers)


@asynccontextmanager
async def halves(
    stage: Stage,
    prefills: int = 1,
    decodes: int = 1,
    *,
    router: RunningRouter | None = None,
    worker: Mapping[str, Any] | None = None,
    attributes: Mapping[str, str] | None = None,
    masks: bool = False,
    **settings: Any,
) -> AsyncIterator[Halves]:
    """So many of each with these options, registered as frameworks do it, with these attributes besides. `masks`: they
    tell sampling masks."""
    async with AsyncExitStack() as stack:

        async def started(pairing: Pairing) -> HalfWorker:
            own = HalfWorker(pairing, **{"stop_probability": 0.0, **(worker or {})})
            return await stack.enter_async_context(own)

        made = Halves(
            router or await stage.router(**settings),
            [await started(Pairing("prefill", masks=masks)) for _ in range(prefills)],
            [await started(Pairing("decode", masks=masks)) for _ in range(decodes)],
        )
        for half in made.workers:
            await register(made.router, half, **(attributes or {}))
        await until(lambda: not made.router.leftovers(), "the first probes are over")
        yield made


async def register(router: RunningRouter, worker: HalfWorker, **attributes: str) -> RawReply:
    said = "&".join(f"{name}={value}" for name, value in {**worker.registration, **attributes}.items())
    reply = await router.ask("POST", f"/add_worker?{said}")
    assert reply.status == 200, reply.body
    return reply
