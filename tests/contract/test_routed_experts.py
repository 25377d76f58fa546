"""`return_routed_experts`: which rows come, in which encoding, and that interrupted requests have theirs too."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.contract.client import CHAT, WorkerClient
from tests.support.waiting import soon

LAYERS, EXPERTS, TOP_K = 4, 8, 2
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
ON = {"return_routed_experts": True}


def experts(encoded: str) -> npt.NDArray[np.int32]:
    """`[rows, layers, top_k]`, each value an expert, no expert twice in a choice."""
    array = np.frombuffer(base64.b64decode(encoded), dtype="<i4").reshape(-1, LAYERS, TOP_K)
    assert ((array >= 0) & (array < EXPERTS)).all()
    assert (array[..., 0] != array[..., 1]).all()
    return array


def rows(answer: Any) -> int:
    return len(experts(answer["meta_info"]["routed_experts"]))


async def test_there_is_a_row_for_every_token_but_the_last(moe_worker: WorkerClient) -> None:
    answer = await moe_worker.generate(input_ids=[5, 6, 7], sampling_params=SHORT, **ON)
    assert rows(answer) == 3 + 4 - 1


async def test_cached_prompt_tokens_have_their_rows(moe_worker: WorkerClient) -> None:
    prompt = list(range(200, 230))
    first, second = [await moe_worker.generate(input_ids=prompt, sampling_params=SHORT, **ON) for _ in range(2)]
    assert second["meta_info"]["cached_tokens"] == 29
    assert rows(second) == 30 + 4 - 1
    encoded = [answer["meta_info"]["routed_experts"] for answer in (first, second)]
    assert (experts(encoded[0])[:29] == experts(encoded[1])[:29]).all()


@pytest.mark.parametrize(("start", "expected"), [(0, 6), (2, 4), (3, 3)])
async def test_rows_begin_where_asked(moe_worker: WorkerClient, start: int, expected: int) -> None:
    answer = await moe_worker.generate(input_ids=[5, 6, 7], sampling_params=SHORT, routed_experts_start_len=start, **ON)
    assert rows(answer) == expected


@pytest.mark.parametrize("start", [-1, 4])
async def test_a_start_outside_of_the_prompt_is_refused(moe_worker: WorkerClient, start: int) -> None:
    request = {"input_ids": [5, 6, 7], "sampling_params": SHORT, "routed_experts_start_len": start, **ON}
    refused = await moe_worker.ask("POST", "/generate", request)
    assert refused.status == 400
    assert "routed_experts_start_len" in refused.json["error"]["message"]


async def test_no_rows_are_an_empty_string(moe_worker: WorkerClient) -> None:
    answer = await moe_worker.generate(input_ids=[5], sampling_params={"max_new_tokens": 0}, **ON)
    assert answer["meta_info"]["routed_experts"] == ""


async def test_nothing_is_returned_unasked(moe_worker: WorkerClient) -> None:
    answer = await moe_worker.generate(input_ids=[5], sampling_params=SHORT)
    assert "routed_experts" not in answer["meta_info"]


async def test_a_dense_model_has_none_to_return(worker: WorkerClient) -> None:
    answer = await worker.generate(input_ids=[5], sampling_params=SHORT, **ON)
    assert "routed_experts" not in answer["meta_info"]


async def test_every_prompt_of_a_list_and_every_sample_has_its_own(moe_worker: WorkerClient) -> None:
    answers = await moe_worker.generate(input_ids=[[5], [5, 6]], sampling_params={**SHORT, "n": 2}, **ON)
    assert [rows(answer) for answer in answers] == [4, 4, 5, 5]


async def test_a_stream_brings_them_with_its_last_event(moe_worker: WorkerClient) -> None:
    *others, last = await moe_worker.events("/generate", input_ids=[5, 6], sampling_params=SHORT, **ON)
    assert not any("routed_experts" in event["meta_info"] for event in others)
    assert rows(last) == 2 + 4 - 1


async def test_an_aborted_request_has_the_rows_of_what_it_sampled(moe_worker: WorkerClient) -> None:
    async with moe_worker.in_flight("cut", **ON) as request, moe_worker.paused("abort"):
        answer = await soon(request)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert rows(answer) == answer["meta_info"]["prompt_tokens"] + len(answer["output_ids"]) - 1


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_loses_no_rows(moe_worker: WorkerClient, mode: str) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True}
    async with moe_worker.stream("/generate", input_ids=[5, 6], sampling_params=sampling, **ON) as stream:
        await stream.next()
        async with moe_worker.paused(mode):
            pass
        *_, last = await stream.rest()
    assert rows(last) == 2 + 40 - 1


async def test_chat_completions_return_them_in_meta_info(moe_worker: WorkerClient) -> None:
    answer = await moe_worker.chat(**ON, return_meta_info=True)
    (choice,) = answer["choices"]
    assert rows(choice) == answer["usage"]["total_tokens"] - 1


async def test_chat_completions_without_meta_info_return_them_in_sglext(moe_worker: WorkerClient) -> None:
    answer = await moe_worker.chat(**ON)
    assert len(experts(answer["sglext"]["routed_experts"])) == answer["usage"]["total_tokens"] - 1


async def test_chat_streams_bring_them_with_the_ids(moe_worker: WorkerClient) -> None:
    *_, last = await moe_worker.events(
        "/v1/chat/completions",
        **{**CHAT, **ON, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
    )
    ids = [*last["sglext"]["input_ids"], *last["sglext"]["output_ids"][0]]
    assert len(experts(last["sglext"]["routed_experts"])) == len(ids) - 1
