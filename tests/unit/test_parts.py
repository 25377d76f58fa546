"""The generations of a request, and what is kept of their answers."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.events import event
from miles_router.partial_rollouts import glance
from miles_router.partial_rollouts.parts import Part, split, understood

IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


def part(**request: Any) -> Part:
    (made,) = split({"input_ids": [1], **request})
    return made


def answer(text: str, ids: list[int], count: int, version: str = "1", **meta: Any) -> dict[str, Any]:
    """One event; `count` tokens have come by now."""
    said = {"id": "r", "finish_reason": None, "prompt_tokens": 1, "weight_version": version, "completion_tokens": count}
    logprobs = {"output_token_logprobs": [[-1.0, token, None] for token in ids]}
    return {"text": text, "output_ids": ids, "meta_info": {**said, **logprobs, **meta}}


# The generations of a request


@pytest.mark.parametrize(
    ("body", "requests"),
    [
        ({"text": "a", "rid": "r"}, [{"text": "a", "rid": "r"}]),
        ({"text": ["a", "b"], "rid": "r"}, [{"text": "a", "rid": "r_0"}, {"text": "b", "rid": "r_1"}]),
        ({"text": ["a"], "rid": ["q"]}, [{"text": "a", "rid": "q"}]),
        ({"input_ids": [5, 6]}, [{"input_ids": [5, 6]}]),
        ({"input_ids": [[5], [6]]}, [{"input_ids": [5]}, {"input_ids": [6]}]),
        ({"text": "a", "input_ids": [5]}, [{"input_ids": [5]}]),
        # no field of SGLang's, which ignores it
        ({"text": "a", "input_tokens": [5]}, [{"text": "a", "input_tokens": [5]}]),
        (
            {"text": ["a", "b"], "logprob_start_len": [0, 3]},
            [{"text": "a", "logprob_start_len": 0}, {"text": "b", "logprob_start_len": 3}],
        ),
        ({"text": ["a", "b"], "token_ids_logprob": [7, 8]}, [{"text": t, "token_ids_logprob": [7, 8]} for t in "ab"]),
        (
            {"text": ["a", "b"], "token_ids_logprob": [[7], [8]]},
            [{"text": "a", "token_ids_logprob": [7]}, {"text": "b", "token_ids_logprob": [8]}],
        ),
        ({"text": "a", "image_data": ["1", "2"]}, [{"text": "a", "image_data": ["1", "2"]}]),
    ],
)
def test_each_generation_has_what_is_its_own(body: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    parts = split(body)
    assert [{k: v for k, v in each.request.items() if k != "sampling_params"} for each in parts] == requests
    assert [each.index for each in parts] == list(range(len(requests)))
    listed = isinstance(body.get("text"), list) or isinstance((body.get("input_ids") or [0])[0], list)
    assert {each.streamed_index for each in parts} == {listed}


def test_several_samples_of_a_prompt_are_generations_without_a_name() -> None:
    parts = split({"text": ["a", "b"], "rid": "r", "sampling_params": {"n": 2, "top_p": 0.5}})
    assert [each.request["text"] for each in parts] == ["a", "a", "b", "b"]
    assert all("rid" not in each.request and each.request["sampling_params"] == {"top_p": 0.5} for each in parts)


@pytest.mark.parametrize(
    "body",
    [
        {"text": []},
        {"text": "a", "sampling_params": {"n": 10**9}},
        {"text": "a", "sampling_params": {"n": "2"}},
        {"text": "a", "sampling_params": {"n": 0}},
        {"text": ["a"], "sampling_params": [7]},
    ],
)
def test_what_is_no_request_is_none(body: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        split(body)


@pytest.mark.parametrize(("stop", "stops"), [(None, []), ("a", ["a"]), (["a", "", "b"], ["a", "b"]), ("", [])])
def test_an_empty_stop_string_stops_nothing(stop: object, stops: list[str]) -> None:
    assert part(sampling_params={"stop": stop}).stops == stops


# What has come

tokens = st.lists(st.tuples(st.sampled_from("abé"), st.integers(0, 9)), min_size=1, max_size=6)


@given(tokens, st.lists(st.integers(1, 3), min_size=6, max_size=6), st.booleans(), st.booleans())
def test_both_styles_of_events_say_the_same(
    pieces: list[tuple[str, int]], steps: list[int], incremental: bool, lazily: bool
) -> None:
    told, done, version = part(), 0, "1"
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
        if lazily and told.incremental is False:
            told.keep(event(said))
        else:
            told.absorb(said)
    told.read_up()
    so_far = told.so_far()
    assert so_far is not None
    ids = [i for _, i in pieces]
    assert (so_far["text"], so_far["output_ids"]) == ("".join(t for t, _ in pieces), ids)
    assert [token for _, token, _ in so_far["meta_info"]["output_token_logprobs"]] == ids
    assert so_far["meta_info"]["weight_versions"] == spans
    assert told.incremental in (None, incremental)


def test_of_events_that_say_everything_one_is_kept_for_each_weight_version() -> None:
    told = part()
    for count in range(1, 9):
        said = event(answer("x" * count, [7] * count, count, version="1" if count < 5 else "2"))
        told.keep(said)
    assert len(told._unread) == 2


def test_an_abort_in_the_queue_adds_nothing_to_the_events_before_it() -> None:
    """SGLang 0.5.23 repeats the last id and the whole text, and leaves out what it says of the prompt."""
    told = part()
    told.absorb(answer("a", [5], 1, cached_tokens=0))
    told.absorb(answer("b", [6], 2))
    last = answer("ab", [6], 2, finish_reason=IN_THE_QUEUE)
    del last["meta_info"]["prompt_tokens"]
    last["meta_info"]["output_token_logprobs"] = [[-1.0, 5, None], [-1.0, 6, None]]
    told.absorb(last)
    so_far = told.so_far()
    assert so_far is not None
    assert (so_far["text"], so_far["output_ids"]) == ("ab", [5, 6])
    assert len(so_far["meta_info"]["output_token_logprobs"]) == 2
    assert (so_far["meta_info"]["prompt_tokens"], so_far["meta_info"]["cached_tokens"]) == (1, 0)
    assert so_far["meta_info"]["finish_reason"] == IN_THE_QUEUE
    assert told.held_back, "its text may lack what an end would have shown"


def test_rows_of_a_go_that_sampled_nothing_are_not_held() -> None:
    told = part(return_routed_experts=True, routed_experts_start_len=1)
    told.take(answer("", [], 0, finish_reason=IN_THE_QUEUE, routed_experts="AAAA"))
    told.next_go()
    assert told.experts_from == 1, "the next go is the first one again"


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
        {"output_ids": [], "meta_info": {"weight_versions": [{"version": "1", "start": 0}]}},
        {"output_ids": [], "meta_info": {"output_token_logprobs": {}}},
    ],
)
def test_what_is_no_answer_is_not_understood(said: object) -> None:
    assert understood(said) is None


def test_a_worker_without_a_tokenizer_gives_no_text() -> None:
    assert understood({"output_ids": [1], "meta_info": {}}) == {"text": "", "output_ids": [1], "meta_info": {}}


# What is seen without reading

texts = st.text(max_size=20) | st.sampled_from(
    ['"finish_reason":', '"finish_reason":null', '"index":7', '"abort"', "\\"]
)
finishes = st.sampled_from([None, {"type": "length", "length": 3}, IN_THE_QUEUE]) | st.builds(
    lambda matched: {"type": "stop", "matched": matched}, texts
)


@given(texts, finishes, texts, st.none() | st.integers(0, 4000), st.sampled_from([json.dumps, orjson.dumps]))
def test_a_glance_sees_what_reading_would(
    text: str, finish: dict[str, Any] | None, version: str, index: int | None, dumps: Any
) -> None:
    text, version = (each.encode("utf-8", "replace").decode() for each in (text, version))
    said = answer(text, [7], 1, version, finish_reason=finish, more={"finish_reason": None, "index": 5, "a": "b" * 40})
    said |= {} if index is None else {"index": index}
    spelled = dumps(said)
    raw = b"data: %b\n\n" % (spelled if isinstance(spelled, bytes) else spelled.encode())
    seen = glance.finish(raw).lstrip()
    assert seen.startswith(glance.RUNNING) is (finish is None)
    if finish is not None and finish["type"] == "abort":
        assert glance.ABORT in seen
        assert glance.may_be_aborted(raw, 1)
    if dumps is orjson.dumps:
        assert glance.index(raw) == index
        other = event({**said, "text": text + "x"})
        assert glance.version(raw) == glance.version(other)
        changed = {**said["meta_info"], "weight_version": version + "x"}
        assert glance.version(event({**said, "meta_info": changed})) != glance.version(raw)


def test_one_abort_among_several_answers_is_seen() -> None:
    def body(*finishes: object) -> bytes:
        return orjson.dumps([answer("x", [1], 1, finish_reason=finish) for finish in finishes])

    length = {"type": "length", "length": 1}
    assert glance.may_be_aborted(body(length, IN_THE_QUEUE, length), 3)
    assert not glance.may_be_aborted(body(length, length), 2)
    assert glance.may_be_aborted(b"{}", 1), "it cannot be seen"


# SGLang counts an event's ids, and writes the list of them down a moment later


@pytest.mark.parametrize("late", [1, 2])
def test_ids_that_came_while_an_event_was_written_are_those_of_the_next(late: int) -> None:
    made = part()
    events = [answer("a", [1], 1), answer("ab", [1, 2, 3], 2), answer("abcd", [1, 2, 3, 4], 4)]
    for each in events[:late]:
        made.absorb(each)
    assert made.current is not None
    assert made.current["output_ids"] == [1, 2][:late]
    assert len(made.current["meta_info"]["output_token_logprobs"]) == late
    for each in events[late:]:
        made.absorb(each)
    assert made.incremental is False
    assert made.current["output_ids"] == [1, 2, 3, 4]
    assert made.current["text"] == "abcd"


def test_they_may_come_with_the_first_event() -> None:
    made = part()
    made.absorb(answer("a", [1, 2], 1))
    assert made.current is not None
    assert made.current["output_ids"] == [1]
    made.absorb(answer("abc", [1, 2, 3], 3))
    assert made.incremental is False
    assert made.current["output_ids"] == [1, 2, 3]
