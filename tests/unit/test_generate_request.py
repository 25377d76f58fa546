"""Requests of `/generate`, read once for everybody: every shape that the engine takes, and refusal of all others."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.engines.generate import MAX_GENERATIONS, GenerateRequest, UnknownShape


@pytest.mark.parametrize(
    ("body", "prompts", "batch", "samples"),
    [
        ({"text": "a"}, ["a"], False, 1),
        ({"text": ["a", "b"]}, ["a", "b"], True, 1),
        ({"text": ["a"], "sampling_params": {"n": 2}}, ["a"], True, 2),
        ({"input_ids": [1, 2]}, [[1, 2]], False, 1),
        ({"input_ids": [[1], [2, 3]]}, [[1], [2, 3]], True, 1),
        ({"input_ids": []}, [[]], False, 1),
        ({"input_tokens": [[1], [2]]}, [[1], [2]], True, 1),
        ({"input_ids": None, "input_tokens": [1]}, [[1]], False, 1),
        ({"text": "a", "input_ids": [5]}, [[5]], False, 1),
        ({"text": "a", "input_tokens": [5]}, ["a"], False, 1),
        ({"text": ["a", "b"], "sampling_params": [{"n": 3}, {"n": 3}]}, ["a", "b"], True, 3),
        ({"text": "a", "sampling_params": None, "stream": True}, ["a"], False, 1),
    ],
)
def test_prompts_and_how_many_answers_they_get(
    body: dict[str, Any], prompts: list[Any], batch: bool, samples: int
) -> None:
    read = GenerateRequest.read(body)
    assert [each.text if each.ids is None else each.ids for each in read.prompts] == prompts
    assert (read.batch, read.samples, read.stream) == (batch, samples, "stream" in body)
    assert read.generations == len(prompts) * samples
    assert read.indexed == (batch or samples > 1)
    assert [read.prompt_of(place) for place in range(read.generations)] == sorted(list(range(len(prompts))) * samples)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "no_object"),
        ({}, "no_prompt"),
        ({"text": 1}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": "hot"}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": [1]}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": True}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": MAX_GENERATIONS + 1}}, "too_many"),
        ({"text": "a", "rid": 7}, "rid"),
        ({"text": ["a", "b"], "rid": ["r"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["r", 1]}, "rid"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_field(body: object, reason: str) -> None:
    with pytest.raises(UnknownShape) as refused:
        GenerateRequest.read(body)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("body", "rids"),
    [
        ({"text": "a", "rid": "r"}, ["r"]),
        ({"text": "a"}, [None]),
        ({"text": ["a", "b"], "rid": "r"}, ["r_0", "r_1"]),
        ({"input_tokens": [[1], [2]], "rid": "r"}, ["r_0", "r_1"]),
        ({"text": ["a", "b"], "rid": ["r", "s"]}, ["r", "s"]),
        ({"text": "a", "rid": "r", "sampling_params": {"n": 2}}, [None, None]),
    ],
)
def test_each_generation_has_the_id_that_the_engine_gives_it(body: dict[str, Any], rids: list[str | None]) -> None:
    assert GenerateRequest.read(body).rids == rids


def test_a_generation_alone_is_asked_for_with_what_is_its_own() -> None:
    body = {
        "text": ["a", "b"],
        "rid": "r",
        "stream": True,
        "sampling_params": [{"n": 1, "stop": "x"}, {"max_new_tokens": 3}],
        "lora_path": ["l", None],
        "token_ids_logprob": [4, 5],
        "return_logprob": True,
    }
    read = GenerateRequest.read(body)
    common = {"stream": True, "return_logprob": True, "token_ids_logprob": [4, 5]}
    assert read.single(0) == {"text": "a", "rid": "r_0", "sampling_params": {"stop": "x"}, "lora_path": "l", **common}
    second = {"text": "b", "rid": "r_1", "sampling_params": {"max_new_tokens": 3}, "lora_path": None}
    assert read.single(1) == {**second, **common}


def test_one_of_several_samples_has_no_id_of_its_client_s() -> None:
    read = GenerateRequest.read({"input_tokens": [1], "rid": "r", "sampling_params": {"n": 2, "top_k": 1}})
    assert read.single(1) == {"input_ids": [1], "sampling_params": {"top_k": 1}}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"text": "a"}, {"top_k": 1}),
        ({"text": "a", "sampling_params": None}, {"top_k": 1}),
        ({"text": "a", "sampling_params": {"n": 2, "stop": "x"}}, {"n": 2, "stop": "x", "top_k": 1}),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, {"n": 2, "top_k": 1}),
        ({"text": "a", "sampling_params": [{"n": 2}]}, [{"n": 2, "top_k": 1}]),
        ({"input_ids": [[1], [2]], "sampling_params": [{}, {"stop": "x"}]}, [{"top_k": 1}, {"stop": "x", "top_k": 1}]),
    ],
)
def test_sampling_parameters_are_changed_in_the_form_that_they_came_in(given: dict[str, Any], changed: Any) -> None:
    read = GenerateRequest.read(given)
    assert read.with_params(lambda params: {**params, "top_k": 1}) == {**given, "sampling_params": changed}
    assert read.body == given


def test_ids_take_the_place_of_texts() -> None:
    read = GenerateRequest.read({"text": ["a", "b"], "rid": "r"})
    assert read.with_ids([[1], [2]], return_logprob=True) == {
        "input_ids": [[1], [2]],
        "rid": "r",
        "return_logprob": True,
    }
    assert GenerateRequest.read({"input_tokens": [3], "x": 1}).with_ids([[3]]) == {"input_ids": [3], "x": 1}
