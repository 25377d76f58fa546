"""What an engine is asked for the logprobs of given ids, what it answers, and which settings reshape recorded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.known import read_facts
from miles_router.engines.recomputing import (
    RecomputationCut,
    adapter_in,
    possible_defaults,
    read,
    read_next,
    request,
    request_next,
    reshaped_by,
    temperature,
)

IDS = [5, 6, 7]


def answer(**changed: Any) -> bytes:
    meta = {
        "finish_reason": {"type": "length", "length": 0},
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]],
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 0}],
        **changed,
    }
    return orjson.dumps({"meta_info": {name: value for name, value in meta.items() if value != "absent"}})


def test_a_request_generates_nothing_and_names_its_adapter() -> None:
    ids = np.array([1, 2, 3], np.int32)
    asked = orjson.loads(request(ids, 1, ""))
    assert asked == {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    assert orjson.loads(request(ids, 1, "poet")) == {**asked, "lora_path": "poet"}


def test_the_first_id_has_no_logprob() -> None:
    found = read(answer(), IDS)
    assert found.logprobs.tolist() == [-0.5, -0.25]
    assert found.version == "3"


def test_an_engine_need_not_name_its_weights() -> None:
    assert read(answer(weight_version="absent", weight_versions="absent"), IDS).version is None


@pytest.mark.parametrize(
    "changed",
    [
        {"input_token_logprobs": "absent"},
        {"input_token_logprobs": []},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None]]},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 8, None]]},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [None, 7, None]]},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], ["x", 7, None]]},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [0.5, 7, None]]},
        {"input_token_logprobs": 7},
    ],
)
def test_what_is_no_answer_for_these_ids_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UnreadableAnswer):
        read(answer(**changed), IDS)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"meta_info": null}', b"nonsense"])
def test_what_is_no_answer_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(UnreadableAnswer):
        read(body, IDS)


def test_one_that_was_aborted_or_saw_the_weights_change_may_be_asked_again() -> None:
    for changed in (
        {"finish_reason": {"type": "abort"}, "input_token_logprobs": "absent"},
        {"weight_version": "4"},
    ):
        with pytest.raises(RecomputationCut):
            read(answer(**changed), IDS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 1, "stop": ["x"]}, None),
        ({"temperature": 0.6}, None),
        ({"repetition_penalty": 1.05}, "repetition_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {}}, None),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"min_tokens": 0}, None),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "auto", "tools": [{"function": {"name": "a"}}, 7, {}]}, None),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"function": {"name": "a", "strict": True}}]}, "tools"),
    ],
)
def test_settings_that_reshape_logprobs(fields: dict[str, Any], reason: str | None) -> None:
    assert reshaped_by(fields) == reason


def test_what_an_engine_assumes_counts_where_a_request_says_nothing() -> None:
    assert reshaped_by({}, {}, {"repetition_penalty": 1.1}) == "repetition_penalty"
    assert reshaped_by({}, {"repetition_penalty": 1.0}, {"repetition_penalty": 1.1}) == "repetition_penalty"
    assert reshaped_by({"repetition_penalty": 1.0}, {}, {"repetition_penalty": 1.1}) is None
    assert reshaped_by({}, {}, {"repetition_penalty": None}) is None


@pytest.mark.parametrize(
    ("fields", "defaults", "value"),
    [
        ({}, [], 1.0),
        ({"temperature": 0.6}, [], 0.6),
        ({"temperature": 0}, [], 1.0),  # greedy ones are not divided
        ({"temperature": 0.0000001}, [], 1.0),
        ({"temperature": None}, [{"temperature": 0.6}], 0.6),
        ({"temperature": 1}, [{"temperature": 0.6}], 1.0),
        ({}, [{}, {"temperature": 0.6}], 0.6),
        ({}, [{"temperature": 1.0}, {"temperature": 0.6}], None),  # nobody knows which counts
        ({"temperature": [0.6]}, [], None),
    ],
)
def test_the_temperature_of_a_request(
    fields: dict[str, Any], defaults: list[dict[str, Any]], value: float | None
) -> None:
    assert temperature(fields, *defaults) == value


def test_one_token_is_asked_for_at_its_temperature() -> None:
    asked = orjson.loads(request_next(np.array([1, 2], np.int32), 3, 0.6, ""))
    assert asked == {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.6},
        "return_logprob": True,
        "token_ids_logprob": [3],
    }
    assert read_next(answer(output_token_ids_logprobs=[[[-0.5, 3, None]]]), 3).logprobs.tolist() == [-0.5]
    others: list[Any] = [[], [None], [[]], [[[-0.5, 4, None]]], [[[None, 3, None]]], "absent"]
    for wrong in others:
        with pytest.raises(UnreadableAnswer):
            read_next(answer(output_token_ids_logprobs=wrong), 3)


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({}, ""),
        ({"model": "poet"}, ""),  # which the engine takes for the base weights
        ({"lora_path": "poet"}, "poet"),
        ({"lora_path": None}, ""),
        ({"lora_path": ["poet"]}, None),
        ({"model": "base:poet"}, "poet"),
        ({"model": "other:poet", "lora_path": "x"}, "poet"),
        ({"model": "with:colon:poet"}, "poet"),
        ({"model": "base:"}, None),
    ],
)
def test_the_adapter_of_a_request(fields: dict[str, Any], adapter: str | None) -> None:
    assert adapter_in(fields, ["base", "with:colon"]) == adapter


@pytest.mark.parametrize(
    ("said", "chat", "value"),
    [
        ({"sampling_defaults": "model"}, True, 0.6),
        ({"sampling_defaults": "openai"}, True, 1.0),
        ({}, True, None),  # an engine that does not say
        ({}, False, 1.0),
        ({"sampling_defaults": "model", "preferred_sampling_params": {"temperature": 0.9}}, True, None),
        ({"sampling_defaults": "openai", "preferred_sampling_params": {"temperature": 0.9}}, True, 0.9),
    ],
)
def test_what_an_engine_assumes_is_what_it_says(said: dict[str, Any], chat: bool, value: float | None) -> None:
    facts = read_facts({"/server_info": orjson.dumps({"version": "0.5.23", **said})})
    assert temperature({}, *possible_defaults(facts, {"temperature": 0.6, "min_new_tokens": 9}, chat=chat)) == value
    assert reshaped_by({}, *possible_defaults(facts, {"temperature": 0.6, "min_new_tokens": 9}, chat=chat)) is None
