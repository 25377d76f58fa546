"""The generation gate: who waits there, who is refused, who leaves, who is aborted, and in which order they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from miles_router.tasks import spawn
from miles_router.testing import SimulatedWorker
from tests.support.fleet import JSON, PROBING, asked, gate, held, post, posting, simulated
from tests.support.http import Client, RawReply, ask, request
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.waiting import soon, until

ENDLESS = {"max_new_tokens": 400, "ignore_eos": True}
leaves = pytest.mark.parametrize("leave", [Client.abort, Client.reset], ids=["closes", "resets"])


# How many, and for how long


@pytest.mark.alone("gate_max_held is shared out among processes")
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/sessions/7/v1/messages"])
async def test_the_one_over_the_bound_is_refused_at_once_with_the_reason(stage: Stage, path: str) -> None:
    worker, router = await stage.worker_and_router(gate_max_held=2)
    await post(router, "/pause_generation", mode="retract")
    waiting = [posting(router, path) for _ in range(2)]
    await held(router, 2)
    refused = await post(router, path, text="Hi")
    assert (refused.status, refused.error_type, refused.value("retry-after")) == (503, "unavailable", b"1")
    assert "the fleet is paused (retract); 2 requests wait already" in refused.json()["error"]["message"]
    assert (gate(router).held, router.pool.in_flight, asked(worker)) == (2, 0, ["/pause_generation"])
    await post(router, "/continue_generation")
    assert [(await each).status for each in waiting] == [200, 200]
    assert gate(router).held == 0
    assert asked(worker)[2:] == [path, path]


async def test_whoever_waits_for_too_long_is_refused_with_the_reason(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(gate_timeout=0.05)
    await post(router, "/pause_generation")
    for refused in [await each for each in [posting(router) for _ in range(3)]]:
        assert (refused.status, refused.error_type) == (503, "unavailable")
        assert "the fleet is paused (abort), and this request has waited 0.05 s" in refused.json()["error"]["message"]
    assert (gate(router).held, router.pool.in_flight) == (0, 0)
    await post(router, "/continue_generation")
    assert asked(worker) == ["/pause_generation", "/continue_generation"]
    assert (await posting(router)).status == 200


@pytest.mark.alone("who has waited longest goes first in its process")
async def test_on_continue_they_reach_the_worker_in_the_order_in_which_they_came(stage: Stage) -> None:
    # One after the other, so that there is an order to see.
    worker, router = await stage.worker_and_router(max_connections=1)
    await post(router, "/pause_generation")
    paths = ["/v1/completions", "/generate", "/sessions/a/generate", "/v1/chat/completions"]
    waiting = []
    for number in range(20):
        waiting.append(posting(router, paths[number % 4], number=number))
        await held(router, number + 1)
    await post(router, "/continue_generation")
    assert {(await each).status for each in waiting} == {200}
    assert [orjson.loads(each.body)["number"] for each in worker.requests[2:]] == list(range(20))


# Who passes


async def pause(router: RunningRouter, workers: list[SimulatedWorker]) -> None:
    await post(router, "/pause_generation")


async def put_to_sleep(router: RunningRouter, workers: list[SimulatedWorker]) -> None:
    await post(router, "/release_memory_occupation")


async def pause_behind_its_back(router: RunningRouter, workers: list[SimulatedWorker]) -> None:
    for worker in workers:
        await ask(worker.url, "POST", "/pause_generation", JSON, b"{}")


@pytest.mark.parametrize("close", [pause, put_to_sleep, pause_behind_its_back])
async def test_what_does_not_generate_passes_a_closed_gate(stage: Stage, close: Callable[..., Any]) -> None:
    async with simulated() as workers:
        router = await stage.router(*(worker.url for worker in workers), **PROBING)
        await close(router, list(workers))
        await until(lambda: gate(router).closed, "it is closed")
        waiting = posting(router)
        await held(router, 1)
        for path in ("/model_info", "/v1/models", "/server_info", "/v1/loads", "/workers", "/metrics", "/health"):
            assert (await router.ask("GET", path)).status == 200, path
        assert (await post(router, "/v1/tokenize", prompt="Hi")).json()["count"] > 0
        assert (await post(router, "/flush_cache")).status == 200
        assert (await post(router, "/update_weight_version", new_version="2")).status == 200
        assert not waiting.done()
        await post(router, "/resume_memory_occupation")
        await post(router, "/continue_generation")
        assert (await waiting).json()["meta_info"]["weight_version"] == "2"


# Who leaves


@leaves
async def test_a_client_that_leaves_waits_no_longer_and_reaches_no_worker(
    stage: Stage, leave: Callable[[Client], None]
) -> None:
    worker, router = await stage.worker_and_router()
    await post(router, "/pause_generation")
    leaving, staying = await stage.client(router), posting(router)
    await held(router, 1)
    await leaving.send(request("POST", "/generate", body=b'{"text": "leaves"}'))
    await held(router, 2)
    leave(leaving)
    await held(router, 1)
    await post(router, "/continue_generation")
    assert (await staying).status == 200
    await stage.nothing_under_way()
    assert asked(worker) == ["/pause_generation", "/continue_generation", "/generate"]
    assert b"leaves" not in worker.requests[-1].body
    assert router.app.router.metrics.client_disconnects == 1


async def sampling(worker: SimulatedWorker, count: int) -> None:
    """Until as many generations have sampled something."""
    running = worker.engine.running
    await until(lambda: sum(bool(each.output_ids) for each in running.values()) == count, "they sample")


async def cut(stage: Stage, router: RunningRouter, worker: SimulatedWorker, **fields: Any) -> Client:
    """A client whose generation has begun and was cut by a pause."""
    client = await stage.client(router)
    body = orjson.dumps({"text": "Hi", "sampling_params": ENDLESS, **fields})
    before = gate(router).held
    await client.send(request("POST", "/generate", JSON, body))
    if fields.get("stream"):
        await client.read_head()
        await client.read_part()
    await sampling(worker, 1)
    await post(router, "/pause_generation", mode="abort")
    await held(router, before + 1)
    return client


@leaves
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_between_cut_and_continue_is_not_carried_on(
    stage: Stage, leave: Callable[[Client], None], stream: bool
) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        leave(await cut(stage, router, worker, stream=stream))
        await held(router, 0)
        worker.log.clear()
        await post(router, "/continue_generation")
        await stage.nothing_under_way()
        assert [each.path for each in worker.log] == ["/continue_generation"]


# Who is aborted


IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
ABORTS: list[dict[str, Any]] = [{"rid": "me"}, {"abort_all": True}]


def unborn(rid: str, **meta: Any) -> dict[str, Any]:
    """What SGLang 0.5.23 answers a request that it aborts in its queue, as far as a router can know it."""
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {"id": rid, "finish_reason": IN_THE_QUEUE, "completion_tokens": 0, **meta},
    }


def answers(reply: RawReply) -> Any:
    """The answer, the list of answers, or the events of a stream."""
    if reply.value("content-type") == b"application/json":
        return reply.json()
    *events, done, rest = reply.body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({"text": "Hi", "rid": "me"}, unborn("me")),
    "logprobs": (
        {"input_ids": [1, 2], "rid": "me", "return_logprob": True},
        unborn("me", input_token_logprobs=[], output_token_logprobs=[]),
    ),
    "list": ({"text": ["Hi", "Ho"], "rid": ["me", "me 2"]}, [unborn("me"), unborn("me 2")]),
    "ids": ({"input_ids": [[1], [2]], "rid": "me"}, [unborn("me_0"), unborn("me_1")]),
    "stream": ({"text": "Hi", "rid": "me", "stream": True}, [unborn("me")]),
    "streams": (
        {"input_tokens": [[1], [2]], "rid": "me", "stream": True},
        [{**unborn("me_0"), "index": 0}, {**unborn("me_1"), "index": 1}],
    ),
}


@pytest.mark.parametrize("partial_rollout", ["return", "resume"])
@pytest.mark.parametrize("form", FORMS)
async def test_an_abort_answers_who_waits_as_the_engine_answers_who_is_in_its_queue(
    stage: Stage, partial_rollout: str, form: str
) -> None:
    body, expected = FORMS[form]
    worker, router = await stage.worker_and_router(partial_rollout=partial_rollout)
    await post(router, "/pause_generation")
    waiting = posting(router, **body)
    await held(router, 1)
    await post(router, "/abort_request", **ABORTS["input_ids" in body or "input_tokens" in body])
    answer = await soon(waiting)
    assert (answer.status, answers(answer)) == (200, expected)
    streams = b"text/event-stream; charset=utf-8" if body.get("stream") else b"application/json"
    assert answer.value("content-type") == streams
    await post(router, "/continue_generation")
    assert asked(worker) == ["/pause_generation", "/abort_request", "/continue_generation"]


async def test_ids_that_the_engine_would_make_are_made(stage: Stage) -> None:
    router = await stage.router(await stage.worker())
    await post(router, "/pause_generation")
    waiting = posting(router, text=["Hi", "Ho"], rid="me", sampling_params={"n": 2})
    await held(router, 1)
    await post(router, "/abort_request", rid="me")
    await post(router, "/abort_request", rid="me_0")
    assert gate(router).held == 1, "with several samples a rid is ignored"
    await post(router, "/abort_request", abort_all=True)
    made = [each["meta_info"]["id"] for each in (await waiting).json()]
    assert len(set(made)) == 4
    assert not any("me" in each for each in made)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"rid": "me"}'),
        ("/api/generate", b'{"rid": "me"}'),
        ("/generate", b"no json"),
        ("/generate", b'{"sampling_params": {"n": 1000000000}}'),
        ("/generate", b'{"sampling_params": {"n": null}}'),
        ("/generate", b'{"text": ["Hi"], "sampling_params": [7]}'),
    ],
)
async def test_an_abort_ends_what_else_waits_with_an_error(stage: Stage, path: str, body: bytes) -> None:
    router = await stage.router(await stage.worker())
    await post(router, "/pause_generation")
    waiting = spawn(router.ask("POST", path, JSON, body), name="a client")
    await held(router, 1)
    await post(router, "/abort_request", abort_all=True)
    refused = await soon(waiting)
    assert (refused.status, refused.error_type) == (503, "unavailable")
    assert refused.json()["error"]["message"] == "the request was aborted while it waited for the fleet to resume"


async def test_a_rid_ends_those_that_begin_with_it_if_there_is_one_that_is_it(stage: Stage) -> None:
    router = await stage.router(await stage.worker())
    await post(router, "/pause_generation")
    waiting = {rid: posting(router, text="Hi", rid=rid) for rid in ("r1", "r10", "r2", "r_1")}
    group = posting(router, text=["Hi", "Ho"], rid="r")
    await held(router, 5)
    for nobodys in ("", "r", "1", "r1_", "r_", "R1", 'r1"', "\u00e9", "r_0"):
        await post(router, "/abort_request", rid=nobodys)
    assert gate(router).held == 5, "and a list is not ended for one of its prompts"
    await post(router, "/abort_request", rid="r1")
    await held(router, 3)
    assert {rid for rid, each in waiting.items() if each.done()} <= {"r1", "r10"}
    await post(router, "/continue_generation")
    finishes = {rid: "finish_reason" in (await each).body.decode() for rid, each in waiting.items()}
    assert finishes == {"r1": True, "r10": True, "r2": False, "r_1": False}
    assert (await group).body == b"{}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abort", ABORTS, ids=["rid", "all"])
async def test_an_abort_between_cut_and_continue_is_final(stage: Stage, abort: dict[str, Any], stream: bool) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        client = await cut(stage, router, worker, rid="me", stream=stream)
        await post(router, "/abort_request", **abort)
        answer = await (client.read_body() if stream else client.read("POST"))
        last = answers(answer)[-1] if stream else answer.json()
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["output_ids"] == worker.log.generation("me").output_ids
        assert gate(router).held == 0
        worker.log.clear()
        await post(router, "/continue_generation")
        await stage.nothing_under_way()
        assert [each.path for each in worker.log] == ["/continue_generation"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{"rid": "me"}, {}], ids=["named", "by the worker"])
async def test_an_abort_reaches_a_generation_that_was_carried_on_where_it_runs_now(
    stage: Stage, given: dict[str, str], stream: bool
) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        client = await cut(stage, router, worker, **given, stream=stream)
        name = worker.log.at("/generate")[0].generations[0].rid
        await post(router, "/continue_generation")
        await sampling(worker, 1)
        await post(router, "/pause_generation")
        await held(router, 1)
        await post(router, "/continue_generation")
        await sampling(worker, 1)
        await post(router, "/abort_request", rid=name)
        answer = await (client.read_body() if stream else client.read("POST"))
        said = answers(answer) if stream else [answer.json()]
        assert said[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert {each["meta_info"]["id"] for each in said} == {name}


async def test_an_abort_reaches_all_ids_that_begin_alike_whether_carried_on_or_not(stage: Stage) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        older = {rid: posting(router, text="Hi", rid=rid, sampling_params=ENDLESS) for rid in ("r1", "r2")}
        await until(lambda: worker.running == 2, "they run")
        await post(router, "/pause_generation")
        await held(router, 2)
        await post(router, "/continue_generation")
        await sampling(worker, 2)
        tasks = older | {"r10": posting(router, text="Hi", rid="r10", sampling_params=ENDLESS)}
        await until(lambda: worker.running == 3, "one more runs")
        await post(router, "/abort_request", rid="r1")
        await until(lambda: worker.running == 1, "two were aborted")
        worker.engine.token_latency_s = 0
        said = {rid: (await each).json()["meta_info"] for rid, each in tasks.items()}
        assert {rid: each["id"] for rid, each in said.items()} == {"r1": "r1", "r10": "r10", "r2": "r2"}
        finishes = {rid: each["finish_reason"]["type"] for rid, each in said.items()}
        assert finishes == {"r1": "abort", "r10": "abort", "r2": "length"}


@pytest.mark.parametrize("batch", [False, True])
async def test_what_goes_on_has_another_name_than_the_stream_that_was_cut(stage: Stage, batch: bool) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        prompts: dict[str, Any] = {"text": ["Hi", "Ho"] if batch else "Hi", "rid": "me", "stream": True}
        count = 1 + batch
        client = await stage.client(router)
        body = orjson.dumps({**prompts, "sampling_params": ENDLESS})
        await client.send(request("POST", "/generate", JSON, body))
        await client.read_head()
        for _ in range(3):
            await sampling(worker, count)
            worker.engine.abort_ended_streams()
            await post(router, "/pause_generation")
            await held(router, count)
            await post(router, "/continue_generation")
        worker.engine.token_latency_s = 0
        said = answers(await client.read_body())
        assert {each["meta_info"]["id"] for each in said} == ({"me_0", "me_1"} if batch else {"me"})
        ends = [each["meta_info"]["finish_reason"] for each in said if each["meta_info"]["finish_reason"]]
        assert ends == [{"type": "length", "length": 400}] * count


@pytest.mark.parametrize(("rid", "aborted"), [("r", []), ("r_1", [1])])
async def test_an_abort_of_one_prompt_of_a_list_that_was_cut_ends_it_alone(
    stage: Stage, rid: str, aborted: list[int]
) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        task = posting(router, input_ids=[[1], [2]], rid="r", sampling_params=ENDLESS)
        await until(lambda: worker.running == 2, "they run")
        await post(router, "/pause_generation")
        await held(router, 2)
        worker.engine.token_latency_s = 0
        await post(router, "/abort_request", rid=rid)
        await held(router, 2 - len(aborted))
        await post(router, "/continue_generation")
        finishes = [each["meta_info"]["finish_reason"]["type"] for each in (await task).json()]
        assert finishes == ["abort" if index in aborted else "length" for index in range(2)]


async def test_an_abort_of_one_prompt_that_ran_is_remembered_when_a_pause_cuts_the_rest(stage: Stage) -> None:
    async with SimulatedWorker(token_latency_s=0.02, stop_probability=0) as worker:
        router = await stage.router(worker.url, partial_rollout="resume")
        task = posting(router, input_ids=[[1], [2]], rid="r", sampling_params=ENDLESS)
        await until(lambda: worker.running == 2, "they run")
        await post(router, "/abort_request", rid="r_0")
        await until(lambda: worker.running == 1, "one is aborted")
        await post(router, "/pause_generation")
        answer = await soon(task)
        assert [each["meta_info"]["finish_reason"]["type"] for each in answer.json()] == ["abort", "abort"]
        assert gate(router).held == 0


async def test_an_abort_without_any_worker_still_ends_those_who_wait(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    await post(router, "/pause_generation")
    waiting = posting(router)
    await held(router, 1)
    await post(router, f"/remove_worker?url={worker.url}")
    assert (await post(router, "/abort_request", abort_all=True)).error_type == "no_worker_available"
    assert (await soon(waiting)).json()["meta_info"]["finish_reason"] == IN_THE_QUEUE
