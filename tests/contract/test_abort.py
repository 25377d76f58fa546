"""`/abort_request`, clients that leave, and `/flush_cache`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from miles_router.tasks import cancelled, spawn
from tests.contract.client import ENDLESS, FLUSH, WorkerClient, covers, unfinished
from tests.support.waiting import soon

AFTER_A_STREAM = 2  # seconds
A_WHILE = 0.3  # seconds, in which either worker would long have aborted
FLUSHED = b"Cache flushed.\n"


@pytest.mark.parametrize("which", [{"rid": "cut"}, {"abort_all": True}], ids=["rid", "all"])
async def test_an_aborted_request_returns_what_was_sampled(worker: WorkerClient, which: dict[str, Any]) -> None:
    async with worker.in_flight("cut") as request:
        done = await worker.ask("POST", "/abort_request", which)
        answer = await soon(request)
    assert (done.status, done.body) == (200, b"")
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["message"]
    assert meta["completion_tokens"] == len(answer["output_ids"]) < 4000
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert covers(meta["weight_versions"], len(answer["output_ids"]))


async def test_an_aborted_stream_ends_with_an_event_and_done(worker: WorkerClient) -> None:
    async with worker.stream("/generate", text="One", sampling_params=ENDLESS, rid="cut") as stream:
        await stream.next()
        await worker.ask("POST", "/abort_request", {"rid": "cut"})
        *_, last = await stream.rest()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert covers(last["meta_info"]["weight_versions"], len(last["output_ids"]))


@pytest.mark.parametrize("body", [{"rid": "nobody"}, {"rid": ""}, {}], ids=["unknown", "empty", "none"])
async def test_what_names_no_request_aborts_none(worker: WorkerClient, body: dict[str, Any]) -> None:
    async with worker.in_flight("spared") as request:
        done = await worker.ask("POST", "/abort_request", body)
        assert (done.status, done.body) == (200, b"")
        assert await unfinished(request, A_WHILE)


async def test_a_rid_aborts_all_rids_that_begin_with_it(worker: WorkerClient) -> None:
    async with worker.in_flight("r1") as request, worker.in_flight("r10") as longer, worker.in_flight("r2") as other:
        await worker.ask("POST", "/abort_request", {"rid": "r1"})
        for aborted in (request, longer):
            assert (await soon(aborted))["meta_info"]["finish_reason"]["type"] == "abort"
        assert await unfinished(other, A_WHILE)


async def test_a_mere_beginning_of_a_rid_aborts_nothing(worker: WorkerClient) -> None:
    async with worker.in_flight("r10") as request:
        await worker.ask("POST", "/abort_request", {"rid": "r1"})
        assert await unfinished(request, A_WHILE)


async def test_the_rid_of_a_list_does_not_reach_its_prompts(worker: WorkerClient) -> None:
    prompts = {"text": ["One", "Two"], "sampling_params": ENDLESS, "rid": "group"}
    request = spawn(worker.generate(**prompts), name="group")
    await worker.until_running(2)
    await worker.ask("POST", "/abort_request", {"rid": "group"})
    assert await unfinished(request, A_WHILE)
    for number in range(2):
        await worker.ask("POST", "/abort_request", {"rid": f"group_{number}"})
    answers = await soon(request)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_aborts_all_that_begin_alike(worker: WorkerClient, stream: bool) -> None:
    async with worker.in_flight("r10") as longer, worker.in_flight("r2") as other:
        if stream:
            async with worker.stream("/generate", text="One", sampling_params=ENDLESS, rid="r1") as left:
                await left.next()
                left.response.close()
        else:
            leaving = spawn(worker.generate(text="One", sampling_params=ENDLESS, rid="r1"), name="leaving")
            await worker.until_running(3)
            await cancelled(leaving)
        assert (await soon(longer))["meta_info"]["finish_reason"]["type"] == "abort"
        assert await unfinished(other, A_WHILE)


async def test_2_s_after_a_stream_has_ended_what_has_its_rid_is_aborted(worker: WorkerClient) -> None:
    while True:
        began = time.monotonic()
        await worker.generate(text="One", sampling_params={"max_new_tokens": 2}, rid="plain")
        await worker.events("/generate", text="One", sampling_params={"max_new_tokens": 2}, rid="streamed")
        async with worker.in_flight("plain") as plain, worker.in_flight("streamed") as streamed:
            if time.monotonic() - began > AFTER_A_STREAM:
                continue  # it may have come too late
            assert (await soon(streamed))["meta_info"]["finish_reason"]["type"] == "abort"
            assert time.monotonic() - began > AFTER_A_STREAM
            assert await unfinished(plain, A_WHILE), "an answer in one piece leaves nothing behind"
            return


async def test_a_rid_in_flight_is_refused(worker: WorkerClient) -> None:
    async with worker.in_flight("twin") as request:
        refused = await worker.ask("POST", "/generate", {"text": "One", "rid": "twin", "sampling_params": {}})
        assert (refused.status, refused.json) == (400, {"error": {"message": "Duplicate request ID detected: twin"}})
        assert not request.done()


async def test_a_stream_s_client_that_leaves_frees_the_worker(worker: WorkerClient) -> None:
    async with worker.stream("/generate", text="One", sampling_params=ENDLESS) as stream:
        await stream.next()
        await worker.until_running(1)
        stream.response.close()
    await worker.until_running(0)


async def test_a_plain_request_s_client_that_leaves_frees_the_worker(worker: WorkerClient) -> None:
    request = spawn(worker.generate(text="One", sampling_params=ENDLESS), name="leaving")
    await worker.until_running(1)
    await cancelled(request)
    await worker.until_running(0)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flushing_the_cache_answers_in_text(worker: WorkerClient, method: str) -> None:
    flushed = await worker.ask(method, FLUSH)
    assert flushed.status == 200
    assert flushed.body.startswith(FLUSHED)
    assert "content-type" not in flushed.headers


async def test_the_cache_is_not_flushed_under_a_running_request(worker: WorkerClient) -> None:
    async with worker.in_flight("running"):
        refused = await worker.ask("POST", "/flush_cache")
    assert refused.status == 400
    assert not refused.body.startswith(FLUSHED)
