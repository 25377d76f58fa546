"""A `rid` that a client sends again after it has left: the engine may still have the first request."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from miles_router.tasks import cancelled, spawn
from miles_router.testing import SimulatedWorker
from tests.support.events import events_of
from tests.support.fleet import JSON, post, posting
from tests.support.http import Client, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import LAST_CHUNK, RESET, ScriptedWorker, Visit, chunk, chunked_head, reply
from tests.support.session_trial import simulated_sessions
from tests.support.stage import Stage
from tests.support.waiting import until

DONE = b"data: [DONE]\n\n"
COMPLETED = "response.completed"
SHORT: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 3}
pytestmark = pytest.mark.alone("each process knows the names that it sent")
PATHS = ["/generate", "/v1/chat/completions", "/v1/completions"]


class Engine:
    """A worker that knows generations by their names, as SGLang 0.5.23 does: one whose client has left goes on until
    somebody aborts it, and a name that is in use is refused."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker.always(self._answer)
        self.names: list[str] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.may_end = asyncio.Event()
        self.to_lose = 0  # of the next generations the connections, not the generations

    async def _answer(self, visit: Visit) -> None:
        body = orjson.loads(await visit.read_body())
        if visit.request.path == "/abort_request":
            self.aborted.append(body["rid"])
            self.running = {name for name in self.running if not name.startswith(body["rid"])}
            await visit.run([reply(b"")])
            return
        rid = body.get("rid") or body.get("request_id") or "made"
        names = rid if isinstance(rid, list) else [rid]
        if self.running & {*names}:
            await visit.run([reply(b'{"error":{"message":"Duplicate request ID detected: x"}}', 400)])
            return
        self.names += names
        self.running |= {*names}
        if self.to_lose:
            self.to_lose -= 1
            await visit.run([RESET])
            return
        finish = {"finish_reason": "stop"}
        answer = orjson.dumps({"text": "a", "meta_info": {"id": names[0]}, "choices": [finish], "type": COMPLETED})
        if body.get("stream"):
            await visit.run([chunked_head([("Content-Type", "text/event-stream")]), chunk(b"data: %b\n\n" % answer)])
            await visit.run([self.may_end, chunk(DONE), LAST_CHUNK])
        else:
            await visit.run([self.may_end, reply(answer, headers=JSON)])
        if not visit.link.gone.is_set():
            self.running -= {*names}


async def engine_and_router(stage: Stage) -> tuple[Engine, RunningRouter]:
    engine = Engine(await stage.worker())
    return engine, await stage.router(engine.worker)


async def leaving(stage: Stage, router: RunningRouter, engine: Engine, path: str, **fields: Any) -> None:
    before = len(engine.names)
    client: Client = await stage.client(router)
    await client.send(request("POST", path, JSON, orjson.dumps(fields)))
    await until(lambda: len(engine.names) > before, "it runs")
    client.abort()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
async def test_a_name_of_a_client_that_left_is_served_at_once(stage: Stage, path: str, stream: bool) -> None:
    engine, router = await engine_and_router(stage)
    named = {"rid" if path in PATHS else "request_id": "mine"}
    await leaving(stage, router, engine, path, **named, stream=stream)
    again = posting(router, path, **named, stream=stream)
    await until(lambda: len(engine.names) == 2 or again.done(), "it is asked again")
    await until(lambda: engine.aborted == ["mine"], "what was left is aborted")
    engine.may_end.set()
    answer = await again
    assert answer.status == 200
    assert b'"mine"' in answer.body, "its client is shown its own name"
    assert engine.names[1] not in answer.body.decode() or engine.names[1] == "mine"


async def test_what_a_client_left_is_aborted_at_its_worker(stage: Stage) -> None:
    engine, router = await engine_and_router(stage)
    await leaving(stage, router, engine, "/generate", rid="mine")
    await until(lambda: engine.aborted == ["mine"], "it is aborted")
    engine.may_end.set()


async def test_each_name_of_a_list_may_be_sent_again(stage: Stage) -> None:
    engine, router = await engine_and_router(stage)
    fields = {"text": ["a", "b"], "rid": ["one", "two"]}
    await leaving(stage, router, engine, "/generate", **fields)
    again = posting(router, "/generate", **fields)
    await until(lambda: len(engine.names) == 4 or again.done(), "it is asked again")
    await until(lambda: sorted(engine.aborted) == ["one", "two"], "both are aborted")
    engine.may_end.set()
    answer = await again
    assert (answer.status, answer.json()["meta_info"]["id"]) == (200, "one")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_kept_connection_is_lost_behind_a_name(stage: Stage, path: str, stream: bool) -> None:
    """It may have been closed while it was idle, so that the request is sent again; or the engine has begun it."""
    engine, router = await engine_and_router(stage)
    engine.may_end.set()
    await post(router, path, rid="before")
    engine.to_lose = 1
    answer = await post(router, path, rid="mine", stream=stream)
    assert (answer.status, engine.names[:2]) == (200, ["before", "mine"]), answer.body
    assert engine.worker.connections == 2
    _, _, again = engine.names
    assert b'"mine"' in answer.body
    assert again != "mine"
    assert again not in answer.body.decode()


async def test_names_that_begin_with_that_of_a_client_that_left_go_on(stage: Stage) -> None:
    """SGLang aborts all that begin with a name: where others would end too, it is left to the engine."""
    engine, router = await engine_and_router(stage)
    other = posting(router, rid="mine-2")
    await until(lambda: engine.names == ["mine-2"], "the other one runs")
    await leaving(stage, router, engine, "/generate", rid="mine")
    again = posting(router, rid="mine")
    await until(lambda: len(engine.names) == 3 or again.done(), "it is asked again")
    assert engine.aborted == []
    engine.may_end.set()
    assert ((await again).status, (await other).status) == (200, 200)


async def test_a_name_is_sent_as_it_is_once_it_was_answered_whole(stage: Stage) -> None:
    engine, router = await engine_and_router(stage)
    engine.may_end.set()
    for _ in range(3):
        assert (await post(router, "/generate", rid="mine")).status == 200
    assert engine.names == ["mine"] * 3


async def test_a_streamed_name_is_another_at_once_after_its_end(stage: Stage) -> None:
    """2 s after a stream has ended SGLang aborts what has its name then."""
    engine, router = await engine_and_router(stage)
    engine.may_end.set()
    for _ in range(2):
        assert (await post(router, "/generate", rid="mine", stream=True)).body.endswith(DONE)
    assert engine.names[0] == "mine" != engine.names[1]


async def test_a_name_twice_in_one_request_is_the_engines_to_refuse(stage: Stage) -> None:
    engine, router = await engine_and_router(stage)
    await leaving(stage, router, engine, "/generate", text=["a"], rid=["x"])
    await until(lambda: engine.aborted == ["x"], "it is aborted")
    engine.may_end.set()
    await post(router, "/generate", text=["a", "b"], rid=["x", "x"])
    assert engine.names[1:] == ["x", "x"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_one_name_for_a_list_of_prompts_may_be_sent_again(stage: Stage, stream: bool) -> None:
    async with SimulatedWorker(token_latency_s=0.005) as worker:
        router = await stage.router(worker.url)
        fields: dict[str, Any] = {"text": ["a", "b"], "rid": "mine", "stream": stream}
        left = posting(router, **fields, sampling_params={"max_new_tokens": 30_000, "ignore_eos": True})
        await until(lambda: worker.running == 2, "both run")
        await cancelled(left)
        answer = await post(router, "/generate", **fields, sampling_params=SHORT)
        assert answer.status == 200, answer.body
        said = events_of(answer.body) if stream else answer.json()
        assert {each["meta_info"]["id"] for each in said} == {"mine_0", "mine_1"}
        assert {each["meta_info"]["finish_reason"]["type"] for each in said if each["meta_info"]["finish_reason"]} == {
            "length"
        }
        await until(lambda: worker.running == 0, "what was left is aborted")


async def test_an_abort_by_the_client_s_name_ends_the_repeat(stage: Stage) -> None:
    engine, router = await engine_and_router(stage)
    await leaving(stage, router, engine, "/generate", rid="mine")
    again = posting(router, rid="mine")
    await until(lambda: len(engine.names) == 2, "it is asked again")
    assert (await post(router, "/abort_request", rid="mine")).status == 200
    assert engine.names[1] in engine.aborted
    engine.may_end.set()
    await again


async def test_a_left_session_turn_is_aborted_by_the_name_that_its_engine_knows(stage: Stage) -> None:
    async with simulated_sessions(stage, token_latency_s=0.005) as trial:
        session = await trial.create()
        body = {"text": "Hi", "rid": "mine", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        path = f"/sessions/{session}/generate"
        left = spawn(trial.ask("POST", path, body), name="a client that leaves")
        await until(lambda: trial.worker.running == 1, "it runs")
        await cancelled(left)
        answer = await trial.ask("POST", path, {**body, "sampling_params": SHORT})
        assert (answer.status, answer.json()["meta_info"]["id"]) == (200, "mine"), answer.body
        await until(lambda: bool(trial.worker.log.at("/abort_request")), "what was left is aborted")


async def test_a_removed_worker_is_told_no_abort(stage: Stage) -> None:
    engines = [Engine(await stage.worker()), Engine(await stage.worker())]
    router = await stage.router(*(engine.worker for engine in engines))
    client: Client = await stage.client(router)
    await client.send(request("POST", "/generate", JSON, b'{"text": "Hi", "rid": "mine"}'))
    await until(lambda: any(engine.names for engine in engines), "it runs")
    removed, stays = sorted(engines, key=lambda engine: not engine.names)
    worker = router.pool.find(removed.worker.url)
    assert worker is not None
    router.pool.remove(worker)
    client.abort()
    await leaving(stage, router, stays, "/generate", rid="mine")
    await until(lambda: stays.aborted == ["mine"], "the later one is aborted")
    assert removed.aborted == []
    for engine in engines:
        engine.may_end.set()


async def test_many_workers_each_keep_their_own_names(stage: Stage) -> None:
    """A name is another one only where its worker may have it."""
    first, second = Engine(await stage.worker()), Engine(await stage.worker())
    router = await stage.router(first.worker, second.worker)
    one = posting(router, rid="mine")
    await until(lambda: len(first.names) + len(second.names) == 1, "one runs")
    other = posting(router, rid="mine")
    await until(lambda: len(first.names) + len(second.names) == 2, "both run")
    for engine in (first, second):
        engine.may_end.set()
    assert {(await one).status, (await other).status} == {200}
    assert [*first.names, *second.names] == ["mine", "mine"]
