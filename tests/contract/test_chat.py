"""`POST /v1/chat/completions`, not streaming: what a session needs to record a turn exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_router.tasks import spawn
from tests.contract.client import WorkerClient, covers

EXACT = {"return_meta_info": True, "return_prompt_token_ids": True, "logprobs": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "strict": True,  # else `required` leaves the arguments free
        "parameters": {
            "type": "object",
            "properties": {"op": {"enum": ["x", "y"]}},
            "required": ["op"],
            "additionalProperties": False,
        },
    },
}
#: A call in the model family's own format, in whatever tokens the sampler makes it of.
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"op": "[xy]"\}\}\n</tool_call>'


async def bias_towards(worker: WorkerClient, *pieces: str) -> dict[str, float]:
    """Biases towards the tokens of some texts and the end: a random model would fill the grammar's blanks for ever."""
    ended = await worker.generate(text="One", sampling_params={"regex": "a"})
    wanted = [ended["output_ids"][-1]]
    for piece in pieces:
        wanted += await worker.encode(piece)
    return {str(token): 50.0 for token in wanted}


async def test_a_completion_has_openai_s_shape(worker: WorkerClient) -> None:
    answer = await worker.chat()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "m"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6


async def test_the_versions_are_in_its_metadata(worker: WorkerClient) -> None:
    answer = await worker.chat()
    assert answer["metadata"]["weight_version"] == "default"
    assert answer["metadata"]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]


async def test_a_rid_is_the_completion_s_id(worker: WorkerClient) -> None:
    answer = await worker.chat(rid="chat-1", return_meta_info=True)
    assert answer["id"] == answer["choices"][0]["meta_info"]["id"] == "chat-1"


async def test_each_choice_can_be_recorded_exactly(worker: WorkerClient) -> None:
    answer = await worker.chat(**EXACT)
    (choice,) = answer["choices"]
    meta = choice["meta_info"]
    assert len(choice["prompt_token_ids"]) == meta["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 6
    assert covers(meta["weight_versions"], 6)
    listed = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in listed] == [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    assert [entry["token"] for entry in listed] == [text for _, _, text in meta["output_token_logprobs"]]
    assert all(set(entry) == {"token", "bytes", "logprob", "top_logprobs"} for entry in listed)


async def test_nothing_exact_is_given_unasked(worker: WorkerClient) -> None:
    answer = await worker.chat()
    assert "sglext" not in answer
    assert not {"meta_info", "prompt_token_ids", "response_token_ids"} & set(answer["choices"][0])


async def test_the_prompt_is_the_rendered_template(worker: WorkerClient) -> None:
    answer = await worker.chat(messages=[{"role": "user", "content": "hi"}], return_prompt_token_ids=True)
    prompt = await worker.decode(answer["choices"][0]["prompt_token_ids"])
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" in prompt


async def test_input_ids_replace_the_template_s_tokens(worker: WorkerClient) -> None:
    answer = await worker.chat(**EXACT, input_ids=[5, 6, 7])
    assert answer["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_input_ids_do_not_make_messages_optional(worker: WorkerClient) -> None:
    refused = await worker.ask("POST", "/v1/chat/completions", {"model": "m", "input_ids": [5, 6, 7]})
    assert refused.status == 400


async def test_token_ids_of_prompt_and_response(worker: WorkerClient) -> None:
    (choice,) = (await worker.chat(return_token_ids=True, return_meta_info=True, logprobs=True))["choices"]
    assert choice["response_token_ids"] == [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]]
    assert choice["prompt_token_ids"]


async def test_sglext_has_the_ids_of_all_choices(worker: WorkerClient) -> None:
    answer = await worker.chat(n=2, return_input_ids_in_sglext=True, return_output_ids_in_sglext=True)
    assert [len(ids) for ids in answer["sglext"]["output_ids"]] == [6, 6]
    assert len(answer["sglext"]["input_ids"]) == answer["usage"]["prompt_tokens"]


async def test_n_choices_are_numbered_and_have_their_own_ids(worker: WorkerClient) -> None:
    answer = await worker.chat(n=3, return_meta_info=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["meta_info"]["id"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 18


async def test_a_stop_token_is_named_and_sampled_and_not_shown(worker: WorkerClient) -> None:
    (choice,) = (await worker.chat(**EXACT, regex="a{3}", max_tokens=20))["choices"]
    ids = [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]]
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == ids[-1]
    assert choice["message"]["content"] == "aaa"
    assert await worker.decode(ids[:-1]) == "aaa"


async def test_a_stop_string_is_named(worker: WorkerClient) -> None:
    (choice,) = (await worker.chat(regex="a{3}b[xy]{20}", stop=["b"], max_tokens=40))["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "b")
    assert choice["message"]["content"] == "aaa"


def only_call(choice: dict[str, Any]) -> Any:
    """The one tool call of a choice that consists of it."""
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["index"]) == ("function", 0)
    assert call["id"].startswith("call_")
    assert choice["message"]["content"] in ("", None)
    assert choice["finish_reason"] == "tool_calls"
    return call["function"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
async def test_a_tool_that_must_be_called_is_called(worker: WorkerClient, choice: Any) -> None:
    bias = await bias_towards(worker, '{"', '"', "op", '":"', '":', "x", '"}', "}")
    answer = await worker.chat(
        **EXACT, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200, logit_bias=bias
    )
    function = only_call(answer["choices"][0])
    assert function["name"] == "add"
    assert json.loads(function["arguments"])["op"] in ("x", "y")
    assert answer["choices"][0]["meta_info"]["completion_tokens"] == answer["usage"]["completion_tokens"]


async def test_a_tool_call_in_the_model_s_format_is_parsed_and_its_tokens_are_kept(worker: WorkerClient) -> None:
    answer = await worker.chat(**EXACT, tools=[TOOL], regex=CALL, max_tokens=200)
    (choice,) = answer["choices"]
    assert json.loads(only_call(choice)["arguments"])["op"] in ("x", "y")
    ids = [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]]
    assert (await worker.decode(ids)).startswith('<tool_call>\n{"name": "add"')
    assert choice["meta_info"]["finish_reason"]["type"] == "tool_calls"


async def test_an_aborted_completion_returns_what_was_sampled(worker: WorkerClient) -> None:
    request = spawn(worker.chat(**EXACT, max_tokens=4000, ignore_eos=True, rid="cut"), name="cut")
    await worker.until_running(1)
    await worker.ask("POST", "/abort_request", {"rid": "cut"})
    (choice,) = (await request)["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(choice["meta_info"]["output_token_logprobs"]) == choice["meta_info"]["completion_tokens"] < 4000
