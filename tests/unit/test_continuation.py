"""The request that carries a generation on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import orjson
import pytest

from miles_router.asgi.exchange import Exchange
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.sglang.questions import STATEFUL
from miles_router.generation.continuation import PENALTIES, continuation
from miles_router.generation.generation import CannotResume, ResumableGeneration, generations_of
from miles_router.generation.questions import EngineQuestions
from miles_router.middlewares.router import Router
from miles_router.trajectory.rows import ROUTED_EXPERTS


class Tokenizing(EngineQuestions):
    """A worker whose tokens are the characters' numbers."""

    def __init__(self) -> None:
        super().__init__(cast(Router, None), Exchange("it"), [])

    async def tokenize(self, text: str) -> list[int]:
        return list(map(ord, text))


def cut(body: dict[str, Any], sampled: Sequence[int], **meta: Any) -> ResumableGeneration:
    (generation,) = generations_of(GenerateRequest.read(body))
    generation.answer = {"text": "", "output_ids": list(sampled), "meta_info": {"prompt_tokens": 2, **meta}}
    return generation


async def asked(generation: ResumableGeneration) -> dict[str, Any]:
    """Without the name of its own that it has."""
    generation.attempt_rid = "attempt"
    found: dict[str, Any] = orjson.loads(await continuation(generation, Tokenizing()))
    assert found.pop("rid") == "attempt"
    return found


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"max_new_tokens": 125}),  # SGLang's default is 128
        ({"max_new_tokens": 10}, {"max_new_tokens": 7}),
        ({"max_new_tokens": None}, {"max_new_tokens": None}),
        ({"min_new_tokens": 5}, {"max_new_tokens": 125, "min_new_tokens": 2}),
        ({"min_new_tokens": 2}, {"max_new_tokens": 125, "min_new_tokens": 0}),
        ({"min_new_tokens": None}, {"max_new_tokens": 125, "min_new_tokens": None}),
        (
            {"frequency_penalty": 0, "beam_width": 1, "regex": ""},
            {"max_new_tokens": 125, "frequency_penalty": 0, "beam_width": 1, "regex": ""},
        ),
        ({"repetition_penalty": None}, {"max_new_tokens": 125, "repetition_penalty": None}),
        ({"n": 1, "top_p": 0.5, "sampling_seed": 7}, {"max_new_tokens": 125, "top_p": 0.5, "sampling_seed": 7}),
    ],
)
async def test_what_was_sampled_is_prompt_now_and_the_budget_less(given: dict[str, Any], left: dict[str, Any]) -> None:
    generation = cut({"input_ids": [1, 2], "sampling_params": given}, [7, 8, 9])
    assert await asked(generation) == {"input_ids": [1, 2, 7, 8, 9], "sampling_params": left}


async def test_what_is_said_of_the_prompt_is_not_asked_again_and_everything_else_is() -> None:
    kept = {"stream": True, "return_logprob": True, "top_logprobs_num": 2, "lora_path": "l", "other": {}}
    generation = cut({"text": "ab", "logprob_start_len": 0, "rid": "r", **kept}, [7])
    assert await asked(generation) == {"input_ids": [97, 98, 7], "sampling_params": {"max_new_tokens": 127}, **kept}


async def test_rows_of_experts_are_asked_for_from_the_first_that_is_missing() -> None:
    generation = cut({"input_ids": [1, 2], "return_routed_experts": True, "routed_experts_start_len": 1}, [7])
    assert (await asked(generation))["routed_experts_start_len"] == 1
    generation.rows_from[ROUTED_EXPERTS] = 2
    assert (await asked(generation))["routed_experts_start_len"] == 2


@pytest.mark.parametrize("field", [*sorted(STATEFUL), *PENALTIES])
async def test_sampling_that_looks_back_is_not_carried_on_unless_it_has_only_queued(field: str) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {field: 1.5 if field in PENALTIES else "x"}}
    with pytest.raises(CannotResume, match=field):
        await asked(cut(body, [7]))
    assert await asked(cut(body, [])) == body


@pytest.mark.parametrize("field", sorted(STATEFUL))
async def test_nor_is_a_request_whose_answers_cannot_be_joined(field: str) -> None:
    with pytest.raises(CannotResume, match=field):
        await asked(cut({"input_ids": [1, 2], field: True}, [7]))


async def test_a_tokenizer_that_gives_another_prompt_is_not_believed() -> None:
    with pytest.raises(CannotResume, match="tokenizer"):
        await asked(cut({"text": "abc"}, [7]))
