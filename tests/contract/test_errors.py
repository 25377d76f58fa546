"""Requests that a worker refuses: the status, and the shape of the body."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.client import CHAT, WorkerClient

SCHEMA_ERROR = {"object", "message", "type", "param", "code"}
BAD_VALUES = [{"temperature": -1}, {"top_p": 2}, {"max_new_tokens": -1}, {"max_new_tokens": 1_000_000}]
UNREADABLE = [
    (b"{", "application/json"),
    (b"[1]", "application/json"),
    (b"", "application/json"),
    (b'{"text": "One"}', "text/plain"),
]


@pytest.mark.parametrize(("data", "kind"), UNREADABLE, ids=["broken", "list", "empty", "text/plain"])
async def test_what_is_no_json_object_is_a_schema_error(worker: WorkerClient, data: bytes, kind: str) -> None:
    refused = await worker.ask("POST", "/generate", data=data, headers={"content-type": kind})
    assert refused.status == 400
    assert set(refused.json) == SCHEMA_ERROR
    assert (refused.json["object"], refused.json["type"]) == ("error", "Bad Request")
    assert (refused.json["param"], refused.json["code"]) == (None, 400)


@pytest.mark.parametrize("field", [{"text": 3}, {"input_ids": ["a"]}, {"text": "One", "sampling_params": "x"}], ids=str)
async def test_a_field_of_the_wrong_type_is_a_schema_error(worker: WorkerClient, field: dict[str, Any]) -> None:
    refused = await worker.ask("POST", "/generate", field)
    assert refused.status == 400
    assert set(refused.json) == SCHEMA_ERROR
    assert "validation error" in refused.json["message"]


async def test_a_prompt_is_required(worker: WorkerClient) -> None:
    refused = await worker.ask("POST", "/generate", {"sampling_params": {}})
    expected = {"error": {"message": "Either text, input_ids or input_embeds should be provided."}}
    assert (refused.status, refused.json) == (400, expected)


@pytest.mark.parametrize("sampling", BAD_VALUES, ids=str)
async def test_a_bad_value_is_refused_with_a_message(worker: WorkerClient, sampling: dict[str, Any]) -> None:
    refused = await worker.ask("POST", "/generate", {"text": "One", "sampling_params": sampling})
    assert refused.status == 400
    assert list(refused.json) == ["error"]
    assert list(refused.json["error"]) == ["message"]


async def test_an_unknown_sampling_parameter_is_refused_by_name(worker: WorkerClient) -> None:
    refused = await worker.ask("POST", "/generate", {"text": "One", "sampling_params": {"warmth": 1}})
    assert refused.status == 400
    assert refused.json["error"].startswith("unknown field `warmth`, expected one of `max_new_tokens`")


async def test_a_rid_twice_in_a_list_is_refused(worker: WorkerClient) -> None:
    refused = await worker.ask("POST", "/generate", {"text": ["One", "Two"], "rid": ["x", "x"]})
    assert refused.status == 400
    assert "Duplicate request ID" in refused.json["error"]["message"]


async def test_a_bad_value_on_a_stream_is_an_event(worker: WorkerClient) -> None:
    (event,) = await worker.events("/generate", text="One", sampling_params={"temperature": -1})
    assert set(event["error"]) == {"message", "type", "code", "retryable"}
    assert (event["error"]["type"], event["error"]["code"]) == ("invalid_request_error", 400)
    assert event["error"]["retryable"] is False


async def test_an_unknown_sampling_parameter_on_a_stream_is_refused_at_once(worker: WorkerClient) -> None:
    request = {"text": "One", "sampling_params": {"warmth": 1}, "stream": True}
    refused = await worker.ask("POST", "/generate", request)
    assert refused.status == 400
    assert refused.json["error"].startswith("unknown field `warmth`")


@pytest.mark.parametrize(
    ("path", "request_"),
    [("/v1/chat/completions", {"model": "m"}), ("/v1/completions", {"model": "m"})],
    ids=["messages", "prompt"],
)
async def test_openai_requests_without_a_prompt_are_schema_errors(
    worker: WorkerClient, path: str, request_: dict[str, Any]
) -> None:
    refused = await worker.ask("POST", path, request_)
    assert refused.status == 400
    assert set(refused.json) == SCHEMA_ERROR
    assert refused.json["type"] == "Bad Request"


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"messages": []}, {"max_tokens": 1_000_000}], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_bad_chat_values_are_refused_before_anything_is_streamed(
    worker: WorkerClient, bad: dict[str, Any], stream: bool
) -> None:
    refused = await worker.ask("POST", "/v1/chat/completions", {**CHAT, **bad, "stream": stream})
    assert refused.status == 400
    assert set(refused.json) == SCHEMA_ERROR
    assert refused.json["type"] == "BadRequestError"


async def test_required_tools_must_be_given(worker: WorkerClient) -> None:
    refused = await worker.ask("POST", "/v1/chat/completions", {**CHAT, "tools": [], "tool_choice": "required"})
    assert refused.status == 400
    assert refused.json["message"] == "Tools cannot be empty if tool choice is set to required."


async def test_refused_requests_leave_nothing_behind(worker: WorkerClient) -> None:
    for sampling in BAD_VALUES:
        await worker.ask("POST", "/generate", {"text": "One", "sampling_params": sampling, "rid": "same"})
    assert await worker.load() == (0, 0)
    answer = await worker.generate(text="One", sampling_params={"max_new_tokens": 1}, rid="same")
    assert answer["meta_info"]["id"] == "same"
