"""`--policy`: by which one a router chooses, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
import pytest

from miles_router.fleet.placement.contract import PlacementRequest
from miles_router.fleet.workers import Unit
from tests.support.http import Pairs, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

pytestmark = pytest.mark.alone("counts what one process chooses")

SESSION: Pairs = [("X-SMG-Routing-Key", "a")]


class Last:
    """Always the last worker of the list."""

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Unit:
        """See `Policy`."""
        return candidates[-1]


class Unfinished:
    """Forgot to choose one."""

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> object:
        """See `Policy`."""
        return sorted(candidates, key=lambda unit: unit.tokens)


def generation(length: int = 100) -> bytes:
    """A request with a prompt of so many bytes."""
    return orjson.dumps({"text": "a" * length, "sampling_params": {"max_new_tokens": 1}})


async def taker(
    router: RunningRouter, workers: list[ScriptedWorker], headers: Pairs = (), length: int = 100
) -> ScriptedWorker:
    """The worker that answers a generation."""
    before, in_flight = [len(worker.requests) for worker in workers], router.pool.in_flight
    answer = await router.ask("POST", "/generate", headers, generation(length))
    assert answer.status == 200, answer.body
    (took,) = [worker for worker, seen in zip(workers, before, strict=True) if len(worker.requests) > seen]
    await until(lambda: router.pool.in_flight <= in_flight, "its answer is over for the router, too")
    return took


async def test_a_reply_that_was_held_up_for_its_client_says_nothing_of_its_worker(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    meta = b'"meta_info":{"completion_tokens":100,"cached_tokens":0}}'
    router = await stage.router(*workers)
    for length, learned in ((16_000_000, False), (100, True)):
        for worker in workers:
            worker.always(script(reply(b'{"text":"%b",%b' % (b"a" * length, meta))))
        client = await stage.client(router)
        await client.send(request("POST", "/generate", body=generation()))
        if not learned:
            await until(lambda: router.app.router.metrics.bytes_out > 0, "it is on its way")
        assert len((await client.read()).body) > length
        await until(lambda: not router.pool.in_flight, "it is over")
        assert any(worker.units[0].measurements for worker in router.pool) == learned


async def test_a_policy_of_ones_own_chooses(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    router = await stage.router(*workers, policy="tests.e2e.test_policies.Last")
    assert [await taker(router, workers) for _ in range(4)] == [workers[-1]] * 4


async def test_what_is_no_choice_is_answered_by_name_and_asks_no_worker(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers, policy="tests.e2e.test_policies.Unfinished")
    answer = await router.ask("POST", "/generate", SESSION, generation())
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (500, "internal_error")
    assert "the policy Unfinished chose [" in error["message"]
    assert [worker.requests for worker in workers] == [[], []]
