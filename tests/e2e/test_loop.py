"""The event loop stays free: nobody waits for another's long text, large reply or many samples.

Who else asks is played by a process of its own (`tests/support/pulse.py`); the router is the real command.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from miles_router.testing.worker.model.moe import encode_routes
from tests.support.cache_trial import CACHE
from tests.support.experts_trial import EXPERTS, compact, generated
from tests.support.http import ask
from tests.support.pulse import Pulse, pulse
from tests.support.running_router import RouterProcess, router_process
from tests.support.scripted_chat import JSON, PROMPT, chat_reply
from tests.support.scripted_worker import ScriptedWorker, Visit, reply
from tests.support.session_trial import SESSIONS
from tests.support.tiers import size
from tests.support.tokenizers import tokenizer_directory

pytestmark = pytest.mark.storm

LAYERS, NUMBER, TOP_K = 48, 128, 8
ROWS = 29_300  # 60 MB on the wire
TEXT_BYTES = size(heavy=3_000_000, otherwise=600_000)
SESSIONS_COLLECTED, SESSION_TOKENS = size(heavy=(100, 32_000), otherwise=(60, 8_000))
#: Seconds that a request may wait for others at most; or so many times what one waits on this machine where nothing is
#: going on.
BOUND, TIMES_IDLE = 0.15, 5
#: What a busy machine does comes and goes. What the router does comes each time, so that one good round is a proof; at
#: full length, a third of the rounds have to be good.
ROUNDS, GOOD = size(heavy=(15, 5), otherwise=(4, 1))
Load = Callable[[RouterProcess], Awaitable[None]]


@functools.cache
def large_answer() -> bytes:
    """What a worker answers that tells routed experts."""
    ids = [7] * (ROWS + 1 - len(PROMPT))
    rows = np.random.default_rng(3).integers(0, NUMBER, (ROWS, LAYERS, TOP_K), dtype=np.int32)
    return compact({**generated(ids, encode_routes(rows)), "text": "(" * len(ids)})


async def behave(visit: Visit) -> None:
    """A worker with a small answer for a long text, and large ones for others."""
    body = await visit.read_body()
    if visit.request.path == "/v1/chat/completions":
        await visit.run([chat_reply(range(1000, 1000 + SESSION_TOKENS))])
    elif len(body) > 1000:
        answer = generated([7], None)
        answer["meta_info"]["prompt_tokens"] = len(json.loads(body)["input_ids"])
        await visit.run([reply(compact(answer), headers=JSON)])
    else:
        data = large_answer()
        whole = reply(data, headers=JSON)
        await visit.run([whole[at : at + (1 << 18)] for at in range(0, len(whole), 1 << 18)])


@functools.cache
def words() -> list[str]:
    dice = random.Random(1)
    return ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(5000)]


def new_text() -> str:
    """One that no cache has seen."""
    text, dice = "", random.Random()
    while len(text) < TEXT_BYTES:
        text += " ".join(dice.choices(words(), k=10_000))
    return text[:TEXT_BYTES]


async def post(router: RouterProcess, path: str, content: Any, headers: Any = ()) -> bytes:
    got = await ask(router.url, "POST", path, [*JSON, *headers], json.dumps(content).encode())
    assert got.status == 200, got.body[:1000]
    return got.body


async def a_long_text(router: RouterProcess) -> None:
    await post(router, "/generate", {"text": new_text(), "sampling_params": {"max_new_tokens": 1}})


async def a_large_reply(router: RouterProcess) -> None:
    await post(router, "/generate", {"input_ids": PROMPT})


async def many_sessions(router: RouterProcess) -> None:
    for path, name in (("/sessions/{}/samples", "json"), ("/sessions/{}/samples", "safetensors")):
        asked = [post(router, path.format(f"s{each}"), {"format": name}) for each in range(SESSIONS_COLLECTED)]
        await asyncio.gather(*asked)


async def a_batch_of_sessions(router: RouterProcess) -> None:
    found = json.loads(await post(router, "/trajectory/read", {}))
    assert len(found["data"]) == SESSIONS_COLLECTED


async def finished_session(router: RouterProcess, session: str) -> None:
    asked = {"messages": [{"role": "user", "content": f"Hi {session}"}]}
    await post(router, "/v1/chat/completions", asked, [("X-Session-Id", session)])
    await post(router, "/session/finalize", {"session_id": session, "reward": 1.0})


@pytest.fixture(scope="module")
async def router() -> AsyncIterator[RouterProcess]:
    """A router with all layers, that holds sessions."""
    layers = [SESSIONS, CACHE, EXPERTS]
    options = [
        f"routed_experts_middleware.moe_shape={LAYERS}x{NUMBER}x{TOP_K}",
        "routed_experts_middleware.required=no",
    ]
    async with ScriptedWorker() as worker:
        worker.always(behave)
        arguments = ["--worker-urls", worker.url, "--hf-checkpoint", tokenizer_directory("qwen3")]
        arguments += ["--middleware-paths", *layers, *(part for each in options for part in ("--set", each))]
        async with router_process(*arguments) as running:
            await asyncio.gather(*(finished_session(running, f"s{each}") for each in range(SESSIONS_COLLECTED)))
            yield running
    large_answer.cache_clear()


async def waited(beat: Pulse, work: Awaitable[object]) -> float:
    """Seconds that others waited at most while something was done."""
    await beat.worst()
    await work
    return await beat.worst()


@pytest.mark.parametrize("load", [a_long_text, a_large_reply, many_sessions, a_batch_of_sessions])
async def test_nobody_waits_for_the_long_work_of_others(
    router: RouterProcess, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    large_answer()
    async with pulse(router.url, router.process.pid) as beat:
        idle = await waited(beat, asyncio.sleep(0.5))
        bound, rounds = max(BOUND, TIMES_IDLE * idle), list[float]()
        while len(rounds) < ROUNDS and sum(each <= bound for each in rounds) < GOOD:
            rounds.append(await waited(beat, load(router)))
    with capsys.disabled():
        figures = ", ".join(f"{each * 1e3:.1f}" for each in rounds)
        print(f"\n{load.__name__}: others waited {figures} ms, {idle * 1e3:.1f} ms where nothing was done")
    assert sum(each <= bound for each in rounds) >= GOOD
