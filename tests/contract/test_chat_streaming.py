"""`POST /v1/chat/completions` with `stream`: a stream that is forwarded as it comes can be recorded exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.client import CHAT, WorkerClient
from tests.contract.test_chat import CALL, TOOL

PATH = "/v1/chat/completions"
EXACT = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True, "logprobs": True}


async def chunks_of(worker: WorkerClient, **payload: Any) -> list[Any]:
    return await worker.events(PATH, **{**CHAT, **payload})


def with_choices(chunks: list[Any], index: int = 0) -> list[Any]:
    """The choice of each chunk that has one, for one sample."""
    return [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]


def sampled(chunks: list[Any], index: int = 0) -> list[Any]:
    """The logprob entries of one sample, over all its chunks."""
    entries = [(choice["logprobs"] or {}).get("content", []) for choice in with_choices(chunks, index)]
    return [entry for part in entries for entry in part]


def shown(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in with_choices(chunks, index))


async def test_a_stream_is_a_role_then_content_then_a_finish_reason(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *middle, last = with_choices(chunks)
    assert first["delta"]["role"] == "assistant"
    assert first["delta"]["content"] == ""
    assert all(choice["finish_reason"] is None for choice in [first, *middle])
    assert last["finish_reason"] == "length"
    assert shown(chunks)


async def test_unasked_there_is_no_chunk_without_choices(worker: WorkerClient) -> None:
    assert all(chunk["choices"] for chunk in await chunks_of(worker))


async def test_the_stream_s_id_is_the_rid(worker: WorkerClient) -> None:
    assert {chunk["id"] for chunk in await chunks_of(worker, rid="chat-2")} == {"chat-2"}


async def test_the_ids_come_last_and_once(worker: WorkerClient) -> None:
    *others, last = await chunks_of(worker, **EXACT)
    assert last["choices"] == []
    assert [len(ids) for ids in last["sglext"]["output_ids"]] == [6]
    assert not any("sglext" in chunk for chunk in others)


async def test_the_cached_tokens_are_told_once_there_are_any(worker: WorkerClient) -> None:
    messages = [{"role": "user", "content": "How much of this prompt is in the prefix cache by now?"}]
    asked = {**EXACT, "return_cached_tokens_details": True, "messages": messages}
    await chunks_of(worker, **asked)
    extra = (await chunks_of(worker, **asked))[-1]["sglext"]
    cached = extra["cached_tokens_details"]
    assert set(cached) == {"device", "host"}
    assert 0 < cached["device"] < len(extra["input_ids"])
    whole = await worker.chat(return_cached_tokens_details=True, return_meta_info=True, messages=messages)
    assert whole["sglext"]["cached_tokens_details"] == whole["choices"][0]["meta_info"]["cached_tokens_details"]


async def test_each_sampled_token_has_its_logprob_in_order(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker, **EXACT)
    (ids,) = chunks[-1]["sglext"]["output_ids"]
    entries = sampled(chunks)
    assert len(entries) == len(ids) == 6
    assert all(entry["logprob"] <= 0.0 for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace") == await worker.decode(
        ids
    )


async def test_the_stop_token_has_its_logprob_too(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker, **EXACT, regex="a{3}", max_tokens=20)
    (ids,) = chunks[-1]["sglext"]["output_ids"]
    assert len(sampled(chunks)) == len(ids)
    assert shown(chunks) == "aaa"
    assert with_choices(chunks)[-1]["finish_reason"] == "stop"
    assert with_choices(chunks)[-1]["matched_stop"] == ids[-1]


async def test_input_ids_replace_the_template_s_tokens(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker, **EXACT, input_ids=[5, 6, 7])
    assert chunks[-1]["sglext"]["input_ids"] == [5, 6, 7]


async def test_usage_comes_in_a_last_chunk_of_its_own(worker: WorkerClient) -> None:
    *_, ids, usage = await chunks_of(worker, **EXACT, stream_options={"include_usage": True})
    assert ids["sglext"]["output_ids"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens"] == len(ids["sglext"]["input_ids"])


async def test_n_choices_share_one_chunk_of_ids(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker, **EXACT, n=2)
    ids = chunks[-1]["sglext"]["output_ids"]
    assert [len(sampled(chunks, index)) for index in range(2)] == [len(own) for own in ids] == [6, 6]
    assert sum("sglext" in chunk for chunk in chunks) == 1
    assert [with_choices(chunks, index)[0]["delta"]["role"] for index in range(2)] == ["assistant"] * 2


@pytest.mark.parametrize("field", ["return_meta_info", "return_prompt_token_ids", "return_token_ids"])
async def test_what_plain_completions_return_is_refused(worker: WorkerClient, field: str) -> None:
    refused = await worker.ask("POST", PATH, {**CHAT, "stream": True, field: True})
    assert refused.status == 400
    assert (refused.json["object"], refused.json["type"]) == ("error", "BadRequest")
    assert refused.json["message"].startswith(f"{field} is not supported with streaming")


async def test_a_tool_call_comes_as_a_name_and_pieces_of_arguments(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker, **EXACT, tools=[TOOL], regex=CALL, max_tokens=200)
    pieces = [piece for choice in with_choices(chunks) for piece in choice["delta"].get("tool_calls") or []]
    assert pieces[0]["function"]["name"] == "add"
    assert pieces[0]["id"].startswith("call_")
    arguments = "".join(piece["function"]["arguments"] or "" for piece in pieces)
    assert json.loads(arguments)["op"] in ("x", "y")
    assert with_choices(chunks)[-1]["finish_reason"] == "tool_calls"
    assert shown(chunks) == ""


async def test_the_tokens_of_a_tool_call_are_all_there(worker: WorkerClient) -> None:
    chunks = await chunks_of(worker, **EXACT, tools=[TOOL], regex=CALL, max_tokens=200)
    (ids,) = chunks[-1]["sglext"]["output_ids"]
    assert len(sampled(chunks)) == len(ids)
    assert (await worker.decode(ids)).startswith('<tool_call>\n{"name": "add"')


async def test_an_aborted_stream_ends_with_its_ids(worker: WorkerClient) -> None:
    request = {**CHAT, **EXACT, "max_tokens": 4000, "ignore_eos": True, "rid": "cut"}
    async with worker.stream(PATH, **request) as stream:
        first = await stream.next()
        await worker.until_running(1)
        await worker.ask("POST", "/abort_request", {"rid": "cut"})
        chunks = [first, *await stream.rest()]
    (ids,) = chunks[-1]["sglext"]["output_ids"]
    assert len(sampled(chunks)) == len(ids) < 4000
    assert with_choices(chunks)[-1]["finish_reason"] == "abort"
