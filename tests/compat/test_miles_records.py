"""Samples that miles builds of records by itself (radixark/miles, `compute_samples_from_openai_records` of 474d542e and
of 04d08e7b): token for token what the router's own samples are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion

from miles_router.client import RouterClient
from tests.compat.miles_client import GetSessionResponse, SessionRecord
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    SessionTrial,
    message_of,
    simulated_sessions,
    tool_result,
    user,
)
from tests.support.stage import Stage

HI = [{"role": "system", "content": "Be brief."}, user("What is 17 plus 25?")]


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, token_latency_s=0.0) as made:
        yield made


class Sample:
    """Its sample of one turn, or of several."""

    def __init__(self, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens, self.logprobs, self.mask = tokens, logprobs, [1] * len(logprobs)

    def strip(self, count: int) -> None:
        """Take tokens off the end."""
        end = len(self.logprobs) - count
        assert end >= 0
        self.tokens = self.tokens[: len(self.tokens) - count]
        self.logprobs, self.mask = self.logprobs[:end], self.mask[:end]

    def extended(self, other: Sample) -> Sample:
        """Both in one, with what was said between them out of the loss."""
        assert other.tokens[: len(self.tokens)] == self.tokens
        said = len(other.tokens) - len(self.tokens) - len(other.logprobs)
        assert said >= 0
        merged = Sample(other.tokens, [*self.logprobs, *[0.0] * said, *other.logprobs])
        merged.mask = [*self.mask, *[0] * said, *other.mask]
        return merged


def first_version(record: SessionRecord) -> Sample:
    """As of 474d542e."""
    choice = record.response["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls", "length", "abort")
    content = choice["logprobs"]["content"]
    ids, logprobs = [item["token_id"] for item in content], [item["logprob"] for item in content]
    return Sample(record.request["input_ids"] + ids, logprobs)


def collected(told: GetSessionResponse) -> list[Sample]:
    """As of 04d08e7b."""
    samples, cursor = [], 0
    accumulated, allowed = told.metadata.get("accumulated_token_ids"), told.metadata.get("max_trim_tokens", 0)
    for number, record in enumerate(told.records):
        last = number == len(told.records) - 1
        prompt, triples = record.request["input_ids"], _triples(record)
        sample, trim = Sample(prompt + [each[1] for each in triples], [each[0] for each in triples]), 0
        if accumulated is not None:
            cursor, matched = len(prompt), 0
            for ours, theirs in zip((each[1] for each in triples), accumulated[cursor:], strict=False):
                if ours != theirs:
                    break
                matched += 1
            trim = len(triples) - matched
            assert trim <= (0 if last else allowed)
            cursor += matched
        sample.strip(trim)
        samples.append(sample)
    if accumulated is not None:
        assert cursor == len(accumulated)
    return samples


def _triples(record: SessionRecord) -> list[Any]:
    meta = record.response["choices"][0]["meta_info"]
    assert meta.get("prompt_tokens", 0) >= meta.get("cached_tokens", 0)
    assert meta["weight_version"] == "1"
    assert record.timestamp - meta["e2e_latency"] <= record.timestamp
    assert record.request["messages"] + [record.response["choices"][0]["message"]]
    return list(meta["output_token_logprobs"])


async def told(trial: SessionTrial, session: str) -> GetSessionResponse:
    answer = await trial.ask("GET", f"/sessions/{session}")
    assert answer.status == 200, answer.body
    return GetSessionResponse.model_validate(answer.json())


async def one_line(trial: SessionTrial, session: str) -> GetSessionResponse:
    """The records of a session that is one line; they give the router's own sample."""
    read = await told(trial, session)
    (own,) = await trial.samples(session)
    samples = collected(read)
    merged = samples[0]
    for sample in samples[1:]:
        merged = merged.extended(sample)
    start = len(own["tokens"]) - own["response_length"]
    assert merged.tokens == own["tokens"]
    assert merged.mask == own["loss_mask"][start:]
    assert np.array_equal(np.array(merged.logprobs, np.float32), np.array(own["logprobs"][start:], np.float32))
    return read


def as_sampled(read: GetSessionResponse, trial: SessionTrial) -> None:
    """Each record is one generation of the worker's proxy, in both of miles' versions."""
    went = [generation for exchange in trial.worker.log for generation in exchange.generations]
    for record, generation in zip(read.records, went, strict=True):
        choice = record.response["choices"][0]
        assert choice["prompt_token_ids"] == record.request["input_ids"] == generation.input_ids
        assert [each[1] for each in choice["meta_info"]["output_token_logprobs"]] == generation.output_ids
        early = first_version(record)
        assert early.tokens == generation.input_ids + generation.output_ids
        assert np.array_equal(np.array(early.logprobs, np.float32), np.array(generation.logprobs, np.float32))
        assert ChatCompletion.model_validate({"model": "m", **record.response}).choices[0].logprobs is not None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_turns_with_tools_give_the_routers_own_sample(trial: SessionTrial, stream: bool) -> None:
    session, history = await trial.create(), [*HI]
    for text in ("Go on", "And?", "More"):
        if text == "And?":
            trial.worker.say(ASK_ADD)
        if stream:
            await trial.stream(session, history, tools=[ADD], max_tokens=200)
        else:
            await trial.chat(session, history, tools=[ADD], max_tokens=200)
        answer = (await told(trial, session)).records[-1].response["choices"][0]["message"]
        results = [tool_result(call, "42") for call in answer.get("tool_calls") or ()]
        history = [*history, answer, *(results or [user(text)])]
    read = await one_line(trial, session)
    as_sampled(read, trial)
    assert [record.request["tools"] for record in read.records] == [[ADD]] * 3
    assert read.records[-1].request["messages"] == history[: len(read.records[-1].request["messages"])]
    assert read.records[-1].request["messages"][-1]["role"] == "tool"
    assert read.records[1].response["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_compact_form_is_asked_for(trial: SessionTrial) -> None:
    session = await trial.create()
    first = message_of(await trial.chat(session, HI))
    await trial.chat(session, [*HI, first, user("Go on")])
    async with RouterClient(trial.router.url) as client:
        whole = (await client.session(session).records())["records"]
        compact = (await client.session(session).records(compact=True))["records"]
    for one, other in zip(whole, compact, strict=True):
        assert other["response"] == one["response"]["choices"][0]["message"]
        assert other["request"] == {"messages_before": one["request"]["messages_before"]}
        assert {**one, "request": 0, "response": 0} == {**other, "request": 0, "response": 0}
    assert (await trial.ask("GET", f"/sessions/{session}?form=full")).json()["records"] == whole
    refused = await trial.ask("GET", f"/sessions/{session}?form=short")
    assert (refused.status, b"full, compact" in refused.body) == (400, True)
