"""Agents that speak chat, Messages and Responses side by side, on several workers, while weights are updated in the
middle of turns: their samples are what went through the workers' proxies, at every position."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

import aiohttp
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import together
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.generation import Generation
from tests.support.agent_apis import APIS
from tests.support.agents import Agents, Improvised, improvised_for
from tests.support.brake import Brake
from tests.support.recording_proxy import RecordingProxy, chats_of
from tests.support.session_proof import check_sessions
from tests.support.session_trial import SESSIONS, qwen3
from tests.support.stage import Stage
from tests.support.tiers import nightly
from tests.support.tokenizers import tokenizer, tokenizer_directory
from tests.support.waiting import PATIENCE, until

AGENTS, TURNS, EVENTS_AT, ROUNDS = (32, 20, (5, 10, 15), 4) if nightly() else (8, 6, (2, 3, 5), 1)
#: How fleets are paused for new weights. There are more turns than pauses, so that each comes in the middle of one.
MODES = ("abort", "retract", "abort", "in_place") * ROUNDS
WORKERS = 3


async def order(http: aiohttp.ClientSession, path: str, **body: object) -> None:
    async with http.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()


async def update_weights(http: aiohttp.ClientSession, agents: Agents, brakes: list[Brake]) -> None:
    """Updates spread over the agents' turns, each while one is being sampled."""
    for number, mode in enumerate(MODES, 1):
        least = agents.count * agents.turns * number // (len(MODES) + 1)
        await until(partial(_turns, agents, least), f"{least} turns", deadline=10 * PATIENCE)
        for brake in brakes:
            brake.when = _will_be_recorded
        await until(lambda: any(brake.on for brake in brakes), "a worker is stopped within an answer")
        await order(http, "/pause_generation", mode=mode)
        for brake in brakes:
            brake.on, brake.when = False, None
        await order(http, "/update_weight_version", new_version=str(number), abort_all_requests=False)
        await order(http, "/continue_generation")


def _turns(agents: Agents, least: int) -> bool:
    return agents.log.turns >= least


def _will_be_recorded(generation: Generation) -> bool:
    """Whether it is none that its agent leaves, and has begun."""
    return not generation.request.sampling.ignore_eos and len(generation.output_ids) > 0


async def test_every_position_of_every_sample_is_what_a_worker_was_given_or_sampled(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                SimulatedWorker(
                    tokenizer=qwen3(),
                    script=Improvised(),
                    reasoning_parser="qwen3",
                    weight_version="0",
                    token_latency_s=0.0002,
                    incremental_streaming_output=number % 2 == 0,
                    replica=number,
                )
            )
            for number in range(WORKERS)
        ]
        proxies = [await stack.enter_async_context(RecordingProxy(worker.url)) for worker in workers]
        router = await stage.router(
            *(proxy.url for proxy in proxies),
            middlewares=(MiddlewareSpec(SESSIONS, {}),),
            hf_checkpoint=tokenizer_directory("qwen3"),
            partial_rollout="resume",
        )
        await router.probed()
        agents = Agents(
            router.url,
            AGENTS,
            TURNS,
            events_at=EVENTS_AT,
            # One that is cut before it shows anything is shown at its end alone: then its agent has not left it.
            without=frozenset({"broken off"}),
            apis=tuple(APIS),
            arguments=improvised_for,
        )
        http = await stack.enter_async_context(aiohttp.ClientSession(router.url))
        brakes = [Brake(worker.engine) for worker in workers]
        await together([agents.run(), update_weights(http, agents, brakes)], name="agents and updates")
        went = chats_of(proxies, version="0")
        proved = await check_sessions(http, agents, went, tokenizer("qwen3"))
        # A cut may fall where no exact continuation is certain: that is said, and counted.
        assert proved.given_back == router.app.router.statistics["partial_rollouts"]()["returned"]
        assert proved.given_back < proved.carried_on
    with capsys.disabled():
        print(f"\n{proved}")
    assert {each.proxy for each in went.generations} == set(range(WORKERS))
    assert agents.log.left
    assert agents.log.repeated > 0
    assert proved.carried_on > 0
    assert proved.new_versions.total() > 0
    assert min(proved.finishes[finish] for finish in ("stop", "length", "tool_calls")) > 0
    assert {"retry", "edited_history", "compaction", "sub_agent", "changed_tools"} < set(proved.reasons)
