"""`/separate_reasoning`, `/parse_function_call`, and what carries a chat answer on: the rest of it, raw."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.client import CHAT, WorkerClient
from tests.contract.test_chat import TOOL
from tests.contract.test_chat_streaming import EXACT, chunks_of, sampled, shown, with_choices

WRITTEN = '<tool_call>\n{"name":"add", "arguments": {"op":"x"}}\n</tool_call>'
RAW = {"separate_reasoning": False, "tool_choice": "none", "tools": [TOOL], "skip_special_tokens": False}


async def parsed(worker: WorkerClient, path: str, **body: Any) -> Any:
    answer = await worker.ask("POST", path, body)
    assert answer.status == 200, answer.json
    return answer.json


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "\nWhy?\n", "\n\nSo."),
        ("So.", "", "So."),
        ("Why?\n</think>\n\nSo.", "", "Why?\n</think>\n\nSo."),
        ("<think>Why", "Why", ""),
    ],
    ids=["both", "no reasoning", "opened in the prompt", "no end"],
)
async def test_reasoning_is_separated_in_a_whole_text(
    worker: WorkerClient, text: str, reasoning: str, rest: str
) -> None:
    said = await parsed(worker, "/separate_reasoning", text=text, reasoning_parser="qwen3")
    assert (said["reasoning_text"], said["text"]) == (reasoning, rest)


async def test_calls_are_parsed_in_a_whole_text(worker: WorkerClient) -> None:
    asked = {"text": f"I add.\n{WRITTEN}\n{WRITTEN}", "tools": [TOOL], "tool_call_parser": "qwen25"}
    said = await parsed(worker, "/parse_function_call", **asked)
    call = {"tool_index": 0, "name": "add", "parameters": '{"op": "x"}'}
    assert (said["normal_text"], said["calls"]) == ("I add.", [call, call])


async def test_half_a_call_is_lost_with_its_text(worker: WorkerClient) -> None:
    asked = {"text": f"I add.\n{WRITTEN[:-14]}", "tools": [TOOL], "tool_call_parser": "qwen25"}
    assert await parsed(worker, "/parse_function_call", **asked) == {"normal_text": "I add.", "calls": []}


async def test_a_chat_request_is_tokenized_as_its_template_renders_it(worker: WorkerClient) -> None:
    request = {"model": "m", "messages": CHAT["messages"], "tools": [TOOL], "max_tokens": 3}
    ids = (await parsed(worker, "/v1/tokenize", **request))["tokens"]
    answer = await worker.chat(**request, return_prompt_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids


async def test_the_rest_of_an_answer_is_the_raw_text_of_its_tokens(worker: WorkerClient) -> None:
    prompt = [5, 6, 7]
    asked = {**RAW, "input_ids": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    (choice,) = (await worker.chat(**asked, logprobs=True, return_meta_info=True))["choices"]
    ids = [triple[1] for triple in choice["meta_info"]["output_token_logprobs"]]
    assert choice["meta_info"]["prompt_tokens"] == len(prompt)
    assert len(choice["logprobs"]["content"]) == len(ids) == 12
    assert choice["message"]["content"].rstrip("\N{REPLACEMENT CHARACTER}") in await worker.decode(ids)
    chunks = await chunks_of(worker, **EXACT, **asked)
    assert shown(chunks) == choice["message"]["content"]
    assert len(sampled(chunks)) == 12


async def test_call_cut_by_length_is_closed_in_a_stream_and_dropped_from_a_whole_answer(
    worker: WorkerClient,
) -> None:
    literal = '<tool_call>\n{"name":"add", "arguments": {"op": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'
    for length in (24, 26, 28):
        asked = {"tools": [TOOL], "regex": f"{literal.replace('{', chr(92) + '{')}x+", "max_tokens": length}
        chunks = await chunks_of(worker, **EXACT, **asked)
        assert with_choices(chunks)[-1]["finish_reason"] == "length"
        pieces = [piece for choice in with_choices(chunks) for piece in choice["delta"].get("tool_calls") or []]
        arguments = "".join(piece["function"]["arguments"] or "" for piece in pieces)
        if arguments:
            assert isinstance(json.loads(arguments), dict), "which nobody has sampled"
        (choice,) = (await worker.chat(**asked))["choices"]
        assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("length", None)
