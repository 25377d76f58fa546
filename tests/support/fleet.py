"""What tests ask of a router about its fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import orjson

from miles_router.control.requests import OwnRequests
from miles_router.fleet.gate import Gate
from miles_router.fleet.inflight import InFlight
from miles_router.fleet.workers import WorkerState
from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter, processes_used
from tests.support.scripted_worker import Behaviour, ScriptedWorker, Visit, reply, script
from tests.support.waiting import STEP, until

JSON = [("Content-Type", "application/json")]
#: Connections that reach each of two processes, as good as surely.
ROUNDS = 16
#: Probes that come often and give up soon.
PROBING: dict[str, Any] = {
    "health_check_interval": 0.02,
    "health_check_timeout": 0.1,
    "deep_health_check_interval": 0.0,
}


async def post(router: RunningRouter, path: str, **fields: Any) -> RawReply:
    return await router.ask("POST", path, JSON, orjson.dumps(fields))


def posting(router: RunningRouter, path: str = "/generate", **fields: Any) -> asyncio.Task[RawReply]:
    """The same beside the test; unless told otherwise a generation."""
    body = fields or {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}
    return spawn(post(router, path, **body), name=f"a client's {path}")


def gate(router: RunningRouter) -> Gate:
    return router.app.router.gate


def requests_of(router: RunningRouter) -> InFlight:
    found = router.app.router.control.requests
    assert isinstance(found, OwnRequests)
    return found.in_flight


async def held(router: RunningRouter, count: int) -> None:
    await until(lambda: gate(router).held == count, f"{count} wait at the gate, not {gate(router).held}")


async def until_health(router: RunningRouter, **counts: int) -> None:
    """Wait until `GET /health` has these counts: of several processes one is told a moment later what others have."""
    while not counts.items() <= (await router.ask("GET", "/health")).json().items():  # noqa: ASYNC110  # a request each
        await asyncio.sleep(STEP)


async def until_all_know(router: RunningRouter, in_flight: int) -> None:
    """Wait until each process knows that so many requests are in flight, and chooses by that: many connections in a row
    have told it, which the system deals to all of them."""
    for _ in range(ROUNDS if processes_used() > 1 else 1):
        await until_health(router, in_flight=in_flight)


async def info(router: RunningRouter) -> dict[str, Any]:
    found: dict[str, Any] = (await router.ask("GET", "/router/info")).json()
    return found


async def states(router: RunningRouter) -> dict[str, str]:
    return {worker["url"]: worker["state"] for worker in (await info(router))["workers"]}


async def shown(router: RunningRouter, worker: ScriptedWorker) -> tuple[str, str]:
    (found,) = [each for each in (await info(router))["workers"] if each["url"] == worker.url]
    return found["state"], found["reason"]


async def is_open(router: RunningRouter) -> bool:
    """Whether the gate shows no reason to be closed."""
    said = (await info(router))["gate"]
    since = (said["paused_since"], said["asleep_since"], said["workers_paused_since"])
    return (said["closed"], said["mode"], *since) == (False, None, None, None, None)


class HasUrl(Protocol):
    """A worker of any kind."""

    @property
    def url(self) -> str: ...


async def becomes(router: RunningRouter, worker: HasUrl, state: WorkerState) -> None:
    record = router.pool.get(worker.url)
    await until(lambda: record.state is state, f"{record!r} is {state.value}")


def by_path(**behaviours: Behaviour) -> Behaviour:
    """A worker that treats paths with these last segments in ways of their own."""

    async def behave(visit: Visit) -> None:
        await behaviours.get(visit.request.path.rpartition("/")[2], script(reply()))(visit)

    return behave


def asked(worker: ScriptedWorker) -> list[str]:
    """The paths of what a worker was asked, probes left out."""
    return [request.path for request in worker.requests]


@asynccontextmanager
async def simulated(**settings: Any) -> AsyncIterator[tuple[SimulatedWorker, SimulatedWorker]]:
    async with SimulatedWorker(**settings) as first, SimulatedWorker(**settings) as second:
        yield first, second
