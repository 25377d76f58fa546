"""Weights that change without a version: nobody else's version string says that its weights are the fleet's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http import RawReply
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

DISK, TENSOR, NAME = "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version"
DONE, REFUSED = script(reply(b'{"success": true}')), script(reply(b'{"success": false}', 400))
SAME_SETTINGS: dict[str, Any] = {"fan_out": (TENSOR,), "health_check_interval": 0.05}


async def scripted(stage: Stage, path: str, behaviour: Any = DONE) -> ScriptedWorker:
    """A worker that names version "1", whatever its weights are."""
    worker = await stage.worker()
    worker.standing.update({path: behaviour, NAME: DONE})
    return worker


async def update(router: RunningRouter, path: str, **fields: Any) -> RawReply:
    return await router.ask("POST", path, [("Content-Type", "application/json")], json.dumps(fields).encode())


def states(router: RunningRouter) -> dict[str, str]:
    return {worker.url: worker.state.value for worker in router.pool}


@pytest.mark.parametrize("path", [DISK, TENSOR])
async def test_a_worker_that_refused_an_unnamed_update_is_outdated(
    stage: Stage, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    good, bad = await scripted(stage, path), await scripted(stage, path, REFUSED)
    router = await stage.router(good, bad, **SAME_SETTINGS)
    await router.probed()
    assert (await update(router, path, model_path="/new")).status == 502
    assert states(router) == {good.url: "ready", bad.url: "outdated"}
    assert router.pool.weight_version is None
    (said,) = [each.__dict__["fields"] for each in caplog.records if each.message == "weights_without_version"]
    assert said["missed_by"] == [bad.url]
    for _ in range(6):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert (len(good.requests), bad.requests) == (6, [])
    await router.probed()
    assert states(router)[bad.url] == "outdated", "its version string says nothing"
    bad.standing[path] = DONE
    assert (await update(router, path, model_path="/new")).status == 200
    assert states(router) == {good.url: "ready", bad.url: "ready"}


async def test_a_newcomer_behind_an_unnamed_update_waits_for_one(stage: Stage) -> None:
    first, newcomer = await scripted(stage, DISK), await scripted(stage, DISK)
    router = await stage.router(first, **SAME_SETTINGS)
    await router.probed()
    assert (await update(router, DISK, model_path="/new")).status == 200
    assert (await router.ask("POST", f"/add_worker?url={newcomer.url}")).status == 200
    assert states(router) == {first.url: "ready", newcomer.url: "outdated"}
    for _ in range(4):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert newcomer.requests == []
    assert (await update(router, DISK, model_path="/newer")).status == 200
    assert states(router) == {first.url: "ready", newcomer.url: "ready"}


async def test_a_name_alone_does_not_bring_back_who_missed_an_update(stage: Stage) -> None:
    good, bad = await scripted(stage, DISK), await scripted(stage, DISK, REFUSED)
    router = await stage.router(good, bad)  # whose checks are far between: nobody looks until the name was told
    await until(lambda: router.pool.weight_version == "1", "both have said their version")
    await update(router, DISK, model_path="/new")
    for worker in (good, bad):
        worker.model_info = script(reply(b'{"model_path": "scripted", "weight_version": "2"}'))
    assert (await update(router, NAME, new_version="2")).status == 200
    assert router.pool.weight_version == "2"
    assert states(router) == {good.url: "ready", bad.url: "outdated"}
