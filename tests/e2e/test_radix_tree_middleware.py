"""RadixTreeMiddleware on `/generate`: request shapes, the client's view unchanged, streams event by event; what is left
alone, and what must not be recorded."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
from collections import Counter
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
    data_of,
    event,
    events,
    exactly_recorded,
    simulated_trial,
    trial_before,
)
from tests.support.http import CutReply, request
from tests.support.metrics import metric
from tests.support.scripted_worker import CLOSE, RESET, chunk, chunked_head, head, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import until

LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


# Request shapes


async def test_lists_of_prompts_and_several_samples_are_answered_in_their_order(trial: Trial) -> None:
    texts = {"text": ["one", "and two"]}
    asked: list[tuple[dict[str, Any], list[int]]] = [
        ({**texts, "sampling_params": [SHORT, {**SHORT, "max_new_tokens": 2}]}, [6, 2]),
        ({"text": ["one"]}, [6]),
        ({**texts, "sampling_params": {**SHORT, "n": 3}}, [6] * 6),
        ({"input_ids": [[40, 41], [42]]}, [6, 6]),
    ]
    for fields, lengths in asked:
        with case(fields):
            answers = await trial.generate(**fields)
            assert [len(each["output_ids"]) for each in answers] == lengths
            for answer, given in zip(answers, trial.given(), strict=True):
                await exactly_recorded(trial, answer, given)
            if len(lengths) == 6:
                assert trial.given()[:3] == [trial.given()[0]] * 3
            elif lengths == [6, 2]:
                rid = answers[1]["meta_info"]["id"]
                assert (await trial.retrieve(text=f"and two{answers[1]['text']}"))["rid"] == rid
    assert trial.given() == [[40, 41], [42]]


@pytest.mark.parametrize("name", ["input_ids", "input_tokens"])
async def test_ids_of_the_client_are_given_as_they_are_and_recognised(trial: Trial, name: str) -> None:
    first = await trial.generate(text="one")
    sent = trial.given()[0] + first["output_ids"] + [40, 41]
    second = await trial.generate(**{name: sent})
    assert trial.given() == [sent]
    found = await trial.retrieve(rid=second["meta_info"]["id"])
    assert found["tokens"] == sent + second["output_ids"]
    assert found["loss_mask"] == [0] * len(trial.given()[0][:-8]) + [1] * 6 + [0, 0] + [1] * 6


# The client's view


EXTRAS: list[dict[str, Any]] = [
    {},
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True},
    {"return_logprob": True, "logprob_start_len": 0},
    {"stream": True},
    {"stream": True, "return_logprob": True},
]
SHAPES: list[dict[str, Any]] = [{"text": "one"}, {"text": ["one", "two"]}, {"text": "one", "n": 2}]


async def test_the_client_sees_what_the_worker_shows(trial: Trial) -> None:
    for extra, shape in itertools.product(EXTRAS, SHAPES):
        with case(extra, shape):
            params = {**SHORT, "n": shape.get("n", 1), "temperature": 0}
            body = {"text": shape["text"], "sampling_params": params, "rid": "r", **extra}
            through = await trial.post("/generate", body)
            async with SimulatedWorker(tokenizer=checkpoint()) as other:
                direct = await ask_worker(other.url, body)
            assert through.value("content-type") == direct.value("content-type")
            seen = events(through.body) if "stream" in extra else through.json()
            assert steady(seen) == steady(events(direct.body) if "stream" in extra else direct.json())
            if "return_logprob" not in extra:
                assert not any(name.encode() in through.body for name in LOGPROBS)


def steady(answer: Any) -> Any:
    """Without times, made-up ids, and the interleaving of a stream's answers."""
    if isinstance(answer, list):
        return sorted(
            (steady(each) for each in answer), key=lambda each: (each.get("index", 0), len(each["output_ids"]))
        )
    passing = ("e2e_latency", "response_sent_to_client_ts", "id", "cached_tokens", "cached_tokens_details")
    meta = {name: None if name in passing else value for name, value in answer["meta_info"].items()}
    return {**answer, "meta_info": meta}


async def test_a_stream_is_given_on_event_by_event(stage: Stage) -> None:
    gates = [asyncio.Event() for _ in range(2)]
    worker = await stage.worker()
    parts = [event([7], "a"), event([7, 8], "ab"), event([7, 8, 9], "abc", finish=True) + b"data: [DONE]\n\n"]
    begin = chunked_head(STREAM)
    steps = (begin, chunk(parts[0]), gates[0], chunk(parts[1]), gates[1], chunk(parts[2]), b"0\r\n\r\n")
    worker.always(script(*steps))
    trial = await trial_before(stage, worker)
    client = await stage.client(trial.router)
    body = json.dumps({"text": "one", "stream": True}).encode()
    await client.send(request("POST", "/generate", JSON, body))
    assert (await client.read_head("POST")).status == 200
    for part, gate in zip(parts, [*gates, None], strict=True):
        got = await client.read_part()
        while gate is None and not got.endswith(b"[DONE]\n\n"):
            got += await client.read_part()
        assert [each["text"] for each in map(json.loads, filter(None, data_of(got)))] == [
            json.loads(data_of(part)[0])["text"]
        ]
        if gate is not None:
            assert not trial.statistics()["recorded"]
            gate.set()
    assert (await trial.retrieve(rid="r1"))["tokens"][-3:] == [7, 8, 9]


# What is left alone


async def test_what_is_not_understood_passes_untouched_and_is_counted(stage: Stage) -> None:
    worker = await stage.worker()
    worker.always(script(reply(b'{"strange": "answer"}', 418)))
    trial = await trial_before(stage, worker)
    counted = Counter[str]()
    for body, reason in [
        ({"text": "x", "image_data": ["aGk="]}, "beyond_text"),
        ({"text": ["x", "y"], "image_data": [[], ["aGk="]]}, "beyond_text"),
        ({"input_embeds": [[0.5]]}, "beyond_text"),
        ({"text": "x", "input_ids": [1]}, "text_and_ids"),
        ({"sampling_params": {}}, "no_prompt"),
        ({"text": 7}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [[1], "x"]}, "input_ids"),
        ({"text": "x", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "x", "sampling_params": {"n": 0}}, "sampling_params"),
        ({"text": "x", "rid": ["one", "two"]}, "rid"),
        ({"text": "x", "sampling_params": {"n": 5000}}, "too_many"),
        ({"text": ["x", "y"], "return_logprob": [True]}, "return_logprob"),
        (["no", "object"], "no_object"),
    ]:
        with case(body, reason):
            raw = json.dumps(body, indent=3).encode()
            counted[reason] += 1
            answer = await trial.post("/generate", raw)
            assert (answer.status, answer.body) == (418, b'{"strange": "answer"}')
            assert worker.requests[-1].body == raw, "byte for byte"
            assert trial.statistics()["passed_through"] == counted
            assert (
                await metric(trial.router, "miles_router_radix_tree_passed_through_total", reason=reason)
                == counted[reason]
            )


NO_MEDIA: list[Any] = [[], "", [[]], [None], None, {}, [""], [[None]], False, " ", {"url": ""}, [{"url": None}]]


async def test_media_that_hold_nothing_are_no_media(trial: Trial) -> None:
    for field, empty in zip(itertools.cycle(["image_data", "video_data", "audio_data"]), NO_MEDIA, strict=False):
        with case(field, empty):
            answer = await trial.generate(text="Is it there", **{field: empty})
            await exactly_recorded(trial, answer, trial.given()[0])
            (one, other) = await trial.generate(text=["One", "Two"], **{field: [empty, empty]})
            given = trial.given()
            await exactly_recorded(trial, one, given[0])
            await exactly_recorded(trial, other, given[1])
            streamed = await trial.post("/generate", {"text": "On and on", "stream": True, field: empty})
            await exactly_recorded(trial, events(streamed.body)[-1], trial.given()[0])
            assert trial.statistics()["passed_through"] == {}


async def test_ids_that_no_engine_has_are_refused(trial: Trial) -> None:
    """An engine ends over them."""
    for ids in [[1, -1], [1 << 31], [1 << 40], [[1], [-1]]]:
        with case(ids):
            answer = await trial.post("/generate", {"input_ids": ids})
            assert (answer.status, answer.error_type) == (400, "invalid_request")
            assert answer.json()["error"]["message"].startswith("input_ids: tokens_are_ids")
            assert (trial.log, trial.statistics()["passed_through"]) == ([], {})


async def test_empty_prompts_are_refused_because_a_worker_ends_over_them(trial: Trial) -> None:
    for prompt in [{"text": ""}, {"text": ["a", ""]}, {"input_ids": []}, {"input_ids": [[1], []]}]:
        with case(prompt):
            assert (await trial.post("/generate", prompt)).status == 400
            assert not trial.log


# What must not be recorded


async def test_what_is_no_good_json_answer_passes_byte_for_byte(stage: Stage) -> None:
    worker = await stage.worker()
    odd = b'{ "output_ids" : [1.50],   "text": "\\u00e9", "meta_info": {"output_token_logprobs": [] } }'
    trial = await trial_before(stage, worker)
    for status, headers in [
        (400, [("Content-Type", "application/json")]),
        (500, [("Content-Type", "application/json")]),
        (200, [("Content-Type", "text/plain")]),
        (200, [("Content-Type", "application/json"), ("Content-Encoding", "br")]),
        (200, []),
    ]:
        with case(status, headers):
            worker.always(script(reply(odd, status, headers)))
            answer = await trial.post("/generate", {"text": "one"})
            assert (answer.status, answer.body) == (status, odd)
            assert [answer.value(name) for name, _ in headers] == [value.encode() for _, value in headers]
            assert trial.statistics()["entries"] == 0


def answer_of(**changed: Any) -> dict[str, Any]:
    """Two tokens; what is named in `changed` is otherwise in its `meta_info`, or where it stands besides."""
    meta = {
        "id": "r",
        "completion_tokens": 2,
        "finish_reason": {"type": "stop", "matched": 8},
        "output_token_logprobs": [[-1.0, 7, None], [-0.5, 8, None]],
        "weight_version": "2",
        **{name: value for name, value in changed.items() if name not in ("text", "output_ids", "index")},
    }
    besides = {name: value for name, value in changed.items() if name not in meta}
    return {"text": "ab", "output_ids": [7, 8], **besides, "meta_info": meta}


def written(answer: dict[str, Any]) -> bytes:
    """It as an event."""
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def of_ids(ids: list[Any]) -> list[list[Any]]:
    """Their logprobs."""
    return [[-1.0, each, None] for each in ids]


NO_IDS: list[list[Any]] = [[7, -1], [7, 1.5], [7, 1 << 40], [7, "8"], [7, None]]
GAP = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 2}]
BEGINS_LATE, ENDS_EARLY, ENDS_LATE = ([{"version": "1", "start": a, "end": b}] for a, b in ((1, 2), (0, 1), (0, 3)))


async def test_answers_that_make_no_sense_pass_and_are_counted_and_logged_and_not_recorded(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await stage.worker()
    trial, counted = await trial_before(stage, worker), Counter[str]()
    for (answer, reason), stream in itertools.product(
        [
            ("no object", "incomplete"),
            ([1, 2], "answer_count"),
            ({}, "incomplete"),
            ([7], "incomplete"),
            (b"not json", "not_json"),
            ({"text": "a", "output_ids": [1], "meta_info": None}, "incomplete"),
            ([answer_of(), {}, {}], "answer_count"),
            ([answer_of(), answer_of()], "answer_count"),
            (answer_of(text=7), "incomplete"),
            (answer_of(completion_tokens=3), "token_counts_disagree"),
            (answer_of(output_ids=[7]), "token_counts_disagree"),
            (answer_of(output_token_logprobs=[[-1.0, 7, None]]), "token_counts_disagree"),
            (answer_of(output_token_logprobs=[[-1.0, 7], [-1.0, 9]]), "logprobs_of_other_tokens"),
            (answer_of(output_token_logprobs=[[7.0, 7], [-1.0, 8]]), "invalid_tokens"),
            *((answer_of(output_ids=ids, output_token_logprobs=of_ids(ids)), "invalid_tokens") for ids in NO_IDS),
            *((answer_of(weight_versions=spans), "versions_leave_gaps") for spans in (GAP, BEGINS_LATE)),
            *((answer_of(weight_versions=spans), "versions_end_elsewhere") for spans in (ENDS_EARLY, ENDS_LATE)),
        ],
        [False, True],
    ):
        with case(answer, reason, stream):
            raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            if stream:
                sent = b"data: " + raw + b"\n\ndata: [DONE]\n\n"
                worker.always(script(chunked_head(STREAM), chunk(sent), b"0\r\n\r\n"))
            else:
                sent = raw
                worker.always(script(reply(raw, headers=JSON)))
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                got = await trial.post("/generate", {"text": "one", "stream": stream, "return_logprob": True})
            assert (got.status, got.body) == (200, sent)
            expected = "incomplete" if stream and reason == "answer_count" else reason
            counted[expected] += 2
            fields = [record.__dict__["fields"] for record in caplog.records if record.message == "answer_not_recorded"]
            assert [(each["reason"], each["worker"]) for each in fields] == [(expected, worker.url)]
            got = await trial.post("/generate", {"text": "one", "stream": stream})
            assert got.status == 200
            assert b'"output_token_logprobs"' not in got.body or reason == "answer_count"
            statistics = trial.statistics()
            assert statistics["recorded"] == statistics["entries"] == 0
            assert statistics["passed_through"] == counted


async def test_events_of_answers_that_nobody_asked_for_pass_and_are_counted_once(stage: Stage) -> None:
    worker = await stage.worker()
    odd = b"".join(written({**answer_of(), "index": index}) for index in (1, -1, "0", [0], 0.0))
    sent = odd + event([7], "a", finish=True) + b"data: [DONE]\n\n"
    worker.always(script(chunked_head(STREAM), chunk(sent), b"0\r\n\r\n"))
    trial = await trial_before(stage, worker)
    got = await trial.post("/generate", {"text": "one", "stream": True, "return_logprob": True})
    assert got.body == sent
    assert trial.statistics()["passed_through"] == {"answer_count": 1}
    assert (await trial.retrieve(rid="r1"))["tokens"][-1:] == [7]


@pytest.mark.parametrize("stream", [False, True])
async def test_compressed_answer_passes_unread_counted_and_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    worker = await stage.worker()
    sent = gzip.compress(event([7], "a", finish=True) if stream else json.dumps(answer_of()).encode())
    encoded = [*(STREAM if stream else JSON), ("Content-Encoding", "gzip")]
    worker.always(script(reply(sent, headers=encoded)))
    trial = await trial_before(stage, worker)
    asking = [*JSON, ("Accept-Encoding", "gzip, br")]
    with caplog.at_level(logging.WARNING):
        got = await trial.post("/generate", {"text": "one", "stream": stream}, asking)
    assert b"accept-encoding" not in {name.lower() for name, _ in worker.requests[-1].headers}
    assert (got.status, got.body, got.value("content-encoding")) == (200, sent, b"gzip")
    assert trial.router.app.router.metrics.unread_replies == {("radix_tree", "content_encoding"): 1}
    assert trial.statistics()["entries"] == 0
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "reply_unread"]
    assert fields == [{"layer": "radix_tree", "reason": "content_encoding"}]


async def test_a_stream_that_ends_without_its_answers_is_counted_for_each_of_them(stage: Stage) -> None:
    worker = await stage.worker()
    parts = [{**answer_of(finish_reason=None), "index": 0}, {**answer_of(id="whole"), "index": 1}]
    sent = b"".join(map(written, parts)) + b"data: [DONE]\n\n"
    worker.always(script(chunked_head(STREAM), chunk(sent), b"0\r\n\r\n"))
    trial = await trial_before(stage, worker)
    with pytest.raises(CutReply):
        await trial.post("/generate", {"text": "one", "stream": True, "sampling_params": {"n": 3}})
    assert trial.statistics()["passed_through"] == {"incomplete": 2}
    assert (await trial.retrieve(rid="whole"))["tokens"][-2:] == [7, 8]


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
