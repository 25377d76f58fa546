"""`/pause_generation` and `/continue_generation`: what stands still, what comes back, what still answers."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.tasks import cancelled, spawn
from tests.contract.client import WorkerClient, covers, unfinished
from tests.support.waiting import soon

SHORT = {"max_new_tokens": 4, "ignore_eos": True}
MODES = ["abort", "in_place", "retract"]
A_WHILE = 0.4  # seconds, in which either worker answers a short request many times over


@pytest.mark.parametrize("mode", MODES)
async def test_both_say_what_they_did_and_may_be_repeated(worker: WorkerClient, mode: str) -> None:
    for _ in range(2):
        paused = await worker.post("/pause_generation", mode=mode)
        assert paused == {"message": "Generation paused successfully.", "status": "ok"}
    for _ in range(2):
        continued = await worker.post("/continue_generation")
        assert continued == {"message": "Generation continued successfully.", "status": "ok"}
    assert len((await worker.generate(text="One", sampling_params=SHORT))["output_ids"]) == 4


async def test_an_unknown_mode_is_refused_and_pauses_nothing(worker: WorkerClient) -> None:
    refused = await worker.ask("POST", "/pause_generation", {"mode": "gently"})
    assert refused.status == 400
    assert refused.json["code"] == 400
    assert (await worker.ask("GET", "/ready")).status == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
async def test_a_body_is_required(worker: WorkerClient, path: str) -> None:
    refused = await worker.ask("POST", path)
    assert refused.status == 400
    assert refused.json["type"] == "Bad Request"


@pytest.mark.parametrize("body", [{"mode": "abort"}, {}], ids=["abort", "default"])
async def test_abort_returns_what_was_sampled(worker: WorkerClient, body: dict[str, Any]) -> None:
    async with worker.in_flight("cut") as request:
        await worker.post("/pause_generation", **body)
        answer = await soon(request)
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(ids) < 4000
    assert meta["completion_tokens"] == len(ids)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
    assert covers(meta["weight_versions"], len(ids))


async def test_abort_ends_a_stream_as_usual(worker: WorkerClient) -> None:
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    async with worker.stream("/generate", text="One", sampling_params=sampling) as stream:
        await stream.next()
        async with worker.paused("abort"):
            *_, last = await stream.rest()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"])


@pytest.mark.parametrize(("mode", "retractions"), [("in_place", 0), ("retract", 1)])
async def test_the_other_modes_keep_the_request_and_its_tokens(
    worker: WorkerClient, mode: str, retractions: int
) -> None:
    # It ends by itself: an abort that finds it in the queue would tell no retractions.
    asked = {"text": "One", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "return_logprob": True}
    async with worker.stream("/generate", **asked) as stream:
        before = await stream.next()
        async with worker.paused(mode):
            assert sum(await worker.load()) == 1
        *_, last = await stream.rest()
    assert len(last["output_ids"]) == 400
    assert last["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert [token for _, token, _ in last["meta_info"]["output_token_logprobs"]] == last["output_ids"]
    assert last["meta_info"]["num_retractions"] == retractions


@pytest.mark.parametrize("mode", MODES)
async def test_a_new_request_waits_for_continue(worker: WorkerClient, mode: str) -> None:
    async with worker.paused(mode):
        request = spawn(worker.generate(text="One", sampling_params=SHORT), name="waiting")
        assert await unfinished(request, A_WHILE)
        await worker.set_version("after")
    answer = await soon(request)
    assert len(answer["output_ids"]) == 4
    assert answer["meta_info"]["weight_version"] == "after"
    assert answer["meta_info"]["weight_versions"] == [{"version": "after", "start": 0, "end": 4}]


@pytest.mark.parametrize("mode", MODES)
async def test_information_is_given_while_paused(worker: WorkerClient, mode: str) -> None:
    async with worker.paused(mode):
        assert (await worker.get("/model_info"))["weight_version"] == "default"
        assert (await worker.get("/v1/models"))["object"] == "list"
        assert (await worker.get("/server_info"))["version"], "which the scheduler answers"
        assert await worker.load() == (0, 0)


@pytest.mark.parametrize("mode", MODES)
async def test_ready_says_503_while_paused(worker: WorkerClient, mode: str) -> None:
    async with worker.paused(mode):
        assert (await worker.ask("GET", "/ready")).status == 503
        assert (await worker.ask("GET", "/ping")).status == 200
    assert (await worker.ask("GET", "/ready")).status == 200


async def test_health_is_silent_while_paused(worker: WorkerClient) -> None:
    async with worker.paused("abort"):
        probe = spawn(worker.ask("GET", "/health"), name="probe")
        assert await unfinished(probe, 2.5)  # it would have said 200 after 1 s
        await cancelled(probe)


@pytest.mark.parametrize(("mode", "status"), [("in_place", 400), ("retract", 200)])
async def test_the_cache_is_flushed_only_if_no_paused_request_holds_it(
    worker: WorkerClient, mode: str, status: int
) -> None:
    async with worker.in_flight("kept"), worker.paused(mode):
        assert (await worker.ask("POST", "/flush_cache")).status == status


async def test_a_request_kept_in_place_that_is_aborted_comes_back_after_continue(worker: WorkerClient) -> None:
    async with worker.in_flight("kept") as request:
        async with worker.paused("in_place"):
            await worker.ask("POST", "/abort_request", {"rid": "kept"})
            assert await unfinished(request, A_WHILE)
        answer = await soon(request)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"]


async def test_aborted_retracted_request_returns_at_once_without_its_newest_tokens(
    worker: WorkerClient,
) -> None:
    # SGLang's scheduler hands a whole answer's tokens over 50 at a time (SGLANG_FORCE_STREAM_INTERVAL), and the
    # abort of what waits answers with those alone.
    async with worker.in_flight("kept") as request, worker.paused("retract"):
        await worker.ask("POST", "/abort_request", {"rid": "kept"})
        answer = await soon(request)
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    ids = answer["output_ids"]
    assert len(ids) % 50 == 0
    assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == ids


async def test_a_retracted_stream_that_is_aborted_keeps_its_tokens(worker: WorkerClient) -> None:
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    async with worker.stream("/generate", text="One", sampling_params=sampling, rid="kept") as stream:
        before = await stream.next()
        async with worker.paused("retract"):
            await worker.ask("POST", "/abort_request", {"rid": "kept"})
            *_, last = await stream.rest()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"][: len(before["output_ids"])] == before["output_ids"]


@pytest.mark.parametrize("which", [{"rid": "late"}, {"abort_all": True}], ids=["rid", "all"])
async def test_a_request_that_came_during_the_pause_is_not_aborted(worker: WorkerClient, which: dict[str, Any]) -> None:
    async with worker.paused("in_place"):
        request = spawn(worker.generate(text="One", sampling_params=SHORT, rid="late"), name="late")
        assert await unfinished(request, A_WHILE / 2)
        await worker.ask("POST", "/abort_request", which)
    answer = await soon(request)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
