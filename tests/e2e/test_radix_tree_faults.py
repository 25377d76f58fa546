"""RadixTreeMiddleware and what goes wrong: requests it leaves alone, answers that must not be recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import (
    JSON,
    SHORT,
    STREAM,
    Trial,
    ask_worker,
    checkpoint,
    event,
    simulated_trial,
    trial_before,
)
from tests.support.http import CutReply, request
from tests.support.scripted_worker import CLOSE, RESET, chunk, chunked_head, head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


# What is left alone


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text": "x", "image_data": ["aGk="]}, "beyond_text"),
        ({"input_embeds": [[0.5]]}, "beyond_text"),
        ({"text": "x", "input_ids": [1]}, "text_and_ids"),
        ({"sampling_params": {}}, "no_prompt"),
        ({"text": 7}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [[1], "x"]}, "input_ids"),
        ({"text": "x", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "x", "sampling_params": {"n": 0}}, "sampling_params"),
        ({"text": ["x", "y"], "return_logprob": [True]}, "return_logprob"),
        (["no", "object"], "no_object"),
    ],
)
async def test_what_is_not_understood_passes_untouched_and_is_counted(stage: Stage, body: Any, reason: str) -> None:
    worker = await stage.worker()
    worker.always(script(reply(b'{"strange": "answer"}', 418)))
    trial = await trial_before(stage, worker)
    raw = json.dumps(body, indent=3).encode()
    answer = await trial.post("/generate", raw)
    assert (answer.status, answer.body) == (418, b'{"strange": "answer"}')
    assert worker.requests[-1].body == raw, "byte for byte"
    assert trial.statistics()["passed_through"] == {reason: 1}
    metrics = (await trial.router.ask("GET", "/metrics")).body.decode()
    assert f'miles_router_radix_tree_passed_through_total{{reason="{reason}"}} 1.0' in metrics


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"text": "a"', b'{"text": "\\ud800"}'])
async def test_malformed_bodies_are_refused(trial: Trial, body: bytes) -> None:
    answer = await trial.post("/generate", body)
    assert (answer.status, answer.error_type) == (400, "invalid_request")


@pytest.mark.parametrize("prompt", [{"text": ""}, {"text": ["a", ""]}, {"input_ids": []}, {"input_ids": [[1], []]}])
async def test_empty_prompts_are_refused_because_a_worker_ends_over_them(trial: Trial, prompt: dict[str, Any]) -> None:
    assert (await trial.post("/generate", prompt)).status == 400
    assert not trial.door


async def test_other_paths_and_methods_are_untouched(stage: Stage) -> None:
    worker = await stage.worker()
    trial = await trial_before(stage, worker)
    for method, path in (("POST", "/v1/completions"), ("POST", "/generate/x"), ("GET", "/generate"), ("POST", "/x")):
        raw = b'{"text": "one",   "n": 1}'
        await trial.router.ask(method, path, JSON, raw)
        assert (worker.requests[-1].method, worker.requests[-1].path, worker.requests[-1].body) == (method, path, raw)
    assert trial.statistics()["lookups"] == 0


# What must not be recorded


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_worker_pass_and_leave_nothing(trial: Trial, stream: bool) -> None:
    for params in ({"temperature": -1}, {"bogus": 1}):
        body = {"text": "one", "sampling_params": params, "stream": stream}
        answer = await trial.post("/generate", body)
        assert trial.worker is not None
        assert answer.body == (await ask_worker(trial.worker.url, body)).body
    assert trial.statistics()["recorded"] == 0


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, [("Content-Type", "application/json")]),
        (500, [("Content-Type", "application/json")]),
        (200, [("Content-Type", "text/plain")]),
        (200, [("Content-Type", "application/json"), ("Content-Encoding", "identity")]),
        (200, []),
    ],
)
async def test_what_is_no_good_json_answer_passes_byte_for_byte(
    stage: Stage, status: int, headers: list[tuple[str, str]]
) -> None:
    worker = await stage.worker()
    odd = b'{ "output_ids" : [1.50],   "text": "\\u00e9", "meta_info": {"output_token_logprobs": [] } }'
    worker.always(script(reply(odd, status, headers)))
    trial = await trial_before(stage, worker)
    answer = await trial.post("/generate", {"text": "one"})
    assert (answer.status, answer.body) == (status, odd)
    assert [answer.value(name) for name, _ in headers] == [value.encode() for _, value in headers]
    assert trial.statistics()["entries"] == 0


@pytest.mark.parametrize(
    "answer",
    [
        b'"no object"',
        b"[1, 2]",
        b"{}",
        b"7",
        b"[7]",
        b"not json",
        b'{"text": "a", "output_ids": [1], "index": 1, "meta_info": {}}',
        b'{"text": "a", "output_ids": [1]}',
        b'{"text": "a", "output_ids": [1], "meta_info": null}',
        b'[{"text": "a", "output_ids": [1], "meta_info": {}}, {}, {}]',
        b'{"text": "a", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": {"type": "stop"}, '
        b'"output_token_logprobs": [[-1.0, 2, null]]}}',
        b'{"text": "a", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": {"type": "stop"}, '
        b'"output_token_logprobs": [[7.0, 1, null]]}}',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_make_no_sense_pass_and_leave_nothing(stage: Stage, answer: bytes, stream: bool) -> None:
    worker = await stage.worker()
    if stream:
        sent = b"data: " + answer + b"\n\ndata: [DONE]\n\n"
        begin = chunked_head(STREAM)
        worker.always(script(begin, chunk(sent), b"0\r\n\r\n"))
    else:
        worker.always(script(reply(answer, headers=JSON)))
    trial = await trial_before(stage, worker)
    got = await trial.post("/generate", {"text": "one", "stream": stream, "return_logprob": True})
    assert (got.status, got.body) == (200, sent if stream else answer)
    got = await trial.post("/generate", {"text": "one", "stream": stream})
    assert got.status == 200
    assert trial.statistics()["recorded"] == trial.statistics()["entries"] == 0


@pytest.mark.parametrize("end", [CLOSE, RESET])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_dies_mid_generation_leaves_no_entry(stage: Stage, end: Any, stream: bool) -> None:
    worker = await stage.worker()
    if stream:
        worker.always(script(chunked_head(STREAM), chunk(event([7], "a")), end))
    else:
        length = head(200, [("Content-Type", "application/json"), ("Content-Length", "500")])
        worker.always(script(length + b'{"text": "a", "output_ids": [7]', end))
    trial = await trial_before(stage, worker)
    try:
        answer = await trial.post("/generate", {"text": "one", "stream": stream})
    except CutReply:
        pass
    else:
        assert answer.status == 502
    assert trial.statistics()["entries"] == 0
    assert (await trial.post("/retrieve_from_text", {"rid": "r1"})).status == 404


async def test_a_client_that_leaves_mid_stream_leaves_no_finished_entry(stage: Stage) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), token_latency_s=0.02) as worker:
        trial = await trial_before(stage, worker)
        client = await stage.client(trial.router)
        body = {"text": "one", "stream": True, "rid": "left", "sampling_params": {**SHORT, "max_new_tokens": 5000}}
        await client.send(request("POST", "/generate", JSON, json.dumps(body).encode()))
        await client.read_head("POST")
        await client.read_part()
        client.abort()
        await until(lambda: worker.running == 0, "the worker is freed")
        assert trial.statistics()["entries"] == 0
        assert (await trial.post("/retrieve_from_text", {"rid": "left"})).status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_generation_is_recorded_as_partial(stage: Stage, stream: bool) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), token_latency_s=0.005) as worker:
        trial = await trial_before(stage, worker)
        params = {**SHORT, "max_new_tokens": 5000}
        body = {"text": "one", "rid": "a", "sampling_params": params, "stream": stream}
        asking = asyncio.ensure_future(trial.post("/generate", body))
        await until(lambda: worker.running == 1, "it generates")
        await trial.router.ask("POST", "/abort_request", JSON, b'{"rid": "a"}')
        await asking
        found = await trial.retrieve(rid="a")
        assert (found["finished"], found["finish_reason"]) == (False, "abort")
        assert found["tokens"] == trial.given()[0] + trial.door[-1].generation.output_ids
        assert trial.statistics()["partial"] == 1
