"""RadixTreeMiddleware on `/generate`: every request shape, the client's view unchanged, streams event by event."""

from __future__ import annotations

import asyncio
import itertools
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
    data_of,
    event,
    events,
    exactly_recorded,
    simulated_trial,
    trial_before,
)
from tests.support.http import request
from tests.support.scripted_worker import chunk, chunked_head, script
from tests.support.session_apis import case
from tests.support.stage import Stage

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


async def test_versions_that_only_a_stream_s_events_named_are_recorded(stage: Stage) -> None:
    def at(ids: list[int], version: str, finish: dict[str, Any] | None = None) -> bytes:
        meta = {"id": "r1", "completion_tokens": len(ids), "weight_version": version, "finish_reason": finish}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        return b"data: " + json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    worker = await stage.worker()
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    whole = at([7], "1") + at([7, 8], "1") + at([7, 8, 9], "2") + at([7, 8, 9], "3", abort)
    worker.always(script(chunked_head(STREAM), chunk(whole + b"data: [DONE]\n\n"), b"0\r\n\r\n"))
    trial = await trial_before(stage, worker)
    await trial.post("/generate", {"text": "one", "stream": True})
    found = await trial.retrieve(rid="r1")
    begin = found["token_length"] - 3
    expected = [
        {"version": "1", "start": begin, "end": begin + 2},
        {"version": "2", "start": begin + 2, "end": begin + 3},
    ]
    assert found["weight_versions"] == expected
