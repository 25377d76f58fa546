"""A worker that the configuration names takes requests once it has answered a check, and not before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.fleet import post
from tests.support.metrics import metric, metrics, samples, total
from tests.support.running_router import RunningRouter, running_router
from tests.support.scripted_worker import HANG, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import STEP

EXPECTED = "named in the configuration, and has not answered yet"
SHORT: dict[str, Any] = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}


async def got(router: RunningRouter, path: str) -> Any:
    answer = await router.ask("GET", path)
    assert answer.status == 200, answer.body
    return answer.json()


async def shown(router: RunningRouter, url: str) -> dict[str, Any]:
    """What the router says of one worker."""
    found: list[dict[str, Any]] = (await got(router, "/workers"))["workers"]
    return next(each for each in found if each["url"] == url)


async def in_state(router: RunningRouter, url: str, state: str) -> dict[str, Any]:
    while (found := await shown(router, url))["state"] != state:  # noqa: ASYNC110
        await asyncio.sleep(STEP)
    return found


async def refusing(stage: Stage) -> ScriptedWorker:
    """A worker that takes no connection yet."""
    worker = await stage.worker()
    worker.refuse()
    return worker


async def test_a_worker_that_never_answered_is_shown_as_unreached(stage: Stage) -> None:
    silent = await refusing(stage)
    router = await stage.router(silent)
    record = await shown(router, silent.url)
    assert record["state"] == "unreached"
    assert record["reason"].startswith(EXPECTED)
    for path in ("/health", "/router/info"):
        said = await got(router, path)
        assert (said["workers_total"], said["workers_routable"], said["workers_unreached"]) == (1, 0, 1)
    assert (await router.ask("GET", "/readiness")).status == 503
    listed = await got(router, "/list_workers")
    assert (listed["urls"], [*listed["unreached"]]) == ([silent.url], [silent.url])
    assert listed["unreached"][silent.url].startswith(EXPECTED)
    text = await metrics(router.url)
    assert [each.value for each in samples(text, "miles_router_worker_routable", worker=silent.url)] == [0]
    assert total(text, "miles_router_workers", state="unreached") == 1


async def test_a_router_whose_workers_are_up_takes_requests_at_once(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    async with running_router(*workers) as router:
        answers = await asyncio.gather(*(post(router, "/generate", **SHORT) for _ in range(9)))
    assert [answer.status for answer in answers] == [200] * 9
    assert all(worker.requests for worker in workers)


async def test_a_worker_that_registers_itself_takes_requests_at_once(stage: Stage) -> None:
    silent, other = await refusing(stage), await refusing(stage)
    router = await stage.router(silent)
    for url in (other.url, silent.url):  # the second one is named in the configuration, too
        answer = await post(router, "/add_worker", url=url)
        assert answer.status == 200
        assert (await shown(router, url))["state"] == "ready"
    assert (await post(router, "/remove_worker", url=silent.url)).status == 200
    assert (await got(router, "/list_workers")) == {"urls": [other.url]}


async def test_a_worker_that_had_registered_itself_takes_requests_behind_a_restart(
    stage: Stage, tmp_path: Path
) -> None:
    named, gone = await stage.worker(), await refusing(stage)
    async with running_router(named, state_dir=str(tmp_path)) as before:
        assert (await post(before, "/add_worker", url=gone.url)).status == 200
    named.refuse()
    async with running_router(named, state_dir=str(tmp_path)) as after:
        states = [(await shown(after, worker.url))["state"] for worker in (named, gone)]
        assert states == ["unreached", "ready"]


async def test_a_control_request_does_not_fail_for_a_worker_that_never_answered(stage: Stage) -> None:
    silent, well = await refusing(stage), await stage.worker()
    router = await stage.router(silent, well)
    answer = await post(router, "/flush_cache")
    assert answer.status == 200
    assert answer.json()["workers"][silent.url]["status"] == 0


async def test_the_first_good_answer_makes_a_worker_routable(stage: Stage) -> None:
    for readmit in ("same-weights", "never"):
        late = await refusing(stage)
        router = await stage.router(late, readmit=readmit, health_check_failure_threshold=1)
        for path in ("/generate", "/get_model_info"):
            answer = await router.ask("GET" if path == "/get_model_info" else "POST", path, body=b"{}")
            assert (answer.status, answer.error_type) == (503, "no_worker_available")
            assert "1 unreached" in answer.json()["error"]["message"]
            assert int(answer.value("retry-after") or 0) >= 1
        while not (await shown(router, late.url))["failures"]:  # noqa: ASYNC110
            await asyncio.sleep(STEP)
        await late.listen()
        record = await in_state(router, late.url, "ready")
        assert (record["reason"], record["failures"]) == ("registered", 0), readmit
        assert (await post(router, "/generate", **SHORT)).status == 200
        assert "unreached" not in await got(router, "/list_workers")


async def test_no_request_goes_where_nothing_good_has_answered(stage: Stage) -> None:
    hanging, failing, well = [await stage.worker() for _ in range(3)]
    silent = await refusing(stage)
    hanging.model_info, failing.model_info = script(HANG), script(reply(b"", 500))
    router = await stage.router(hanging, failing, silent, well, health_check_timeout=0.2)
    assert [(await post(router, "/generate", **SHORT)).status for _ in range(6)] == [200] * 6
    assert (hanging.requests, failing.requests, len(well.requests)) == ([], [], 6)
    assert await metric(router, "miles_router_retries_total") == 0
    for starting in (hanging, failing):
        starting.model_info = script(reply(b'{"weight_version": "1"}'))
        await in_state(router, starting.url, "ready")
