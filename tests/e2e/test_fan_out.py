"""Control requests reach every worker, and one answer says what became of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

from miles_router.app import create_app
from miles_router.engines.known import CONTROL, USUAL
from miles_router.errors import ConfigError
from miles_router.settings.config import RouterConfig
from miles_router.testing import SimulatedWorker
from tests.support.fleet import JSON, post, simulated
from tests.support.http import RawReply, ask
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import HANG, Behaviour, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import soon, until

ROWS = [(method, each.path) for each in CONTROL.values() for method in each.methods]
#: Those of the simulated workers here.
OWN_ROWS = [(method, path) for method, path in ROWS if any(each.path == path for each in USUAL.control)]
#: A body that a worker takes; `{}` for all others.
BODIES: dict[str, dict[str, Any]] = {
    "/abort_request": {"abort_all": True},
    "/update_weights_from_disk": {"model_path": "elsewhere"},
    "/update_weight_version": {"new_version": "2"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/slow_down": {"forward_sleep_time": None},
}
BAD: list[tuple[str, bytes]] = [
    ("/pause_generation", b'{"mode": "gently"}'),
    ("/pause_generation", b'{"mode": null}'),
    ("/pause_generation", b'{"mode": ["abort"]}'),
    ("/update_weight_version", b"{}"),
    ("/update_weight_version", b'{"new_version": 7}'),
    ("/update_weights_from_disk", b"{}"),
    ("/update_weights_from_disk", b'{"model_path": null}'),
    ("/abort_request", b"{}"),
    ("/abort_request", b'{"rid": 7}'),
    ("/abort_request", b'{"rid": null, "abort_all": false}'),
    *((path, body) for path in ("/continue_generation", "/flush_cache") for body in (b"[]", b'"abort"', b"{", b"\xff")),
]


def answers(body: bytes, status: int = 200, kind: str = "application/json") -> Behaviour:
    return script(reply(body, status, [("Content-Type", kind)]))


# Every row


async def test_every_row_reaches_every_worker_and_gives_their_own_answer(stage: Stage) -> None:
    async with simulated(enable_lora=True) as workers, SimulatedWorker(enable_lora=True) as alone:
        router = await stage.router(*(worker.url for worker in workers))
        for method, path in OWN_ROWS:
            with case(method, path):
                body = orjson.dumps(BODIES.get(path, {}))
                expected = await ask(alone.url, method, path, JSON, body)
                answer = await router.ask(method, path, JSON, body)
                assert (answer.status, answer.body) == (expected.status, expected.body)
                assert answer.value("content-type") == expected.value("content-type")
                for worker in workers:
                    came = worker.log.at(path)[-1]
                    assert (came.method, came.target, came.body) == (method, path, body)


async def test_a_body_that_only_sglang_insists_on_may_be_left_out(stage: Stage) -> None:
    async with simulated() as workers:
        router = await stage.router(*(worker.url for worker in workers))
        steps = ("pause_generation", "continue_generation", "release_memory_occupation", "resume_memory_occupation")
        for step in steps:
            assert (await router.ask("POST", f"/{step}")).status == 200
            assert [worker.log.last.body for worker in workers] == [b"{}", b"{}"]


async def test_the_query_and_the_request_id_reach_every_worker(stage: Stage) -> None:
    workers = [await stage.worker(), await stage.worker()]
    router = await stage.router(*workers)
    await router.ask("GET", "/flush_cache?timeout=3", [("X-Request-Id", "mine")])
    assert [worker.requests[0].target for worker in workers] == [b"/flush_cache?timeout=3"] * 2
    assert [worker.requests[0].values("x-request-id") for worker in workers] == [[b"mine"]] * 2


# Who is asked


async def test_all_workers_are_asked_at_the_same_time(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    all_asked = asyncio.Event()
    for worker in workers:
        worker.always(script(all_asked, reply()))
    router = await stage.router(*workers)
    asking = asyncio.ensure_future(post(router, "/flush_cache"))
    await until(lambda: all(worker.requests for worker in workers), "each was asked before any answered")
    all_asked.set()
    assert (await asking).status == 200


async def test_an_unreachable_worker_is_named_and_fails_it_unless_it_is_quarantined(stage: Stage) -> None:
    ready, dead = await stage.worker(), await stage.worker()
    router = await stage.router(ready, dead, health_check_failure_threshold=1)
    router.pool.record_failure(router.worker(dead), "sick")
    assert (await post(router, "/flush_cache")).body == b"{}", "it is asked too"
    dead.next(answers(b'{"success":false}', 400))
    assert (await post(router, "/flush_cache")).status == 502, "it answered, so its refusal counts"
    dead.kill()
    ready.always(answers(b'{"success":true,"message":"done"}'))
    said = (await post(router, "/flush_cache")).json()
    assert (said["success"], said["message"]) == (True, "done")
    assert said["workers"][ready.url] == {"status": 200, "body": {"success": True, "message": "done"}}
    assert said["workers"][dead.url]["status"] == 0
    assert "cannot connect" in said["workers"][dead.url]["body"]
    await dead.listen()
    router = await stage.router(ready, dead)
    dead.kill()
    answer = await post(router, "/flush_cache")
    said = answer.json()
    assert (answer.status, set(said), said["error"]["type"]) == (502, {"error", "workers"}, "fan_out_failed")
    assert (dead.url in said["error"]["message"], ready.url in said["error"]["message"]) == (True, False)


async def test_without_any_worker_it_is_503(stage: Stage) -> None:
    router = await stage.router()
    answer = await post(router, "/pause_generation")
    assert (answer.status, answer.error_type) == (503, "no_worker_available")


async def test_a_control_request_gets_through_while_all_connections_are_taken(stage: Stage) -> None:
    worker = await stage.worker()
    done = asyncio.Event()
    worker.next(script(done, reply(b"late")))
    router = await stage.router(worker, max_connections=1)
    generating = asyncio.ensure_future(post(router, "/generate", text="Hi"))
    await until(lambda: worker.requests, "the only connection is taken")
    assert (await soon(post(router, "/pause_generation"))).status == 200
    done.set()
    assert (await generating).body == b"late"


# What the answer says


AGREED = [
    (b"Cache flushed.\n", 200, "text/plain; charset=utf-8"),
    (b'{"success": false,  "message": "no"}', 400, "application/json"),
    (b"", 200, "application/json"),
]


async def test_where_all_agree_the_answer_is_the_workers_own_byte_for_byte(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    for body, status, kind in AGREED:
        for worker in workers:
            worker.always(answers(body, status, kind))
        answer = await post(router, "/flush_cache")
        assert (answer.status, answer.body, answer.value("content-type")) == (status, body, kind.encode())


#: What two workers answer, the status of the whole, what stands beside the workers, and each worker's own.
DIFFERENT: list[tuple[tuple[Behaviour, Behaviour], int, dict[str, Any], list[Any]]] = [
    (
        (answers(b'{"success":true,"seconds":1,"only":1}'), answers(b'{"success":true,"seconds":2}')),
        200,
        {"success": True},
        [(200, {"success": True, "seconds": 1, "only": 1}), (200, {"success": True, "seconds": 2})],
    ),
    (
        (answers(b"Flushed.\n", kind="text/plain"), answers(b"Failed.\n", 400, "text/plain")),
        502,
        {},
        [(200, "Flushed.\n"), (400, "Failed.\n")],
    ),
    ((answers(b"{}"), script(HANG)), 502, {}, [(200, {}), (0, "no answer within 0.1 s")]),
]


async def test_where_answers_differ_what_they_agree_in_stands_beside_each_workers_own(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    by_path = router.app.router.control.by_path
    by_path["/flush_cache"] = replace(by_path["/flush_cache"], timeout=0.1)
    for (one, two), status, agreed, own in DIFFERENT:
        workers[0].next(one)
        workers[1].next(two)
        answer = await soon(post(router, "/flush_cache"))
        said = answer.json()
        assert (answer.status, answer.value("content-type")) == (status, b"application/json")
        assert said.pop("workers") == {
            worker.url: {"status": each, "body": body} for worker, (each, body) in zip(workers, own, strict=True)
        }
        assert said.pop("error", {}).keys() == ({"type", "message", "request_id"} if status == 502 else set())
        assert said == agreed


async def test_an_answer_that_is_nested_too_deep_to_be_written_is_shown_as_text(stage: Stage) -> None:
    """What was done is never answered with an error for how somebody says so."""
    one, two = await stage.worker(), (await stage.worker()).always(answers(b"{}"))
    router = await stage.router(one, two)
    for levels in (200, 240, 1000):
        deep = b"[" * levels + b"]" * levels
        one.always(answers(deep))
        answer = await post(router, "/pause_generation", mode="retract")
        assert answer.status == 200
        shown = answer.json()["workers"][one.url]["body"]
        assert shown == (deep.decode() if levels > 200 else json.loads(deep))


async def test_bad_input_is_refused_before_any_worker_is_asked(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for path, body in BAD:
        with case(path, body):
            answer = await router.ask("POST", path, JSON, body)
            assert (answer.status, answer.error_type, worker.requests) == (400, "invalid_request", [])
            assert not router.app.router.gate.closed


# Rows of the user's


async def test_rows_from_the_configuration_go_to_every_worker_and_their_neighbours_to_one(stage: Stage) -> None:
    workers = [await stage.worker(), await stage.worker()]
    router = await stage.router(*workers, fan_out=("/v1/set_rate", "/mine"))
    for path in ("/v1/set_rate", "/mine"):
        assert (await post(router, path, rate=1)).status == 200
        assert [worker.requests[-1].path for worker in workers] == [path, path]
        assert [worker.requests[-1].body for worker in workers] == [b'{"rate":1}'] * 2
    for path in ("/v1/models", "/v1/set_rate/x", "/mine/x", "/v1"):
        before = sum(len(worker.requests) for worker in workers)
        assert (await router.ask("GET", path)).status == 200
        assert sum(len(worker.requests) for worker in workers) == before + 1, path
    assert (await router.ask("GET", "/mine")).status == 405


@pytest.mark.parametrize("path", ["a", "/", "", "/a/{b}", "/a?b=1", "/a b", "/a%20b"])
def test_a_row_that_could_never_match_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(ConfigError, match="fan_out"):
        RouterConfig(fan_out=(path,))


@pytest.mark.parametrize("path", ["/health", "/metrics", "/router/info", "/add_worker"])
def test_a_row_cannot_take_a_route_of_the_routers_own(path: str) -> None:
    with pytest.raises(ConfigError, match=f"fan_out: {path} is a path of the router's own"):
        create_app(RouterConfig(fan_out=(path,)))


# Aborts


async def generating(stage: Stage, router: RunningRouter, rid: str) -> asyncio.Task[RawReply]:
    before = router.pool.in_flight
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    task = asyncio.ensure_future(post(router, "/generate", text="Hi", rid=rid, sampling_params=sampling))
    await until(lambda: router.pool.in_flight > before, "it is under way")
    return task


@pytest.mark.alone("two processes may choose alike within a tenth of a second")
async def test_an_abort_by_rid_goes_only_to_the_worker_that_holds_it(stage: Stage) -> None:
    async with simulated(token_latency_s=0.02, stop_probability=0) as workers:
        router = await stage.router(*(worker.url for worker in workers))
        tasks = {rid: await generating(stage, router, rid) for rid in ("first", "second")}
        await until(lambda: all(worker.running for worker in workers), "one runs on each")
        assert (await post(router, "/abort_request", rid="first")).status == 200
        aborted = (await tasks["first"]).json()["meta_info"]
        assert (aborted["id"], aborted["finish_reason"]["type"]) == ("first", "abort")
        (asked,) = [worker for worker in workers if worker.log.at("/abort_request")]
        assert asked.log.at("/generate")[0].json()["rid"] == "first"
        assert not tasks["second"].done()
        assert (await post(router, "/abort_request", rid="unknown")).status == 200
        assert [worker.log.last.json() for worker in workers] == [{"rid": "unknown"}] * 2
        assert not tasks["second"].done()
        assert (await post(router, "/abort_request", abort_all=True)).status == 200
        assert [worker.log.last.json() for worker in workers] == [{"abort_all": True}] * 2
        assert (await tasks["second"]).json()["meta_info"]["finish_reason"]["type"] == "abort"


# Keys


async def test_every_row_needs_the_administration_key_where_one_is_set(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(api_key="data", admin_api_key="admin", fan_out=("/v1/mine",))
    for method, path in [*ROWS, ("POST", "/v1/mine")]:
        body = orjson.dumps(BODIES.get(path, {}))
        for headers in ([], [("Authorization", "Bearer data")]):
            answer = await router.ask(method, path, [*JSON, *headers], body)
            assert (answer.status, answer.error_type) == (401, "unauthorized"), path
        assert worker.requests == []
        if (method, path) in ROWS and (method, path) not in OWN_ROWS:
            continue
        assert (await router.ask(method, path, [*JSON, ("Authorization", "Bearer admin")], body)).status == 200, path
        assert b"admin" not in worker.requests.pop().head


# What all engines say about themselves

TEXT = b'# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{model_name="m"} 3.0\n'
PLAIN = [("Content-Type", "text/plain")]


async def test_every_worker_is_asked_and_named(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    for worker in workers:
        worker.always(script(reply(TEXT, 200, PLAIN)))
    router = await stage.router(*workers)
    answer = await router.ask("GET", "/engine_metrics")
    assert answer.status == 200
    assert answer.value("content-type") == b"text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.decode().splitlines()
    assert lines[1] == "# TYPE sglang_num_running_reqs gauge"
    assert lines[2:] == [
        f'sglang_num_running_reqs{{model_name="m",worker_addr="{worker.url}"}} 3.0' for worker in workers
    ]
    assert [worker.requests[-1].target for worker in workers] == [b"/metrics"] * 2


async def test_a_worker_that_hangs_leaves_a_gap_in_bounded_time(stage: Stage) -> None:
    good, bad = await stage.worker(), await stage.worker()
    router = await stage.router(good, bad, health_check_timeout=0.2)
    good.always(script(reply(TEXT, 200, PLAIN)))
    bad.always(script(HANG))
    answer = await router.ask("GET", "/engine_metrics")
    assert answer.status == 200
    lines = answer.body.decode().splitlines()
    assert [good.url in line for line in lines] == [False, False, True, False]
    assert lines[3] == f"# no metrics of {bad.url}: no answer within 0.2 s"


async def test_without_any_metrics_it_fails_by_name(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router()
    assert (await router.ask("GET", "/engine_metrics")).error_type == "no_worker_available"
    router = await stage.router(worker)
    worker.always(script(reply(b"{}", 404)))
    answer = await router.ask("GET", "/engine_metrics")
    assert (answer.status, answer.error_type) == (502, "fan_out_failed")
    assert "404" in answer.json()["error"]["message"]
