"""Facts belong to one process: asked when it joins, given while it lives, never those of another."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from miles_router.engines.facts import Facts
from miles_router.engines.known import USUAL
from miles_router.fleet.workers import WorkerState
from tests.support.fleet import PROBING, becomes
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, HANG, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

SCHEMA = {"paths": {"/generate": {}}, "components": {"schemas": {"ChatCompletionRequest": {"properties": {"a": {}}}}}}


@dataclass
class Ends:
    """What a layer learns of an engine."""

    tokens: set[int] = field(default_factory=set)


def says(worker: ScriptedWorker, *, model: str = "/a", **settings: Any) -> None:
    """Have a worker say this of itself from now on."""
    worker.model_info = script(reply(orjson.dumps({"model_path": model, "weight_version": "1"})))
    worker.standing["/server_info"] = script(reply(orjson.dumps({"version": "1", **settings})))
    worker.standing["/openapi.json"] = script(reply(orjson.dumps(SCHEMA)))


async def restarted(worker: ScriptedWorker, **now: Any) -> None:
    """Another process on the same port, as soon as the first is gone."""
    worker.kill()
    says(worker, **now)
    await worker.listen()


async def facts(router: RunningRouter, worker: ScriptedWorker) -> Facts:
    return await router.app.router.fleet.facts(worker.url)


def known(router: RunningRouter, worker: ScriptedWorker) -> Facts:
    return router.app.router.fleet.known_facts(worker.url)


async def test_a_worker_is_asked_when_it_joins_and_then_known_without_asking(stage: Stage) -> None:
    worker = await stage.worker()
    says(worker, incremental_streaming_output=True)
    router = await stage.router(worker)
    assert known(router, worker).incremental_streaming is True
    del worker.standing["/server_info"]
    assert await facts(router, worker) is known(router, worker)
    assert (known(router, worker).engine, known(router, worker).endpoints) == (USUAL, frozenset({"/generate"}))


async def test_a_worker_restarted_between_two_checks_is_not_answered_by_old_facts(stage: Stage) -> None:
    """No probe comes within this test, no request fails, and the restart takes no time at all."""
    worker = await stage.worker()
    says(worker, incremental_streaming_output=False)
    router = await stage.router(worker)
    old = await facts(router, worker)
    old.learned(Ends).tokens.add(2)
    await restarted(worker, incremental_streaming_output=True)
    assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert known(router, worker).incremental_streaming in (True, None)
    new = await facts(router, worker)
    assert (new.incremental_streaming, new.learned(Ends).tokens) == (True, set())
    assert (router.worker(worker).state, router.worker(worker).failures) == (WorkerState.READY, 0)


@pytest.mark.parametrize("lasting", [True, False], ids=["the same process", "one that cannot be told apart"])
async def test_facts_outlive_idle_connections_only_for_a_known_process(stage: Stage, lasting: bool) -> None:
    worker = await stage.worker()
    says(worker, startup_time={"scheduler_e2e": 1.25} if lasting else None)
    router = await stage.router(worker)
    (await facts(router, worker)).learned(Ends).tokens.add(2)
    for link in tuple(worker.links):
        link.close()  # as SGLang does with idle ones after five seconds
    await until(lambda: not worker.links, "no connection is left")
    assert known(router, worker).engine is None
    assert (await facts(router, worker)).learned(Ends).tokens == ({2} if lasting else set())


async def test_another_model_or_a_quarantine_ends_them(stage: Stage) -> None:
    worker = await stage.worker()
    says(worker, startup_time={"scheduler_e2e": 1.25})
    router = await stage.router(worker, **{**PROBING, "health_check_failure_threshold": 2})
    (await facts(router, worker)).learned(Ends).tokens.add(2)
    says(worker, model="/b", startup_time={"scheduler_e2e": 1.25})
    seen = len(worker.probes)
    await until(lambda: len(worker.probes) > seen + 2, "a check has come")
    new = await facts(router, worker)
    assert (new.model_path, new.learned(Ends).tokens) == ("/b", set())
    new.learned(Ends).tokens.add(3)
    standing, worker.model_info = worker.model_info, script(reply(b"", 503))
    await becomes(router, worker, WorkerState.QUARANTINED)
    assert known(router, worker).engine is None
    worker.model_info = standing
    await becomes(router, worker, WorkerState.READY)
    assert (await facts(router, worker)).learned(Ends).tokens == set()
    await until(lambda: known(router, worker).engine is not None, "who returns is asked")


@pytest.mark.parametrize(
    "silence", [script(reply(b"", 500)), script(HANG), script(CLOSE)], ids=["fails", "hangs", "closes"]
)
async def test_what_a_worker_does_not_answer_is_unknown_and_asked_again(stage: Stage, silence: Any) -> None:
    worker = await stage.worker()
    says(worker, incremental_streaming_output=True)
    worker.standing["/server_info"] = silence
    router = await stage.router(worker, health_check_timeout=0.1)
    said = await facts(router, worker)
    assert (said.model_path, said.incremental_streaming) == ("/a", None)
    assert known(router, worker).model_path is None, "half of them is not kept"
    says(worker, incremental_streaming_output=True)
    assert (await facts(router, worker)).incremental_streaming is True


async def test_older_names_are_asked_where_the_newer_are_not_there_and_once(stage: Stage) -> None:
    worker = await stage.worker()
    worker.standing["/get_server_info"] = script(reply(b'{"stream_output": true}'))
    router = await stage.router(worker)
    said = await facts(router, worker)
    assert (said.incremental_streaming, said.weight_version, said.version, said.endpoints) == (True, "1", None, None)
    assert await facts(router, worker) is said


async def test_many_who_ask_at_once_ask_the_worker_once(stage: Stage) -> None:
    worker, answers, asked = await stage.worker(), asyncio.Event(), []
    router = await stage.router(worker)
    says(worker)

    async def slowly(visit: Any) -> None:
        asked.append(visit)
        await visit.run([answers, reply(b"{}")])

    worker.standing["/server_info"] = slowly
    for link in tuple(worker.links):
        link.close()
    fleet = router.app.router.fleet
    await until(lambda: not worker.links and fleet.known_facts(worker.url).engine is None, "no connection is left")
    asking = [asyncio.ensure_future(facts(router, worker)) for _ in range(5)]
    await until(lambda: asked, "it is asked")
    asking.pop().cancel()
    answers.set()
    assert len({id(await each) for each in asking}) == len(asked) == 1
