"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.client import WorkerClient

PATH = "/v1/completions"
SHORT = {"model": "m", "max_tokens": 5, "ignore_eos": True}


async def test_a_completion_has_openai_s_shape(worker: WorkerClient) -> None:
    answer = await worker.post(PATH, **SHORT, prompt="One two")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens"] == len(await worker.encode("One two"))
    assert answer["metadata"]["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]


@pytest.mark.parametrize(
    ("prompt", "choices", "prompt_tokens"),
    [([5, 6, 7], 1, 3), ([[5], [6, 7]], 2, 3), (["One", "Two"], 2, None)],
    ids=["ids", "id lists", "texts"],
)
async def test_prompts_of_every_form(
    worker: WorkerClient, prompt: list[Any], choices: int, prompt_tokens: int | None
) -> None:
    answer = await worker.post(PATH, **SHORT, prompt=prompt)
    assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
    assert answer["usage"]["completion_tokens"] == 5 * choices
    assert prompt_tokens in (None, answer["usage"]["prompt_tokens"])


async def test_n_samples_of_each_prompt_are_numbered_through(worker: WorkerClient) -> None:
    answer = await worker.post(PATH, **SHORT, prompt=["One", "Two"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


async def test_logprobs_list_the_tokens(worker: WorkerClient) -> None:
    (choice,) = (await worker.post(PATH, **SHORT, prompt="One", logprobs=1))["choices"]
    assert set(choice["logprobs"]) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert [len(entries) for entries in choice["logprobs"].values()] == [5] * 4
    assert all(logprob <= 0.0 for logprob in choice["logprobs"]["token_logprobs"])


async def test_token_ids_are_given_on_request(worker: WorkerClient) -> None:
    (choice,) = (await worker.post(PATH, **SHORT, prompt=[5, 6, 7], return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 5


async def test_a_rid_is_the_completion_s_id(worker: WorkerClient) -> None:
    assert (await worker.post(PATH, **SHORT, prompt="One", rid="c-1"))["id"] == "c-1"


async def test_a_stream_brings_the_text_in_pieces(worker: WorkerClient) -> None:
    chunks = await worker.events(PATH, model="m", prompt="One", regex="[xy]{9}", max_tokens=20)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert len(text) == 9
    assert set(text) <= {"x", "y"}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])


async def test_usage_comes_in_a_last_chunk_of_its_own(worker: WorkerClient) -> None:
    *_, last = await worker.events(PATH, **SHORT, prompt="One", stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
