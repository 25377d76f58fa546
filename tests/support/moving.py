"""Generations that run long enough to move: an engine that holds them until it is told to abort them, and an idle one
beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from miles_router.tasks import spawn
from miles_router.testing import MoeShape, SimulatedWorker
from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.generation import Generation
from tests.support.fleet import post
from tests.support.http import RawReply, ask
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.waiting import soon, until

JSON = [("Content-Type", "application/json")]
MOE = MoeShape(2, 8, 2)
#: Seconds: as soon as can be.
SOON = 0.02
#: Tokens of each generation when an engine holds it, and of the whole.
HELD, BUDGET = 7, 24
ABORT = "/abort_request"
#: Of an answer, what does not depend on where it was sampled.
OF_META = (
    *("finish_reason", "completion_tokens", "prompt_tokens", "weight_versions", "routed_experts", "id"),
    *("output_token_logprobs", "input_token_logprobs", "output_top_logprobs"),
)


class Hold:
    """Holds each generation of an engine behind its first tokens, until it is told to abort it, or off."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.on = True
        self.tokens = tokens
        self._engine = engine
        self.thaw = engine.thaw
        engine.thaw = self._held  # type: ignore[method-assign]

    async def _held(self, generation: Generation) -> None:
        await self.thaw(generation)
        while self.on and len(generation.output_ids) >= self.tokens and not self._may_end(generation):  # noqa: ASYNC110
            await asyncio.sleep(0.0005)

    def _may_end(self, generation: Generation) -> bool:
        question = generation.max_new_tokens <= 1
        return question or generation.aborted or generation.finish_reason is not None

    def holds(self, count: int) -> bool:
        """Whether it holds so many."""
        running = self._engine.running.values()
        return sum(len(each.output_ids) >= self.tokens for each in running) == count


@dataclass
class MovingScene:
    """One worker with generations that it holds, one that may take them over, and a third that nobody disturbs.

    Attributes:
        asked: the requests under way, by their `rid`.
    """

    source: SimulatedWorker
    target: SimulatedWorker
    reference: SimulatedWorker
    router: RunningRouter
    holds: Hold
    held_there: Hold
    asked: dict[str, asyncio.Task[RawReply]] = field(default_factory=dict)

    def ask(self, rid: str, *headers: tuple[str, str], **fields: Any) -> None:
        body = request(rid, **fields)
        self.asked[rid] = spawn(
            self.router.ask("POST", "/generate", [*JSON, *headers], orjson.dumps(body)), name=f"a client's {rid}"
        )

    async def run(self, count: int, *headers: tuple[str, str], **fields: Any) -> None:
        """So many generations, one after the other, all of which the source holds."""
        for number in range(count):
            self.ask(f"rollout-number-{number}", *headers, **fields)
            await self.held(number + 1)

    async def held(self, count: int) -> None:
        """Until the source holds so many."""
        await until(lambda: self.holds.holds(count), f"{count} are held")

    async def open(self) -> None:
        assert (await post(self.router, f"/add_worker?url={self.target.url}")).status == 200

    async def moved(self, count: int) -> None:
        """Until so many were sent to the target."""
        await until(lambda: self.numbers["moved_generations"] >= count, f"{count} have moved")
        assert self.numbers["moved_generations"] == count

    async def end(self) -> dict[str, dict[str, Any]]:
        self.holds.on = self.held_there.on = False
        return {rid: (await soon(asking)).json() for rid, asking in self.asked.items()}

    @property
    def numbers(self) -> dict[str, Any]:
        found = self.router.app.router.metrics.numbers()
        return {name: found[name] for name in ("moved_generations", "unmoved_generations")}

    @property
    def ended(self) -> int:
        return sum(each.done() for each in self.asked.values())

    def unmoved(self, reason: str) -> int:
        return self.router.app.router.metrics.unmoved_generations[reason]

    def aborts(self) -> list[str]:
        return [orjson.loads(each.body)["rid"] for each in self.source.log if each.path == ABORT]

    async def uncut(self, rid: str, **fields: Any) -> dict[str, Any]:
        reply = await ask(self.reference.url, "POST", "/generate", JSON, orjson.dumps(request(rid, **fields)))
        found: dict[str, Any] = reply.json()
        return found


def request(rid: str, **fields: Any) -> dict[str, Any]:
    """A generation that moves, unless fields say otherwise; those that are None are left out."""
    body: dict[str, Any] = {"input_ids": [5, 300, 229], "rid": rid, **fields}
    params = {"max_new_tokens": BUDGET, "temperature": 0, "ignore_eos": True, **body.pop("params", {})}
    if "text" in body:
        del body["input_ids"]
    body["sampling_params"] = params
    return {name: value for name, value in body.items() if value is not None}


def of_one_go(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on where it was sampled."""
    meta = answer["meta_info"]
    return {"text": answer["text"], "ids": answer["output_ids"], **{name: meta.get(name) for name in OF_META}}


@asynccontextmanager
async def moving(
    stage: Stage,
    *,
    held_there: int = 1,
    kind: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[MovingScene]:
    """A scene. The target, once it has joined, holds what it has behind `held_there` tokens of its own."""
    of_all = {"moe": MOE, "weight_version": "1", "stop_probability": 0.0, **(kind or {})}
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(SimulatedWorker(**of_all, token_latency_s=0.0005))
        other = await stack.enter_async_context(SimulatedWorker(**{**of_all, **(target or {})}, token_latency_s=0.0005))
        reference = await stack.enter_async_context(SimulatedWorker(**of_all))
        router = await stage.router(source.url, **{"move_after": SOON, **settings})
        await router.probed()
        holds, there = Hold(source.engine, HELD), Hold(other.engine, held_there)
        scene = MovingScene(source, other, reference, router, holds, there)
        yield scene
        holds.on = there.on = False
        await stage.nothing_under_way()
