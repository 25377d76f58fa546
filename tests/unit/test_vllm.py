"""What is read of vLLM's documents and answers: what it was started with, and answers that contradict themselves."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import orjson
import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import Event, write_event
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.known import facts_of
from miles_router.engines.vllm.facts import Flags
from miles_router.engines.vllm.generate import PromptSampling

VERSION, INFO, MODELS, WEIGHTS, SAMPLE = (
    *("/version", "/server_info?config_format=json", "/v1/models", "/weight_info", "/inference/v1/generate"),
)
CARD = {"id": "served", "root": "/m", "parent": None, "owned_by": "vllm", "max_model_len": 4096}
CONFIG: dict[str, Any] = {
    "model_config": {"model": "/m", "tokenizer": "/t", "seed": 3, "logprobs_mode": "processed_logprobs"},
    "cache_config": {"num_gpu_blocks": 8192, "block_size": 128},
    "parallel_config": {"data_parallel_size": 2, "_api_process_count": 1},
    "structured_outputs_config": {"reasoning_parser": "deepseek_r1"},
    "aux_output_config": {"enable_return_routed_experts": True},
    "additional_config": {"tool_call_parser": "hermes"},
    "lora_config": None,
    "instance_id": 17,
}


def documents(**changed: Any) -> dict[str, bytes | None]:
    said: dict[str, Any] = {
        VERSION: {"version": "0.32.0"},
        INFO: {"vllm_config": CONFIG},
        MODELS: {"data": [CARD]},
        WEIGHTS: {"weight_version": "7"},
    }
    return {**{path: orjson.dumps(each) for path, each in said.items()}, SAMPLE: b"", **changed}


def test_what_it_says_about_itself_is_read() -> None:
    facts = facts_of(documents())
    assert facts.engine is not None
    assert facts.engine.kind == "vllm"
    assert (facts.version, facts.model_path, facts.served_model_name) == ("0.32.0", "/m", "served")
    assert (facts.tokenizer_path, facts.weight_version, facts.process) == ("/t", "7", b"17")
    assert (facts.dp_size, facts.context_length, facts.token_capacity) == (2, 4096, 8192 * 128)
    assert (facts.tool_call_parser, facts.reasoning_parser) == ("qwen25", "deepseek-r1")
    assert (facts.lora, facts.lacks) == (False, ())
    assert facts.engine.ranks(facts) == 2


def test_another_process_contradicts_and_the_same_with_new_weights_does_not() -> None:
    before = facts_of(documents())
    other = {**CONFIG, "instance_id": 18}
    assert before.contradicts(facts_of(documents(**{INFO: orjson.dumps({"vllm_config": other})})))
    assert not before.contradicts(facts_of(documents(**{WEIGHTS: b'{"weight_version":"8"}'})))


def test_without_its_configuration_for_good_it_lacks_dev_mode() -> None:
    facts = facts_of(documents(**{INFO: b"", SAMPLE: b"null"}))
    assert facts.engine is not None
    assert [each.partition(":")[0] for each in facts.lacks or ()] == [
        "--enable-scale-out",
        "VLLM_SERVER_DEV_MODE=1 in its environment",
    ]


def sampling(**fields: Any) -> PromptSampling:
    body = {"input_ids": [1, 2], "return_logprob": True, "sampling_params": {"max_new_tokens": 4}, **fields}
    return PromptSampling(GenerateRequest.read(body), 0, Flags(experts=True))


def choice(ids: list[int], finish: str | None = "length", **changed: Any) -> dict[str, Any]:
    spans = [{"version": "1", "start": 0, "end": len(ids)}]
    entries = [{"token": "x", "logprob": -0.5} for _ in ids]
    said = {"index": 0, "token_ids": ids, "text": "x" * len(ids), "finish_reason": finish, "stop_reason": None}
    said |= {"logprobs": {"content": entries}, "weight_versions": spans, "routed_experts": None}
    return {**said, **changed}


def answer(*choices: dict[str, Any], prompt: int = 2, completion: int | None = None) -> bytes:
    count = sum(len(each["token_ids"]) for each in choices) if completion is None else completion
    return orjson.dumps({"choices": choices, "usage": {"prompt_tokens": prompt, "completion_tokens": count}})


@pytest.mark.parametrize(
    "told",
    [
        answer(choice([7, 8]), completion=3),
        answer(choice([7, 8]), prompt=3),
        answer(choice([7, 8], logprobs={"content": []})),
        answer(choice([7, 8], logprobs={"content": [{"token": "x", "logprob": -9999.0}] * 2})),
        answer(choice([7, 8], weight_versions=[{"version": "1", "start": 0, "end": 1}])),
        answer(choice([7, 8], weight_versions=[{"version": "1", "start": 1, "end": 2}])),
        answer(choice([7, 8], finish="error")),
        answer(choice([7, 8], finish=None)),
        answer(choice([7, 8], token_ids=[7, "8"])),
        answer(choice([7, 8]), choice([9])),
        answer(choice([7, 8], index=1)),
        answer(),
        b"[]",
        b"{",
    ],
    ids=[
        *("more tokens in the usage", "another prompt", "no logprobs", "an unknown logprob", "versions that end early"),
        *("versions with a gap", "an error", "no end", "an id that is a text", "too many choices", "another choice"),
        *("no choice", "a list", "no JSON"),
    ],
)
def test_an_answer_that_contradicts_itself_is_unreadable(told: bytes) -> None:
    with pytest.raises(UnreadableAnswer):
        sampling().whole(told, "1")


def test_an_event_behind_the_end_and_one_of_no_generation_are_unreadable() -> None:
    for second in (choice([9]), choice([9], index=4)):
        stream = sampling(stream=True)
        stream.event(Event.read(write_event({"choices": [choice([7])]})), "1")
        with pytest.raises(UnreadableAnswer):
            stream.event(Event.read(write_event({"choices": [second]})), "1")


def rows(shape: tuple[int, ...]) -> str:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, "u1"))
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("told", [None, "x", rows((2, 1, 1)), rows((3, 1)), base64.b64encode(b"no array").decode()])
def test_rows_of_another_form_are_unreadable(told: Any) -> None:
    asked = sampling(return_routed_experts=True)
    with pytest.raises(UnreadableAnswer):
        asked.whole(answer(choice([7, 8], routed_experts=told)), "1")
