"""A scheduler of a real SGLang that is stopped under load is found by the stall watch; one that is slow is not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import psutil
import pytest

from miles_router.fleet.workers import WorkerState
from tests.sglang_worker import RealWorker
from tests.support.fleet import JSON, posting
from tests.support.http import RawReply, ask
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

#: Seconds in which a worker that shares its cores with ten others takes a step.
STALL = 5.0
SCHEDULER = "sglang::scheduler"


@pytest.fixture
async def router(sglang_workers: list[RealWorker]) -> AsyncIterator[RunningRouter]:
    settings: dict[str, Any] = {"health_check_interval": 0.5, "health_check_timeout": 3.0, "stall_timeout": STALL}
    urls = [worker.url for worker in sglang_workers]
    async with running_router(*urls, resume_on_worker_loss=True, **settings) as running:
        await until(lambda: all(worker.facts for worker in running.pool), "all is known of the workers")
        yield running
        await until(lambda: running.pool.in_flight == 0, "every lease is given back")


@contextmanager
def stopped_scheduler(worker: RealWorker) -> Iterator[None]:
    """The worker's scheduler process stands still; its HTTP process does not."""
    assert worker.pid is not None
    family = psutil.Process(worker.pid).children(recursive=True)
    (scheduler,) = [process for process in family if process.cmdline()[0].startswith(SCHEDULER)]
    scheduler.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        scheduler.send_signal(signal.SIGCONT)


def generating(router: RunningRouter, tokens: int, **fields: Any) -> asyncio.Task[RawReply]:
    return posting(router, text="Once", sampling_params={"max_new_tokens": tokens, "ignore_eos": True}, **fields)


def tokens(answer: RawReply) -> int:
    """Of a whole answer, or of a stream that ended as it should."""
    if answer.body.endswith(b"data: [DONE]\n\n"):
        return len(orjson.loads(answer.body.split(b"\n\n")[-3].removeprefix(b"data: "))["output_ids"])
    return len(answer.json()["output_ids"])


def stalls(router: RunningRouter) -> int:
    return router.pool.stalls


async def test_a_stalled_scheduler_is_found_under_load_and_comes_back(
    router: RunningRouter, sglang_workers: list[RealWorker]
) -> None:
    victim = sglang_workers[0]
    records = [router.pool.get(worker.url) for worker in sglang_workers]
    answers = [generating(router, 120, stream=bool(number & 2)) for number in range(16)]
    await until(lambda: [record.in_flight for record in records] == [8, 8], "both are under load")
    await until(lambda: records[0].pulse.pieces > 8, "streams have begun")
    with stopped_scheduler(victim):
        await until(lambda: records[0].state is WorkerState.QUARANTINED, "it is found")
        assert records[0].reason == "stalled: its engine gave no sign of life for 5 s"
        assert [tokens(await each) for each in answers] == [120] * 16
        assert (stalls(router), records[1].state) == (1, WorkerState.READY)
        assert (await ask(victim.url, "GET", "/model_info")).status == 200, "which is why nobody else notices"
    await until(lambda: records[0].state is WorkerState.READY, "it is back")
    more = [generating(router, 4) for _ in range(4)]
    await until(lambda: records[0].in_flight, "it takes requests")
    assert [tokens(await each) for each in more] == [4] * 4
    assert stalls(router) == 1


async def test_an_engine_that_takes_long_for_each_step_is_not_stalled(
    router: RunningRouter, sglang_workers: list[RealWorker]
) -> None:
    """As with long prompts: a step takes half of the time after which an engine is given up, the answer far more."""
    for seconds in (STALL / 2, None):
        body = orjson.dumps({"forward_sleep_time": seconds})
        for worker in sglang_workers:
            assert (await ask(worker.url, "POST", "/slow_down", JSON, body)).status == 200
        if seconds:
            slow = [generating(router, 3) for _ in sglang_workers]
            assert [tokens(await each) for each in slow] == [3, 3]
    assert stalls(router) == 0
