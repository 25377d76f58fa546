"""Every test of this folder runs against `SimulatedWorker`, against one that takes the time and memory of a GPU and
writes spaces between its JSON's parts, and against a real SGLang worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from miles_router.testing import MoeShape, SimulatedWorker
from tests.contract.client import WorkerClient
from tests.sglang_worker import RealWorker, real_pair
from tests.support import tiers
from tests.support.simulated.costs.gpu import QWEN3_8B_H100
from tests.support.simulated.costs.paced_worker import PacedWorker
from tests.support.simulated.half_worker import HalfWorker
from tests.support.simulated.odd_workers import SpacedWorker
from tests.support.simulated.pairing import Pairing
from tests.support.waiting import PATIENCE

KINDS = ["simulated", "paced", pytest.param("sglang", marks=pytest.mark.sglang)]
KINDS_OF_PAIRS = ["simulated", "spaced", pytest.param("sglang", marks=pytest.mark.sglang)]
MOE = MoeShape(layers=4, experts=8, top_k=2)
TOKEN_LATENCY = 0.004  # seconds; a simulated request in flight must last longer than the test needs it


class SpacedPacedWorker(SpacedWorker, PacedWorker):
    """A worker that takes the time of a GPU and writes spaces between its JSON's parts."""


class SpacedHalfWorker(SpacedWorker, HalfWorker):
    """A half of a pair that writes spaces between its JSON's parts."""


@contextlib.asynccontextmanager
async def simulated(kind: str, **options: Any) -> AsyncIterator[str]:
    """The URL of a simulated worker."""
    given = {"token_latency_s": TOKEN_LATENCY, **options}
    paced = kind == "paced"
    async with SpacedPacedWorker(QWEN3_8B_H100, time_scale=2.0, **given) if paced else SimulatedWorker(**given) as made:
        yield made.url


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[WorkerClient]:
    timeout = aiohttp.ClientTimeout(total=2 * PATIENCE)
    # An engine ends a connection that was idle for 5 s, maybe just as it is used again: none is.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
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
            url = await stack.enter_async_context(simulated(request.param))
        yield await stack.enter_async_context(client_of(url))


@pytest.fixture(params=KINDS)
async def moe_worker(request: pytest.FixtureRequest) -> AsyncIterator[WorkerClient]:
    """A worker of a model with 4 layers, 8 experts and 2 of them a token."""
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "sglang":
            workers: list[RealWorker] = request.getfixturevalue("sglang_moe_workers")
            url = workers[0].url
        else:
            url = await stack.enter_async_context(simulated(request.param, moe=MOE))
        yield await stack.enter_async_context(client_of(url))


@dataclass(frozen=True)
class ClientsOfAPair:
    """The halves of a pair, and where they meet."""

    prefill: WorkerClient
    decode: WorkerClient
    port: int


@pytest.fixture(scope="session")
def real_halves() -> Iterator[tuple[str, str, int]]:
    """A real pair with a mixture-of-experts model: the URLs of both halves, and the port at which they meet."""
    if not tiers.heavy():
        pytest.skip("two engines of their own")
    with real_pair("--enable-return-routed-experts", moe=True) as halves:
        yield halves.prefills[0].url, halves.decodes[0].url, halves.ports[0]


@pytest.fixture(params=KINDS_OF_PAIRS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[ClientsOfAPair]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "sglang":
            prefill, decode, port = request.getfixturevalue("real_halves")
        else:
            half = SpacedHalfWorker if request.param == "spaced" else HalfWorker
            options: dict[str, Any] = {"moe": MOE, "token_latency_s": TOKEN_LATENCY}
            first = await stack.enter_async_context(half(Pairing("prefill", patience_s=0.1), **options))
            second = await stack.enter_async_context(half(Pairing("decode", patience_s=0.1), **options))
            prefill, decode, port = first.url, second.url, first.pairing.port
        own, other = [await stack.enter_async_context(client_of(url)) for url in (prefill, decode)]
        yield ClientsOfAPair(own, other, port)
