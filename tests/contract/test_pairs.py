"""The two halves of a prefill/decode pair, each asked by itself: what a router has to know of both."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from miles_router.tasks import cancelled, spawn
from tests.contract.client import Answer, WorkerClient, covers, unfinished
from tests.contract.conftest import MOE, ClientsOfAPair
from tests.support.events import events_of

PROMPT = [101, 102, 103, 104, 105]
SAMPLING = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
HELD = 1.0  # seconds that a step of the prefill half takes where it must not be over yet
_rids = map("pair-{}".format, itertools.count())


async def ask(pair: ClientsOfAPair, path: str = "/generate", **body: Any) -> tuple[Answer, Answer]:
    """Both halves at once, in one room."""
    met = in_a_room(pair, **body)
    return await asyncio.gather(pair.prefill.ask("POST", path, met), pair.decode.ask("POST", path, met))


def in_a_room(pair: ClientsOfAPair, **body: Any) -> dict[str, Any]:
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": random.getrandbits(60)}
    return {"input_ids": PROMPT, "sampling_params": SAMPLING, **room, **body}


async def answers(pair: ClientsOfAPair, **body: Any) -> tuple[Any, Any]:
    """Two good answers; of streams, their last events."""
    both = await ask(pair, **body)
    for each in both:
        assert each.status == 200, each.body
    if body.get("stream"):
        return tuple(events_of(each.body)[-1] for each in both)
    return both[0].json, both[1].json


def rows_of(answer: Any) -> Any:
    return np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32).reshape(-1, MOE.layers * 2)


@asynccontextmanager
async def computing(pair: ClientsOfAPair, **body: Any) -> AsyncIterator[tuple[str, list[asyncio.Task[Answer]]]]:
    """Both halves asked for a prompt that takes long, and the name of it."""
    rid = next(_rids)
    await pair.prefill.ask("POST", "/slow_down", {"forward_sleep_time": HELD})
    met = in_a_room(pair, rid=rid, **body)
    asked = [spawn(each.ask("POST", "/generate", met), name=rid) for each in (pair.prefill, pair.decode)]
    try:
        yield rid, asked
    finally:
        await pair.prefill.ask("POST", "/slow_down", {"forward_sleep_time": None})
        for each in asked:
            await cancelled(each)


async def abort(rid: str, *workers: WorkerClient, until: list[asyncio.Task[Answer]]) -> list[Answer]:
    """Abort it there until these have ended: what has not come yet is not aborted. Their answers."""
    while not all(each.done() for each in until):
        await asyncio.gather(*(each.ask("POST", "/abort_request", {"rid": rid}) for each in workers))
        await asyncio.wait(until, timeout=0.1)
    return [each.result() for each in until]


async def test_a_half_says_which_it_is(pair: ClientsOfAPair) -> None:
    for worker, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        for path in ("/model_info", "/server_info"):
            assert (await worker.get(path))["disaggregation_mode"] == mode


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_tells_one_token_and_decode_all(pair: ClientsOfAPair, stream: bool) -> None:
    handed, told = await answers(pair, stream=stream, return_logprob=True)
    assert len(told["output_ids"]) == 4
    assert handed["output_ids"] == told["output_ids"][:1]
    assert handed["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    first = handed["meta_info"]["output_token_logprobs"]
    assert first == told["meta_info"]["output_token_logprobs"][:1]


async def test_without_a_room_it_is_400(pair: ClientsOfAPair) -> None:
    for worker in (pair.prefill, pair.decode):
        for path, body in (
            ("/generate", {"input_ids": PROMPT}),
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
        ):
            refused = await worker.ask("POST", path, body)
            assert refused.status == 400
            assert b"without bootstrap room id" in refused.body


async def test_a_room_counts_on_for_a_list_of_prompts(pair: ClientsOfAPair) -> None:
    handed, told = await answers(pair, input_ids=[PROMPT, PROMPT[:3]])
    assert [each["meta_info"]["prompt_tokens"] for each in told] == [5, 3]
    assert [each["output_ids"] for each in handed] == [each["output_ids"][:1] for each in told]


async def test_samples_of_one_prompt_wait_for_ever(pair: ClientsOfAPair) -> None:
    asked = asyncio.ensure_future(ask(pair, sampling_params={**SAMPLING, "n": 2}))
    assert await unfinished(asked, 1.0)
    asked.cancel()
    await asyncio.wait([asked])


async def test_one_half_alone_waits_and_is_free_once_its_client_has_left(pair: ClientsOfAPair) -> None:
    asked = asyncio.ensure_future(pair.prefill.ask("POST", "/generate", in_a_room(pair)))
    assert await unfinished(asked, 0.5)
    asked.cancel()
    await asyncio.wait([asked])
    assert (await answers(pair))[1]["output_ids"]


async def test_logprobs_of_the_prompt_are_prefills_alone(pair: ClientsOfAPair) -> None:
    handed, told = await answers(
        pair, return_logprob=True, logprob_start_len=0, top_logprobs_num=1, token_ids_logprob=[7]
    )
    theirs, own = handed["meta_info"], told["meta_info"]
    assert [entry[1] for entry in theirs["input_token_logprobs"]] == PROMPT
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert len(theirs[name]) == 5
        assert own[name] == []
    assert own["output_token_ids_logprobs"][0] is None
    assert theirs["output_token_ids_logprobs"][0] is not None
    assert own["output_top_logprobs"][0] == theirs["output_top_logprobs"][0]


async def test_rows_of_the_prompt_are_prefills_alone(pair: ClientsOfAPair) -> None:
    await answers(pair, input_ids=PROMPT[::-1])
    handed, told = await answers(pair, return_routed_experts=True)
    assert rows_of(handed).shape == (5, 8)
    assert rows_of(told).shape == (8, 8)
    assert not np.array_equal(rows_of(told)[:5], rows_of(handed))
    _, one = await answers(pair, return_routed_experts=True, sampling_params={**SAMPLING, "max_new_tokens": 1})
    assert len(one["output_ids"]) == 1
    assert "routed_experts" not in one["meta_info"]


async def test_an_abort_at_both_while_the_prompt_is_computed(pair: ClientsOfAPair) -> None:
    async with computing(pair) as (rid, asked):
        handed, told = await abort(rid, pair.decode, pair.prefill, until=asked)
    assert told.status == 500
    assert b"Aborted by AbortReq" in told.body
    if handed.status == 200:  # else it has heard of the decode half's abort first
        assert (handed.json["meta_info"]["finish_reason"]["type"], handed.json["output_ids"]) == ("abort", [])
    else:
        assert handed.status == 500


async def test_a_streams_abort_at_both_while_the_prompt_is_computed(pair: ClientsOfAPair) -> None:
    async with computing(pair, stream=True) as (rid, asked):
        handed, told = (events_of(each.body)[-1] for each in await abort(rid, pair.decode, pair.prefill, until=asked))
    end = told["meta_info"]["finish_reason"]
    assert (end["type"], end["status_code"]) == ("abort", 500)
    assert "Aborted by AbortReq" in end["message"]
    end = handed["meta_info"]["finish_reason"]
    assert end["type"] == "abort"
    assert end["status_code"] in (None, 500)


async def test_an_abort_at_decode_alone_hands_nothing_over(pair: ClientsOfAPair) -> None:
    async with computing(pair) as (rid, asked):
        (told,) = await abort(rid, pair.decode, until=asked[1:])
        waits = await unfinished(asked[0], 2 * HELD)  # where they had not met yet
        assert waits or asked[0].result().status == 500
    assert told.status == 500
    assert b"Aborted by AbortReq" in told.body


async def test_an_abort_at_prefill_alone_lets_decode_wait_for_ever(pair: ClientsOfAPair) -> None:
    async with computing(pair) as (rid, asked):
        await abort(rid, pair.prefill, until=asked[:1])
        assert await unfinished(asked[1], 2 * HELD)


async def test_a_token_is_stamped_once_the_prompt_was_taken_over(pair: ClientsOfAPair) -> None:
    for worker, version in ((pair.prefill, "p"), (pair.decode, "d")):
        await worker.set_version(version)
    handed, told = await answers(pair)
    assert handed["meta_info"]["weight_versions"] == [{"version": "p", "start": 0, "end": 1}]
    assert told["meta_info"]["weight_versions"] == [{"version": "d", "start": 0, "end": 4}]


async def test_a_retract_forgets_the_versions(pair: ClientsOfAPair) -> None:
    long = {**SAMPLING, "max_new_tokens": 200}
    rid = next(_rids)
    asked = asyncio.ensure_future(ask(pair, rid=rid, sampling_params=long))
    await pair.decode.until_running(1)
    async with pair.decode.paused("retract"), pair.prefill.paused("retract"):
        for worker in (pair.prefill, pair.decode):
            await worker.set_version("after")
    told = (await asked)[1].json["meta_info"]
    assert (told["completion_tokens"], told["num_retractions"]) == (200, 1)
    assert covers(told["weight_versions"], 200)
    assert [span["version"] for span in told["weight_versions"]] == ["after"]
