"""`POST /retrieve_from_text`, and the cache's numbers at `/metrics` and `/router/info`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.errors import ConfigError
from tests.support.cache_trial import Trial, exactly_recorded, simulated_trial, trial_before
from tests.support.session_apis import case
from tests.support.stage import Stage


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


async def siblings(first: Trial, second: Trial | None = None) -> tuple[str, list[str]]:
    """Two generations with one text and different ids, each by its process: the text, and their ids."""
    assert first.worker is not None
    encode = first.worker.tokenizer.encode
    whole, split = encode(" the"), [*encode(" t"), *encode("h"), *encode("e")]
    assert whole != split
    answers = []
    for trial, ids in ((first, whole), (second or first, split)):
        first.worker.say(ids)
        params = {"max_new_tokens": len(ids), "ignore_eos": True}
        answers.append(await trial.generate(text="This is", sampling_params=params))
    assert [each["text"] for each in answers] == [" the", " the"]
    return "This is the", [each["meta_info"]["id"] for each in answers]


# What is found


async def test_a_generated_text_gives_its_tokens_with_everything_aligned(trial: Trial) -> None:
    answer = await trial.generate(text="one")
    found = await trial.retrieve(text=f"one{answer['text']}")
    (given,) = trial.given()
    assert found["tokens"] == given + answer["output_ids"]
    assert found["loss_mask"] == [0] * len(given) + [1] * 6
    assert found["rollout_logp"][: len(given)] == [0.0] * len(given)
    assert found["rollout_logp"][len(given) :] == pytest.approx(trial.log[-1].generation.logprobs, rel=1e-7)
    assert found["weight_versions"] == [{"version": "default", "start": len(given), "end": len(given) + 6}]
    assert {name: found[name] for name in ("response", "rid", "finish_reason", "finished", "ambiguous")} == {
        "response": f"one{answer['text']}",
        "rid": answer["meta_info"]["id"],
        "finish_reason": "length",
        "finished": True,
        "ambiguous": False,
    }
    assert found["token_length"] == found["loss_mask_length"] == found["matched_tokens"] == len(given) + 6


async def test_a_text_never_generated_is_encoded_and_says_so(trial: Trial) -> None:
    assert trial.worker is not None
    found = await trial.retrieve(text="Nobody generated this.")
    assert found["tokens"] == trial.worker.tokenizer.encode("Nobody generated this.")
    assert found["loss_mask"] == [0] * found["token_length"]
    assert found["rollout_logp"] == [0.0] * found["token_length"]
    assert (found["matched_tokens"], found["weight_versions"], found["rid"]) == (0, [], None)
    assert (found["ambiguous"], found["finished"]) == (False, None)


async def test_strict_refuses_what_was_not_recorded_from_end_to_end(trial: Trial) -> None:
    answer = await trial.generate(text="one")
    whole = f"one{answer['text']}"
    assert (await trial.retrieve(text=whole, strict=True))["finished"]
    for text in ("never", f"{whole} and more", whole[:-1] + "§"):
        refused = await trial.post("/retrieve_from_text", {"text": text, "strict": True})
        assert (refused.status, refused.error_type) == (404, "not_found")


async def test_several_spellings_of_one_text_are_ambiguous_and_a_rid_selects_one(trial: Trial) -> None:
    text, rids = await siblings(trial)
    found = await trial.retrieve(text=text)
    assert found["ambiguous"]
    assert sorted(found["candidates"]) == sorted(rids)
    lengths = []
    for rid in rids:
        one = await trial.retrieve(rid=rid)
        lengths.append(one["token_length"])
        assert (one["response"], one["rid"]) == (text, rid)
        assert not one["ambiguous"], "an id selects exactly one"
        assert await trial.retrieve(rid=rid, text=text) == one
    assert lengths[0] < lengths[1]
    assert trial.statistics()["ambiguous"] == 1


async def test_a_text_with_its_hidden_tail_is_found_too(trial: Trial) -> None:
    assert trial.worker is not None
    trial.worker.say([*trial.worker.tokenizer.encode("Yes."), *trial.worker.tokenizer.encode("<|im_end|>")])
    answer = await trial.generate(text="one", sampling_params={"max_new_tokens": 20})
    assert answer["text"] == "Yes."
    found = [await trial.retrieve(text=f"oneYes.{tail}", strict=True) for tail in ("", "<|im_end|>")]
    assert found[0]["tokens"] == found[1]["tokens"] == trial.given()[0] + answer["output_ids"]


# What is refused


async def test_what_cannot_be_asked_is_refused(trial: Trial) -> None:
    for asked in [
        {"text": ""},
        {"texts": [""]},
        {"texts": ["a", 7]},
        {"texts": []},
        {"texts": "a"},
        {"texts": ["a"] * 5000},
        {"text": 7},
        {"rid": 7},
        {},
        {"strict": True},
        {"text": "a", "strict": "yes"},
        {"text": "a", "return_logp": 1},
        {"text": "a", "texts": ["a"]},
        {"rid": "a", "texts": ["a"]},
        {"text": "a", "unknown": 1},
        ["a"],
        "a",
        None,
    ]:
        with case(asked):
            refused = await trial.post("/retrieve_from_text", asked)
            assert (refused.status, refused.error_type) == (400, "invalid_request")


async def test_an_unknown_rid_is_not_found_and_one_of_another_text_is_refused(trial: Trial) -> None:
    answer = await trial.generate(text="one")
    assert (await trial.post("/retrieve_from_text", {"rid": "unknown"})).status == 404
    rid = answer["meta_info"]["id"]
    assert (await trial.post("/retrieve_from_text", {"rid": rid, "text": "another"})).status == 400


# Numbers


@pytest.mark.alone("what is in memory is bounded in each process")
async def test_a_small_budget_is_kept_and_evictions_are_counted(stage: Stage) -> None:
    async with simulated_trial(stage) as plenty:
        assert plenty.worker is not None
        trial = await trial_before(stage, plenty.worker, max_tokens=100)
        for number in range(30):
            answer = await trial.generate(text=f"{number}")
        numbers = trial.statistics()
        assert numbers["tokens"] + 16 * numbers["entries"] <= 100
        assert numbers["evicted"] == 30 - numbers["entries"]
        await exactly_recorded(trial, answer, trial.given()[0])
        assert (await trial.retrieve(text="0"))["matched_tokens"] == 0


SENSELESS: list[dict[str, Any]] = [{"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": "x"}, {"keep_versions": -1}]


async def test_senseless_options_are_refused_at_the_start(stage: Stage) -> None:
    async with simulated_trial(stage) as plenty:
        for options in SENSELESS:
            with case(options):
                assert plenty.worker is not None
                with pytest.raises(ConfigError, match=next(iter(options))):
                    await trial_before(stage, plenty.worker, **options)
