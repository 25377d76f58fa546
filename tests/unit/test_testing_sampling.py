"""Sampling is repeatable, and what SGLang refuses is refused in its words."""

import random
import re
from typing import Any

import pytest

from miles_router.testing.worker.model.constrained import instance_of, script_for, spelled, text_matching
from miles_router.testing.worker.model.sampling import Sampler, context_hash, key_of
from miles_router.testing.worker.model.vocabulary import ToyTokenizer
from miles_router.testing.worker.wire.sampling_params import SamplingParams, WrongType

STOP_IDS = {7, 8}


def sampler(seed: int = 0, stop_probability: float = 0.0) -> Sampler:
    return Sampler(seed=seed, vocab_size=1000, stop_ids=STOP_IDS, stop_probability=stop_probability)


def draw(source: Sampler, noise: int, count: int = 50) -> list[int]:
    context, drawn = context_hash([1, 2, 3]), []
    for position in range(count):
        drawn.append(source.sampled(context, noise, position))
        context = context_hash(drawn[-1:], context)
    return drawn


def test_the_hash_of_a_context_can_be_continued() -> None:
    assert context_hash([3, 4], context_hash([1, 2])) == context_hash([1, 2, 3, 4])


def test_the_same_seed_noise_and_context_draw_the_same_ids() -> None:
    assert draw(sampler(), 5) == draw(sampler(), 5)


def test_other_seeds_and_other_noise_draw_other_ids() -> None:
    assert len({tuple(draw(sampler(seed), noise)) for seed in (0, 1) for noise in (5, 6)}) == 4


def test_ids_come_from_the_whole_vocabulary() -> None:
    drawn = draw(sampler(), 1, 5000)
    assert min(drawn) >= 0
    assert max(drawn) < 1000
    assert len(set(drawn)) > 900


def test_a_stop_id_comes_as_often_as_asked() -> None:
    stops = sum(token in STOP_IDS for token in draw(sampler(stop_probability=0.2), 1, 5000))
    assert 900 < stops < 1150


def test_greedy_depends_on_the_context_alone() -> None:
    assert sampler().greedy(11) == sampler().greedy(11)
    assert len({sampler().greedy(context) for context in range(50)}) > 40


def test_logprobs_are_negative_exact_in_float32_and_highest_for_the_favourite() -> None:
    source, context = sampler(), context_hash([1])
    values = {token: source.logprob(context, token) for token in range(1000)}
    assert max(values, key=lambda token: values[token]) == source.greedy(context)
    assert all(-10 < value < 0 and value * 2**16 == int(value * 2**16) for value in values.values())


def test_top_logprobs_are_sorted_and_agree_with_the_logprobs() -> None:
    source, context = sampler(), context_hash([1])
    top = source.top_logprobs(context, 5)
    assert top == sorted(top, reverse=True)
    assert top[0][1] == source.greedy(context)
    assert all(value == source.logprob(context, token) for value, token in top)


def test_keys_of_strings_are_the_same_in_every_process() -> None:
    assert key_of("a") == 0xB4D848021B26C4C
    assert key_of("a") != key_of("b")


def test_defaults_are_sglangs() -> None:
    params = SamplingParams.from_json({})
    assert (params.max_new_tokens, params.temperature, params.n) == (128, 1.0, 1)
    assert not params.greedy


def test_null_is_the_default_except_for_the_budget() -> None:
    params = SamplingParams.from_json({"max_new_tokens": None, "temperature": None, "stop": None})
    assert params.max_new_tokens is None
    assert params.temperature == 1.0


@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 1e-7}, {"top_k": 1}])
def test_temperature_zero_and_top_k_one_are_greedy(given: dict[str, Any]) -> None:
    assert SamplingParams.from_json(given).greedy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        ({"min_new_tokens": 2, "max_new_tokens": 1}, "min_new_tokens must be in [0, max_new_tokens(1)], got 2."),
        ({"regex": "a", "json_schema": "{}"}, "Only one of json_schema, regex, ebnf, or structural_tag can be set."),
        ({"stop": ["x"] * 33}, "at most 32 stop strings are allowed, got 33"),
    ],
)
def test_values_out_of_range_are_refused_in_sglangs_words(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams.from_json(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": "x"}, 'invalid type: string "x", expected f64'),
        ({"max_new_tokens": 1.5}, "invalid type: floating point `1.5`, expected i64"),
        ({"ignore_eos": 1}, "invalid type: integer `1`, expected a boolean"),
        ({"stop": {}}, "invalid type: map, expected a value or an array of values for StringOrList"),
    ],
)
def test_values_of_a_wrong_type_are_refused_in_sglangs_words(given: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongType, match=f"^{re.escape(message)}$"):
        SamplingParams.from_json(given)


def test_an_unknown_parameter_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(WrongType, match=r"^unknown field `foo`, expected one of `max_new_tokens`, `stop`, "):
        SamplingParams.from_json({"foo": 1})


@pytest.mark.parametrize("pattern", ["(yes|no)", r"[a-f0-9]{4}-\d+", "^a+b*c?$", r"x(\s|\w)y"])
def test_a_made_up_text_matches_its_pattern(pattern: str) -> None:
    for seed in range(20):
        assert re.fullmatch(pattern, text_matching(pattern, random.Random(seed)))


def test_a_pattern_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot make up a text"):
        text_matching("(?=a)b", random.Random(0))


def test_a_made_up_value_fits_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome"]},
            "days": {"type": "integer", "minimum": 2, "maximum": 3},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            "note": {"anyOf": [{"type": "null"}]},
        },
    }
    value = instance_of(schema, random.Random(1))
    assert value["city"] == "Rome"
    assert value["days"] in (2, 3)
    assert [type(tag) for tag in value["tags"]] == [bool, bool]
    assert value["note"] is None


def test_a_made_up_text_is_spelled_as_encoding_would_not() -> None:
    toy, text = ToyTokenizer(), "the weather in the world today"
    ids = spelled(text, toy, random.Random(0))
    assert toy.decode(ids) == text
    assert ids != toy.encode(text)


def test_constrained_sampling_ends_with_a_stop_id() -> None:
    toy = ToyTokenizer()
    ids = script_for(SamplingParams(regex="(yes|no)"), toy, 1)
    assert ids is not None
    assert toy.decode(ids[:-1]) in ("yes", "no")
    assert ids[-1] in toy.eos_token_ids


def test_grammars_are_refused_rather_than_ignored() -> None:
    with pytest.raises(ValueError, match="no grammars"):
        script_for(SamplingParams(ebnf="root ::= x"), ToyTokenizer(), 1)
