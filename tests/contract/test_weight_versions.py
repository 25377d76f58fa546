"""`/update_weight_version`, and the version spans of requests that live through it."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.engines.sglang.engine import sampling_version
from tests.contract.client import ENDLESS, WorkerClient, covers
from tests.support.waiting import soon

SHORT = {"max_new_tokens": 4, "ignore_eos": True}


class SampledUnder:
    """Whether something was sampled under a version: events name the worker's, which changes before a token comes."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._since: int | None = None

    def __call__(self, event: Any) -> bool:
        if event["meta_info"]["weight_version"] != self._version:
            return False
        self._since = len(event["output_ids"]) if self._since is None else self._since
        return len(event["output_ids"]) > self._since


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
        last = await worker.cut_off(stream, "long", SampledUnder("8"))
    meta = last["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "8"]
    assert covers(meta["weight_versions"], len(last["output_ids"]))
    assert meta["weight_versions"][0]["end"] >= len(before["output_ids"])
    assert meta["weight_version"] == "8"


async def test_an_update_needs_no_pause(worker: WorkerClient) -> None:
    async with worker.stream("/generate", text="One", sampling_params=ENDLESS, rid="long") as stream:
        await stream.next()
        await worker.set_version("8")
        last = await worker.cut_off(stream, "long", SampledUnder("8"))
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["default", "8"]
    assert covers(last["meta_info"]["weight_versions"], len(last["output_ids"]))


async def test_unless_told_otherwise_an_update_aborts_what_runs(worker: WorkerClient) -> None:
    async with worker.in_flight("cut") as request:
        await worker.post("/update_weight_version", new_version="9")
        answer = await soon(request)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["weight_versions"][0]["version"] == "default"


@pytest.mark.parametrize("body", [{}, {"new_version": 9}], ids=["none", "number"])
async def test_a_version_is_a_string(worker: WorkerClient, body: dict[str, int]) -> None:
    refused = await worker.ask("POST", "/update_weight_version", body)
    assert refused.status == 400
    assert refused.json["type"] == "Bad Request"
    assert (await worker.get("/model_info"))["weight_version"] == "default"


async def test_new_weights_whose_cache_cannot_be_flushed_are_a_400_and_sample_all_the_same(
    worker: WorkerClient,
) -> None:
    path = (await worker.get("/model_info"))["model_path"]
    async with worker.in_flight("kept"):
        async with worker.paused("in_place"):
            answer = await worker.ask("POST", "/update_weights_from_disk", {"model_path": path, "weight_version": "9"})
            named = (await worker.get("/model_info"))["weight_version"]
            told = await worker.ask("GET", "/server_info")
        assert (answer.status, answer.json["success"]) == (400, False)
        assert answer.json["message"].startswith("Weights were updated, but the cache was not flushed")
        assert named == "default"
        assert sampling_version(told.body) == "9"
        made = await worker.generate(text="One", sampling_params=SHORT)
        assert made["meta_info"]["weight_version"] == "9"
        await worker.ask("POST", "/abort_request", {"rid": "kept"})
