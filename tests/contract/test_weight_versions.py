"""`/update_weight_version`, and the version spans of requests that live through it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contract.client import ENDLESS, Stream, WorkerClient, covers

SHORT = {"max_new_tokens": 4, "ignore_eos": True}


async def goes_on(worker: WorkerClient, stream: Stream, version: str) -> Any:
    """The last event of the request `long`, which is aborted when it has sampled something under a version."""
    since: int | None = None
    while True:
        event = await stream.next()
        if event["meta_info"]["weight_version"] == version:
            since = len(event["output_ids"]) if since is None else since
            if len(event["output_ids"]) > since:
                break
    await worker.ask("POST", "/abort_request", {"rid": "long"})
    return (await stream.rest())[-1]


async def test_a_new_version_is_announced_everywhere(worker: WorkerClient) -> None:
    answer = await worker.post("/update_weight_version", new_version="7", abort_all_requests=False)
    assert answer == {"success": True, "message": "Weight version updated to 7", "new_version": "7"}
    assert (await worker.get("/model_info"))["weight_version"] == "7"
    made = await worker.generate(text="One", sampling_params=SHORT)
    assert made["meta_info"]["weight_version"] == "7"
    assert made["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_request_paused_for_an_update_has_a_span_for_each_version(worker: WorkerClient, mode: str) -> None:
    async with worker.stream("/generate", text="One", sampling_params=ENDLESS, rid="long") as stream:
        before = await stream.next()
        async with worker.paused(mode):
            await worker.set_version("8")
        last = await goes_on(worker, stream, "8")
    meta = last["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "8"]
    assert covers(meta["weight_versions"], len(last["output_ids"]))
    assert meta["weight_versions"][0]["end"] >= len(before["output_ids"])
    assert meta["weight_version"] == "8"


async def test_an_update_needs_no_pause(worker: WorkerClient) -> None:
    async with worker.stream("/generate", text="One", sampling_params=ENDLESS, rid="long") as stream:
        await stream.next()
        await worker.set_version("8")
        last = await goes_on(worker, stream, "8")
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["default", "8"]
    assert covers(last["meta_info"]["weight_versions"], len(last["output_ids"]))


async def test_unless_told_otherwise_an_update_aborts_what_runs(worker: WorkerClient) -> None:
    async with worker.in_flight("cut") as request:
        await worker.post("/update_weight_version", new_version="9")
        answer = await asyncio.wait_for(request, 5)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["weight_versions"][0]["version"] == "default"


@pytest.mark.parametrize("body", [{}, {"new_version": 9}], ids=["none", "number"])
async def test_a_version_is_a_string(worker: WorkerClient, body: dict[str, int]) -> None:
    refused = await worker.ask("POST", "/update_weight_version", body)
    assert refused.status == 400
    assert refused.json["type"] == "Bad Request"
    assert (await worker.get("/model_info"))["weight_version"] == "default"
