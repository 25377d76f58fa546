"""One generation between its attempts: what was asked for, what has come, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.answers import GenerateAnswer, UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.generate import GenerateRequest
from miles_router.errors import RouterError
from miles_router.generation.generation import (
    CUT,
    ENDED,
    GIVEN_UP,
    OPAQUE,
    RUNNING,
    CannotResume,
    GenerationState,
    ResumableGeneration,
    generations_of,
)
from miles_router.trajectory.rows import ROUTED_EXPERTS

IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
ABORT = {"type": "abort", "message": "Aborted"}


def generation(**request: Any) -> ResumableGeneration:
    (made,) = generations_of(GenerateRequest.read({"input_ids": [1], **request}))
    return made


def answer(text: str, ids: list[int], count: int, version: str = "1", **meta: Any) -> dict[str, Any]:
    """One event; `count` tokens have come by now."""
    said = {"id": "r", "finish_reason": None, "prompt_tokens": 1, "weight_version": version, "completion_tokens": count}
    logprobs = {"output_token_logprobs": [[-1.0, token, None] for token in ids]}
    return {"text": text, "output_ids": ids, "meta_info": {**said, **logprobs, **meta}}


@pytest.mark.parametrize(("stop", "stops"), [(None, []), ("a", ["a"]), (["a", "", "b"], ["a", "b"]), ("", [])])
def test_an_empty_stop_string_stops_nothing(stop: object, stops: list[str]) -> None:
    assert generation(sampling_params={"stop": stop}).stops == stops


tokens = st.lists(st.tuples(st.sampled_from("abé"), st.integers(0, 9)), min_size=1, max_size=6)


@given(tokens, st.lists(st.integers(1, 3), min_size=6, max_size=6), st.booleans(), st.booleans())
def test_events_of_either_kind_read_at_once_or_when_they_are_needed_say_the_same(
    pieces: list[tuple[str, int]], steps: list[int], incremental: bool, lazily: bool
) -> None:
    made, done, version = generation(return_logprob=True), 0, "1"
    spans: list[dict[str, Any]] = []
    while done < len(pieces):
        before, done = done, min(len(pieces), done + steps.pop())
        if done > 3:
            version = "2"
        new = pieces[before if incremental else 0 : done]
        said = answer("".join(t for t, _ in new), [i for _, i in new], done, version)
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = done
        else:
            spans.append({"version": version, "start": before, "end": done})
        if lazily and made.incremental is False:
            made.keep(orjson.dumps(said), version)
        else:
            made.add(said)
    made.read_kept()
    so_far = made.so_far()
    assert so_far is not None
    ids = [i for _, i in pieces]
    assert (so_far["text"], so_far["output_ids"]) == ("".join(t for t, _ in pieces), ids)
    assert [token for _, token, _ in so_far["meta_info"]["output_token_logprobs"]] == ids
    assert so_far["meta_info"]["weight_versions"] == spans
    assert made.incremental in (None, incremental)
    made.verify(so_far)


def test_of_events_that_say_everything_one_is_kept_for_each_weight_version() -> None:
    made = generation()
    for count in range(1, 9):
        version = "1" if count < 5 else "2"
        made.keep(orjson.dumps(answer("x" * count, [7] * count, count, version)), version)
    assert len(made._kept_events) == 2


def test_kept_bytes_that_are_no_answer_are_refused() -> None:
    for kept in (b'{"weight_version":', b"{}"):
        made = generation()
        made.keep(kept, None)
        with pytest.raises(UnreadableAnswer, match="incomplete"):
            made.read_kept()


@pytest.mark.parametrize(
    ("last", "held_back"),
    [
        (answer("ab", [5, 6], 2), True),
        (answer("ab", [5, 6], 2, finish_reason=ABORT), False),
    ],
)
def test_the_text_is_complete_only_where_the_worker_has_ended_a_running_generation(
    last: dict[str, Any], held_back: bool
) -> None:
    made = generation()
    made.add(last)
    assert made.held_back is held_back
    queued = answer("ab", [5, 6], 2, finish_reason=IN_THE_QUEUE)
    del queued["meta_info"]["prompt_tokens"]
    made.add(queued)
    assert made.held_back, "SGLang aborts it without its prompt's length, and without what it had held back"


def test_rows_of_a_leg_that_sampled_nothing_do_not_count() -> None:
    made = generation(return_routed_experts=True, routed_experts_start_len=1)
    made.add(answer("", [], 0, finish_reason=IN_THE_QUEUE, routed_experts="AAAA"))
    made.next_attempt()
    assert made.rows_from[ROUTED_EXPERTS] == 1, "the next attempt is the first one again"
    made.add(answer("a", [5], 1, finish_reason=ABORT, routed_experts="AAAA"))
    made.next_attempt()
    assert made.rows_from[ROUTED_EXPERTS] == 1 + 1 - 1


def test_rows_that_an_engine_repeats_whole_are_those_of_the_sampling() -> None:
    def rows(*each: bytes) -> str:
        return base64.b64encode(b"".join(each)).decode()

    made = generation(return_indexer_topk=True)
    made.add(answer("ab", [5, 6], 2, finish_reason=ABORT, indexer_topk=rows(b"old0", b"old1")))
    made.next_attempt()
    again = answer("c", [7], 1, finish_reason=ABORT, indexer_topk=rows(b"new0", b"new1", b"new2"))
    again["meta_info"]["prompt_tokens"] = 3
    made.add(again)
    joined = made.so_far()
    assert joined is not None
    assert joined["meta_info"]["indexer_topk"] == rows(b"old0", b"old1", b"new2")


@pytest.mark.parametrize(
    "said",
    [
        None,
        7,
        [],
        {},
        {"output_ids": [1]},
        {"output_ids": 1, "meta_info": {}},
        {"text": 1, "output_ids": [], "meta_info": {}},
        {"output_ids": [], "meta_info": {"finish_reason": "stop"}},
        {"output_ids": [], "meta_info": {"completion_tokens": "1"}},
        {"output_ids": [], "meta_info": {"prompt_tokens": "1"}},
        {"output_ids": [], "meta_info": {"routed_experts": 1}},
        {"output_ids": [], "meta_info": {"weight_versions": [{"version": "1", "start": 0}]}},
        {"output_ids": [], "meta_info": {"output_token_logprobs": {}}},
    ],
)
def test_what_is_no_answer_is_refused_and_changes_nothing(said: object) -> None:
    made = generation()
    with pytest.raises(UnreadableAnswer):
        made.add(said)
    assert made.so_far() is None


def test_a_worker_without_a_tokenizer_gives_no_text() -> None:
    made = generation()
    made.add({"output_ids": [1], "meta_info": {}})
    assert made.so_far() == {"text": "", "output_ids": [1], "meta_info": {}}


def test_an_answer_to_another_prompt_does_not_continue_it() -> None:
    made = generation(input_ids=[1, 2])
    made.add(answer("a", [7], 1, prompt_tokens=2))
    made.next_attempt()
    with pytest.raises(CannotResume, match="prompt"):
        made.add(answer("b", [8], 1, prompt_tokens=2))
    assert made.current is None
    made.add(answer("b", [8], 1, prompt_tokens=3))


# What does not fit together

VERSIONED = [{"version": "1", "start": 0, "end": 1}]


@pytest.mark.parametrize(
    "said",
    [
        answer("b", [8], 1, output_token_logprobs=None),
        answer("b", [8], 1, output_top_logprobs=[]) | {},
        answer("b", [8], 1, weight_version=None),
    ],
    ids=["no logprobs", "no top logprobs", "no versions"],
)
def test_attempt_that_lacks_fields_is_refused_and_earlier_ones_stay(said: dict[str, Any]) -> None:
    made = generation(return_logprob=True)
    before = answer("a", [7], 1, finish_reason=ABORT, output_top_logprobs=[[[-1.0, 7, None]]])
    made.add(before)
    made.next_attempt()
    said["meta_info"] |= {"prompt_tokens": 2, "finish_reason": {"type": "length", "length": 1}}
    made.add(said)
    with pytest.raises(UnreadableAnswer):
        made.next_attempt()
    left = made.consistent_answer()
    assert left is not None
    assert left["output_ids"] == [7]
    assert "resumed" not in left["meta_info"]


def test_an_answer_without_the_logprobs_that_were_asked_for_is_not_carried_on() -> None:
    made = generation(return_logprob=True)
    made.add({"text": "a", "output_ids": [7], "meta_info": {"id": "r", "finish_reason": ABORT}})
    with pytest.raises(UnreadableAnswer, match="incomplete"):
        made.next_attempt()
    assert made.consistent_answer() == {
        "text": "a",
        "output_ids": [7],
        "meta_info": {"id": "r", "finish_reason": ABORT},
    }


def test_less_than_a_client_was_shown_is_not_left() -> None:
    made = generation()
    made.add(answer("a", [7], 1, finish_reason=ABORT))
    made.next_attempt()
    made.shown_ids = 2
    assert made.consistent_answer() is None


def test_an_answer_joined_of_legs_is_one_that_can_be_read() -> None:
    made = generation(return_logprob=True)
    made.add(answer("ab", [5, 6], 2, finish_reason=ABORT, weight_versions=[{"version": "1", "start": 0, "end": 2}]))
    made.next_attempt()
    last = {"type": "length", "length": 1}
    made.add(answer("c", [7], 1, "2", finish_reason=last, prompt_tokens=3))
    joined = made.so_far()
    read = GenerateAnswer.read(joined)
    assert (read.text, read.ids, read.versions) == ("abc", [5, 6, 7], [("1", 0, 2), ("2", 2, 3)])


def test_how_a_client_is_told_is_what_events_have_shown_or_else_what_the_engine_says() -> None:
    made = generation()
    assert not made.streams_deltas
    made.facts = Facts(incremental_streaming=True)
    assert made.streams_deltas
    made.add(answer("a", [5], 1))
    made.add(answer("ab", [5, 6], 2))
    assert not made.streams_deltas


def test_what_cannot_be_resumed_is_no_answer_to_a_client() -> None:
    """It is caught where generations are carried on; were it to escape, it would be a defect and not a typed error."""
    assert not issubclass(CannotResume, RouterError)
    assert not issubclass(UnreadableAnswer, RouterError)


HAPPENS: dict[str, Callable[[ResumableGeneration], None]] = {
    "next attempt": ResumableGeneration.next_attempt,
    "cut": lambda made: made.cut(Facts(), ABORT),
    "unreadable event": ResumableGeneration.mark_unreadable,
    "end": ResumableGeneration.end,
    "giving up": ResumableGeneration.give_up,
}
STATES = {RUNNING: [], CUT: ["cut"], OPAQUE: ["unreadable event"], ENDED: ["end"], GIVEN_UP: ["cut", "giving up"]}
REFUSED = {
    *((OPAQUE, each) for each in ("next attempt", "cut", "giving up")),
    *((ENDED, each) for each in ("next attempt", "end")),
    *((GIVEN_UP, each) for each in HAPPENS),
}


@pytest.mark.parametrize("event", HAPPENS)
@pytest.mark.parametrize("state", GenerationState)
def test_what_cannot_follow_a_state_is_refused_by_name(state: GenerationState, event: str) -> None:
    made = generation()
    for each in STATES[state]:
        HAPPENS[each](made)
    assert made.state is state
    if (state, event) not in REFUSED:
        HAPPENS[event](made)
        assert made.state is state or state in (RUNNING, CUT) or (state, event) == (OPAQUE, "end")
        return
    with pytest.raises(RuntimeError, match=f"{state.value}: {event}"):
        HAPPENS[event](made)
    assert made.state is state


@given(st.lists(st.sampled_from([*HAPPENS])))
def test_a_generation_that_was_unreadable_ended_or_given_up_is_never_continued(events: list[str]) -> None:
    made, over = generation(), False
    for each in events:
        over = over or made.state not in (RUNNING, CUT)
        with suppress(RuntimeError):
            HAPPENS[each](made)
        assert not over or made.state not in (RUNNING, CUT)
        assert not made.is_cut or made.abort == ABORT
