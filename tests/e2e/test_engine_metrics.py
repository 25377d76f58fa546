"""`GET /engine_metrics`: what all engines say about themselves, in one text and in bounded time."""

from __future__ import annotations

from tests.support.scripted_worker import HANG, reply, script
from tests.support.stage import Stage

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
