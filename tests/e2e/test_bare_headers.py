"""`X-Session-Id` alone: an agent's own name is affinity, and what such headers make is the first to be forgotten."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.support.session_apis import RESPONSES
from tests.support.session_trial import CHAT, SessionTrial, qwen3, session_trial, simulated_sessions, user
from tests.support.stage import Stage

NAMES = ("chan42/thread-7", "a b", "née", "x" * 129, "..", ".", "{uuid}", "1,2", "agent#3", '"quoted"')
SAID, SHORT = [user("Hi")], {"max_new_tokens": 4}
TWO: dict[str, Any] = {"options": {"max_sessions": 2}, "token_latency_s": 0.0}


@pytest.fixture
async def workers() -> AsyncIterator[list[SimulatedWorker]]:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1", token_latency_s=0.0) as one,
        SimulatedWorker(tokenizer=qwen3(), weight_version="1", token_latency_s=0.0) as other,
    ):
        yield [one, other]


async def ask(trial: SessionTrial, name: str, path: str = CHAT, *headers: tuple[str, str], **fields: Any) -> int:
    """One turn under a header; gives its status."""
    given, most = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    body = {"model": "m", given: SAID, most: 4, **fields}
    return (await trial.ask("POST", path, body, [("X-Session-Id", name), *headers])).status


async def held(trial: SessionTrial) -> set[str]:
    return {each["session_id"] for each in (await trial.ask("GET", "/sessions")).json()["sessions"]}


async def test_a_name_that_no_session_can_have_is_affinity(stage: Stage, workers: list[SimulatedWorker]) -> None:
    trial = await session_trial(stage, *workers)
    for name, (path, stream) in itertools.product(NAMES, ((CHAT, True), (CHAT, False), ("/generate", True))):
        homes = set()
        for _ in range(3):
            for worker in workers:
                worker.log.clear()
            body = {"model": "m", "messages": SAID, "max_tokens": 4, "text": "Hi", "sampling_params": SHORT}
            answer = await trial.ask("POST", path, {**body, "stream": stream}, [("X-Session-Id", name)])
            assert answer.status == 200, name
            homes.add(next(worker.url for worker in workers if worker.log.at(path)))
        assert len(homes) == 1, name
    assert await held(trial) == set()


async def test_beside_the_headers_of_a_trainer_such_a_name_is_refused(stage: Stage) -> None:
    async with simulated_sessions(stage, **TWO) as trial:
        for header in ("X-Turn-Id", "X-Instance-Id"):
            assert await ask(trial, "chan42/thread-7", CHAT, (header, "1")) == 400
        assert await held(trial) == set()


@pytest.mark.alone("what is in memory is bounded in each process")
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_bare_headers_never_block_a_session_that_is_made(
    stage: Stage, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with simulated_sessions(stage, **TWO) as trial:
        for name in ("old", "new"):
            assert await ask(trial, name, path) == 200
        assert await ask(trial, "old", path) == 200
        with caplog.at_level(logging.WARNING):
            await trial.create("mine")
        assert await held(trial) == {"old", "mine"}, "the least recently used one is forgotten"
        assert any(record.message == "header_session_evicted" for record in caplog.records)
        assert await ask(trial, "next", path) == 200
        await trial.create("too")
        assert await held(trial) == {"mine", "too"}
        assert trial.statistics()["evicted"] == 3
        assert (await trial.ask("POST", "/sessions")).status == 503, "what was made is never forgotten for another"
        assert await ask(trial, "late", path) == 503
        assert await held(trial) == {"mine", "too"}


@pytest.mark.alone("what is in memory is bounded in each process")
async def test_what_a_trainer_named_or_finalized_is_not_forgotten(stage: Stage) -> None:
    async with simulated_sessions(stage, **TWO) as trial:
        assert await ask(trial, "turn", CHAT, ("X-Turn-Id", "1")) == 200
        assert await ask(trial, "done") == 200
        assert (await trial.ask("POST", "/session/finalize", {"session_id": "done"})).status == 200
        assert (await trial.ask("POST", "/sessions")).status == 503
        assert await held(trial) == {"turn", "done"}
