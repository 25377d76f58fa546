"""Every test of this folder runs against `SimulatedWorker`, against one that takes the time and memory of a GPU and
writes spaces between its JSON's parts, and against a real SGLang worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from miles_router.testing import MoeShape, SimulatedWorker
from miles_router.testing.worker.costs.gpu import QWEN3_8B_H100
from tests.contract.client import WorkerClient
from tests.sglang_worker import RealWorker
from tests.support.waiting import PATIENCE

KINDS = ["simulated", "paced", pytest.param("sglang", marks=pytest.mark.sglang)]
MOE = MoeShape(layers=4, experts=8, top_k=2)
TOKEN_LATENCY = 0.004  # seconds; a simulated request in flight must last longer than the test needs it
OPTIONS: dict[str, dict[str, Any]] = {
    "simulated": {},
    "paced": {"gpu": QWEN3_8B_H100, "time_scale": 2.0, "spaced_json": True},
}


@contextlib.asynccontextmanager
async def simulated(**options: Any) -> AsyncIterator[str]:
    """The URL of a `SimulatedWorker`."""
    async with SimulatedWorker(token_latency_s=TOKEN_LATENCY, **options) as worker:
        yield worker.url


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[WorkerClient]:
    timeout = aiohttp.ClientTimeout(total=2 * PATIENCE)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = WorkerClient(url, session)
        yield client
        await client.settle()


@pytest.fixture(params=KINDS)
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[WorkerClient]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "sglang":
            workers: list[RealWorker] = request.getfixturevalue("sglang_workers")
            url = workers[0].url
        else:
            url = await stack.enter_async_context(simulated(**OPTIONS[request.param]))
        yield await stack.enter_async_context(client_of(url))


@pytest.fixture(params=KINDS)
async def moe_worker(request: pytest.FixtureRequest) -> AsyncIterator[WorkerClient]:
    """A worker of a model with 4 layers, 8 experts and 2 of them a token."""
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "sglang":
            workers: list[RealWorker] = request.getfixturevalue("sglang_moe_workers")
            url = workers[0].url
        else:
            url = await stack.enter_async_context(simulated(moe=MOE, **OPTIONS[request.param]))
        yield await stack.enter_async_context(client_of(url))
