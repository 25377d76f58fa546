"""Answers of `/generate`: read strictly, and put together from streams of either kind."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.answers import GenerateAnswer, UnreadableAnswer, version_runs, without_logprobs
from miles_router.engines.growing import GrowingAnswer


def answer(**changed: Any) -> dict[str, Any]:
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 9},
        "completion_tokens": 2,
        "prompt_tokens": 3,
        "weight_version": "v2",
        "weight_versions": [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 2}],
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        **changed,
    }
    return {"text": "ab", "output_ids": [7, 9], "meta_info": {k: v for k, v in meta.items() if v is not ...}}


def test_an_answer_says_what_was_sampled() -> None:
    read = GenerateAnswer.read(answer())
    assert (read.text, read.ids, read.logprobs, read.rid) == ("ab", [7, 9], [-0.5, -0.25], "r")
    assert (read.finish, read.matched) == ("stop", 9)
    assert read.versions == [("v1", 0, 1), ("v2", 1, 2)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"completion_tokens": 3}, "token_counts_disagree"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "token_counts_disagree"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]]}, "logprobs_of_other_tokens"),
        ({"output_token_logprobs": ...}, "incomplete"),
        ({"output_token_logprobs": None}, "incomplete"),
        ({"finish_reason": None}, "incomplete"),
        ({"id": ...}, "incomplete"),
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 1}]}, "versions_end_elsewhere"),
        ({"weight_versions": [{"version": "v1", "start": 1, "end": 2}]}, "versions_leave_gaps"),
        (
            {"weight_versions": [{"version": 1, "start": 0, "end": 1}, {"version": 2, "start": 0, "end": 2}]},
            "versions_leave_gaps",
        ),
        ({"weight_versions": [{"version": 1, "start": 0, "end": 3}]}, "versions_end_elsewhere"),
        ({"weight_versions": [{"version": 1}]}, "incomplete"),
        ({"weight_versions": [{"version": 1, "start": 0.0, "end": 2.0}]}, "incomplete"),
        ({"weight_versions": [{"version": None, "start": 0, "end": 2}]}, "incomplete"),
        ({"finish_reason": {"type": 3}}, "incomplete"),
    ],
)
def test_an_answer_that_lacks_something_or_contradicts_itself_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableAnswer) as refused:
        GenerateAnswer.read(answer(**changed))
    assert refused.value.reason == reason


@pytest.mark.parametrize("text", [7, None, ["a"]])
def test_an_answer_whose_text_is_no_text_is_refused(text: object) -> None:
    with pytest.raises(UnreadableAnswer, match="incomplete"):
        GenerateAnswer.read({**answer(), "text": text})


def test_logprobs_that_were_not_asked_for_may_be_missing_and_must_not_be_others() -> None:
    assert GenerateAnswer.read(answer(output_token_logprobs=...), logprobs=False).logprobs == []
    assert GenerateAnswer.read(answer(), logprobs=False).logprobs == [-0.5, -0.25]
    with pytest.raises(UnreadableAnswer, match="logprobs_of_other_tokens"):
        GenerateAnswer.read(answer(output_token_logprobs=[[-0.5, 7, None], [-0.25, 8, None]]), logprobs=False)


def test_one_version_is_that_of_all_tokens_and_none_is_none() -> None:
    assert version_runs({"weight_version": 3}, 2) == [("3", 0, 2)]
    assert version_runs({"weight_version": 3}, 0) == []
    assert version_runs({}, 2) == []
    empty = [{"version": "a", "start": 0, "end": 0}, {"version": "b", "start": 0, "end": 2}]
    assert version_runs({"weight_versions": empty}, 2) == [("b", 0, 2)]


def test_logprobs_are_taken_out_and_anything_else_is_left_alone() -> None:
    assert "output_token_logprobs" not in without_logprobs(answer())["meta_info"]
    assert without_logprobs(answer())["meta_info"]["completion_tokens"] == 2
    others: list[Any] = [None, [], {"meta_info": 1}, {"error": {}}]
    for other in others:
        assert without_logprobs(other) is other


def events(ids: list[int], cuts: list[int], *, incremental: bool, more: int, every: int) -> list[dict[str, Any]]:
    """A stream of `ids`, cut after so many tokens each. `more`: ids that a cumulative event has too many; `every`: how
    many events name the same version."""
    made, done = [], 0
    for place, cut in enumerate(cuts):
        last = place == len(cuts) - 1
        extra = 0 if incremental or last else more
        begin, end = (done if incremental else 0), cut + extra
        meta = {
            "id": "r",
            "completion_tokens": cut,
            "weight_version": f"v{place // every}",
            "finish_reason": {"type": "length"} if last else None,
            "output_token_logprobs": [[-1.0, token, None] for token in ids[begin:end]],
        }
        made.append(
            {"text": "".join(chr(97 + t % 26) for t in ids[begin:cut]), "output_ids": ids[begin:end], "meta_info": meta}
        )
        done = cut
    return made


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=30),
    st.data(),
    st.booleans(),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_either_kind_of_stream_grows_into_the_same_answer(
    ids: list[int], data: st.DataObject, incremental: bool, more: int, every: int
) -> None:
    cuts = sorted({*data.draw(st.lists(st.integers(1, len(ids)), max_size=8)), len(ids)})
    growing, skimming = GrowingAnswer(), GrowingAnswer()
    stream = events(ids, cuts, incremental=incremental, more=more, every=every)
    for event, cut in zip(stream, cuts, strict=True):
        assert not growing.ended
        assert not skimming.ended
        grown = growing.add(copy.deepcopy(event))
        skimming.add_lazily(copy.deepcopy(event))
        assert grown is growing.answer
        assert grown["output_ids"] == ids[:cut]
        assert [entry[1] for entry in grown["meta_info"]["output_token_logprobs"]] == ids[:cut]
        assert len(grown["text"]) == cut
    assert growing.ended
    assert growing.incremental is (None if len(cuts) == 1 else incremental)
    bounds = [0, *cuts[every - 1 : -1 : every], len(ids)]
    spans = [{"version": f"v{n}", "start": a, "end": b} for n, (a, b) in enumerate(itertools.pairwise(bounds))]
    assert growing.spans == spans
    assert (skimming.answer, skimming.spans, skimming.ended) == (growing.answer, spans, True)


@pytest.mark.parametrize("ids", [[3], [3, 4, 5]])
def test_an_event_that_fits_neither_kind_is_refused_and_changes_nothing(ids: list[int]) -> None:
    growing = GrowingAnswer()
    first = growing.add({"text": "a", "output_ids": [1], "meta_info": {"completion_tokens": 1}})
    with pytest.raises(UnreadableAnswer, match="token_counts_disagree"):
        growing.add({"text": "b", "output_ids": ids, "meta_info": {"completion_tokens": 9}})
    assert growing.answer is first
    every: list[Any] = [{}, {"text": "a"}, {"text": 1, "output_ids": [], "meta_info": {}}, [], None]
    for broken in every:
        with pytest.raises(UnreadableAnswer, match="incomplete"):
            growing.add(broken)


def test_events_without_a_count_must_repeat_what_has_come() -> None:
    growing = GrowingAnswer()
    growing.add({"text": "a", "output_ids": [1], "meta_info": {}})
    growing.add({"text": "ab", "output_ids": [1, 2], "meta_info": {}})
    with pytest.raises(UnreadableAnswer, match="incomplete"):
        growing.add({"text": "c", "output_ids": [3], "meta_info": {}})
    with pytest.raises(UnreadableAnswer, match="incomplete"):
        growing.add({"text": "cde", "output_ids": [3, 4, 5], "meta_info": {}})


def test_versions_that_only_the_events_named_are_those_of_the_answer() -> None:
    def grown(*named: str | None, **end: Any) -> list[Any]:
        growing = GrowingAnswer()
        for place, version in enumerate(named):
            last = end if place == len(named) - 1 else {}
            meta = {"completion_tokens": place + 1, "weight_version": version, **last}
            growing.add({"text": "", "output_ids": [*range(place + 1)], "meta_info": meta})
        return version_runs(growing.with_versions()["meta_info"], len(named))

    assert grown("1", "1", "2") == [("1", 0, 2), ("2", 2, 3)]
    assert grown("1", "2", weight_versions=[{"version": "2", "start": 0, "end": 2}]) == [("2", 0, 2)]
    assert grown(None, None) == []
    with pytest.raises(UnreadableAnswer, match="incomplete"):
        grown(None, "2")


def event(ids: list[int], count: int, **meta: Any) -> dict[str, Any]:
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": {"completion_tokens": count, **meta}}


def entries(*ids: int) -> list[list[Any]]:
    return [[-1.0, token, None] for token in ids]


QUEUE_ABORT = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (event([1, 3], 2), "tokens_taken_back"),
        (event([3, 3], 2, finish_reason=QUEUE_ABORT), "tokens_taken_back"),
        (event([2, 2], 3, finish_reason=QUEUE_ABORT), "token_counts_disagree"),
        (event([1, 2, 3], 3, output_token_logprobs=entries(1, 2, 4)), "logprobs_of_other_tokens"),
        (event([1, 2, 3], 3, output_token_logprobs=entries(1, 2)), "token_counts_disagree"),
        (event([3], 3, output_token_logprobs=entries(4)), "logprobs_of_other_tokens"),
        (event([3], 3), "token_counts_disagree"),
        (event([3], 3, output_token_logprobs=entries(3), output_top_logprobs=7), "incomplete"),
        (event([1, 2, 3], 3, output_token_logprobs=[7, 7, 7]), "invalid_tokens"),
        (
            event([1, 2], 2, output_token_logprobs=entries(4, 2), finish_reason={"type": "stop"}),
            "logprobs_of_other_tokens",
        ),
        (
            event([3], 3, output_token_logprobs=entries(3), weight_versions=[{"version": "1", "start": 0, "end": 2}]),
            "versions_end_elsewhere",
        ),
    ],
)
def test_contradictory_event_is_refused_and_changes_nothing(second: dict[str, Any], reason: str) -> None:
    growing = GrowingAnswer()
    growing.add(event([1, 2], 2, output_token_logprobs=entries(1, 2)))
    before = copy.deepcopy((growing.answer, growing.spans, growing.incremental))
    with pytest.raises(UnreadableAnswer) as refused:
        growing.add(second)
    assert refused.value.reason == reason
    assert (growing.answer, growing.spans, growing.incremental) == before


def test_an_abort_that_repeats_the_only_token_does_not_tell_the_kind_of_stream() -> None:
    """SGLang 0.5.23 repeats the last id of an incremental stream, which may be the only one."""
    growing = GrowingAnswer()
    growing.add(event([1], 1))
    growing.add(event([1], 1, finish_reason=QUEUE_ABORT))
    assert growing.incremental is None


def test_an_abort_in_the_queue_repeats_what_has_come() -> None:
    growing = GrowingAnswer()
    growing.add({"text": "a", "output_ids": [1], "meta_info": {"completion_tokens": 1, "prompt_tokens": 4}})
    growing.add({"text": "b", "output_ids": [2], "meta_info": {"completion_tokens": 2}})
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    said = {"text": "b", "output_ids": [2], "meta_info": {"completion_tokens": 2, "finish_reason": abort}}
    assert growing.add(said) == {
        "text": "ab",
        "output_ids": [1, 2],
        "meta_info": {"completion_tokens": 2, "prompt_tokens": 4, "finish_reason": abort},
    }
