"""Tool agents against real SGLang: their samples are what went through the workers' proxies, at every position."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import together
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.agents import AGENTS, TURNS, Agents
from tests.support.recording_proxy import RecordingProxy, chats_of
from tests.support.running_router import RunningRouter, running_router
from tests.support.session_proof import check_sessions
from tests.support.tiers import size
from tests.support.tokenizers import tokenizer
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.sglang

SESSIONS = MiddlewareSpec("middleware_hub.openai_session_middleware.OpenAISessionMiddleware", {})
FIRST_VERSION = "default"  # of the real workers
NEW_VERSIONS = size(heavy=("1", "2"), otherwise=("1", "2", "3", "4", "5", "6"))
#: Few turns do not always have each of these.
SOME = size(heavy=1, otherwise=0)


@pytest.fixture
async def proxies(sglang_workers: list[RealWorker]) -> AsyncIterator[list[RecordingProxy]]:
    async with RecordingProxy(sglang_workers[0].url) as one, RecordingProxy(sglang_workers[1].url) as other:
        yield [one, other]


@pytest.fixture
async def router(proxies: list[RecordingProxy]) -> AsyncIterator[RunningRouter]:
    model = str(ensure().dense_model)
    async with running_router(
        *(proxy.url for proxy in proxies), middlewares=(SESSIONS,), hf_checkpoint=model
    ) as running:
        await running.probed()
        yield running
        async with aiohttp.ClientSession(running.url) as http:
            await new_weights(http, FIRST_VERSION)


async def new_weights(http: aiohttp.ClientSession, version: str) -> None:
    """A weight update as trainers do it: what runs is set back, and goes on under the new version."""
    orders: list[tuple[str, dict[str, Any]]] = [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weight_version", {"new_version": version, "abort_all_requests": False}),
        ("/continue_generation", {}),
    ]
    for path, order in orders:
        async with http.post(path, json=order) as reply:
            assert reply.status == 200, await reply.text()


async def update_weights(http: aiohttp.ClientSession, agents: Agents, proxies: list[RecordingProxy]) -> None:
    """Updates spread over the agents' turns, each in the middle of some stream."""
    for number, version in enumerate(NEW_VERSIONS, 1):
        least = agents.count * agents.turns * number // (len(NEW_VERSIONS) + 1)
        await until(
            partial(_streaming, agents, least, proxies), f"a stream behind {least} turns", deadline=10 * PATIENCE
        )
        await new_weights(http, version)


def _streaming(agents: Agents, least: int, proxies: list[RecordingProxy]) -> bool:
    return agents.log.turns >= least and any(proxy.in_a_stream() for proxy in proxies)


async def test_every_position_of_every_sample_is_what_the_engine_was_given_or_sampled(
    router: RunningRouter, proxies: list[RecordingProxy], capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    agents = Agents(router.url, AGENTS, TURNS)
    async with aiohttp.ClientSession(router.url) as http:
        await together([agents.run(), update_weights(http, agents, proxies)], name="agents and updates")
        ran = time.monotonic()
        went = chats_of(proxies, version=FIRST_VERSION)
        proved = await check_sessions(http, agents, went, tokenizer("qwen3"))
        assert not proved.given_back, "what was cut goes on"
    with capsys.disabled():
        print(f"\n{proved}\n{agents.log.turns} turns of agents, {len(agents.log.left)} broken off")
        print(f"{ran - begun:.1f} s of agents, {time.monotonic() - ran:.1f} s of comparison")
    assert (proved.sessions, agents.log.turns >= AGENTS * TURNS) == (AGENTS, True)
    assert 0 < went.broken_off <= len(agents.log.left)
    assert agents.log.repeated > 0
    assert 0.3 < proved.streamed / proved.turns < 0.7
    assert proved.stayed > proved.continued / 2
    assert proved.new_versions.total() > 0
    assert min(proved.new_versions[how] for how in ("streamed", "whole")) >= SOME
    assert min(proved.finishes[finish] for finish in ("stop", "length", "tool_calls")) > 0
    assert proved.dropped >= SOME
