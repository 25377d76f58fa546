"""Joining: any cut of an answer gives the uncut answer."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.rows import cut_rows
from miles_router.generation.joining import (
    find_stop_across,
    join,
    join_base64,
    join_spans,
    stop_may_form,
    truncate,
)

PROMPT = 3
LENGTH = {"type": "length"}
ABORT = {"type": "abort", "message": "Aborted"}


class Whole:
    """A generation, and what an engine answers of any stretch of it."""

    def __init__(self, pieces: Sequence[str], versions: Sequence[str], row_bytes: int, experts_start: int = 0) -> None:
        self.pieces = pieces
        self.versions = versions
        self.start = experts_start
        self.rows = [bytes((7 * row + column) % 256 for column in range(row_bytes)) for row in range(200)]

    def answer(self, begin: int, end: int) -> dict[str, Any]:
        """Tokens `begin` to `end`, by an engine that was given those before as its prompt."""
        ids = list(range(100 + begin, 100 + end))
        rows = self.rows[PROMPT + begin - 1 if begin else self.start : PROMPT + end - 1]
        meta = {
            "id": "r" if not begin else f"r-{begin}",
            "finish_reason": {**LENGTH, "length": end - begin} if end == len(self.pieces) else ABORT,
            "prompt_tokens": PROMPT + begin,
            "completion_tokens": end - begin,
            "cached_tokens": 2 if not begin else PROMPT + begin - 1,
            "num_retractions": 0,
            "output_token_logprobs": [[-0.5 * id, id, None] for id in ids],
            "output_token_logprobs_length": end - begin,
            "output_top_logprobs": [[[-0.25, id, None]] for id in ids],
            "weight_version": self.versions[end - 1] if end else "",
            "weight_versions": spans(self.versions[begin:end]),
            "routed_experts": base64.b64encode(b"".join(rows)).decode(),
        }
        return {"text": "".join(self.pieces[begin:end]), "output_ids": ids, "meta_info": meta}


def spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """As SGLang writes them: one span a run, and one that is empty where there is nothing."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": version, "start": at, "end": at + 1})
    return found or [{"version": "0", "start": 0, "end": 0}]


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    pieces = draw(st.lists(st.text(max_size=3), min_size=1, max_size=12))
    versions = sorted(draw(st.lists(st.sampled_from("123"), min_size=len(pieces), max_size=len(pieces))))
    return Whole(pieces, versions, draw(st.integers(1, 9)), draw(st.integers(0, PROMPT - 1)))


@given(wholes(), st.data())
def test_joining_any_cut_gives_the_uncut_answer(whole: Whole, data: st.DataObject) -> None:
    end = len(whole.pieces)
    places = sorted(data.draw(st.lists(st.integers(1, end), max_size=5)))
    bounds = [0, *places, end]
    parts = [whole.answer(begin, after) for begin, after in itertools.pairwise(bounds)]
    joined = parts[0]
    for part in parts[1:]:
        joined = join(joined, part)
    expected = whole.answer(0, end)
    if places:
        expected["meta_info"]["resumed"] = len(places)
    assert joined == expected


@given(wholes(), st.data())
def test_a_cut_answer_is_what_the_engine_would_have_said_had_it_stopped_there(
    whole: Whole, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, len(whole.pieces)))
    expected = whole.answer(0, tokens)
    expected["meta_info"]["finish_reason"] = {"type": "stop", "matched": "x"}
    text = expected["text"]
    whole_answer = whole.answer(0, len(whole.pieces))
    request = {"routed_experts_start_len": whole.start}
    assert truncate(whole_answer, tokens, text, {"type": "stop", "matched": "x"}, request=request) == expected


@pytest.mark.parametrize(
    ("data", "rows", "start", "stop"), [(b"AABBC", 2, 0, 1), (b"AABBCC", 3, 2, 1), (b"AABBCC", 3, 0, 4)]
)
def test_bytes_that_are_no_such_rows_are_not_cut(data: bytes, rows: int, start: int, stop: int) -> None:
    with pytest.raises(UnreadableAnswer, match="rows"):
        cut_rows(base64.b64encode(data).decode(), rows, start, stop)


def test_parts_are_not_changed() -> None:
    whole = Whole("abcd", "1122", 4)
    parts = [whole.answer(0, 2), whole.answer(2, 4)]
    join(*parts)
    truncate(parts[0], 1, "a", LENGTH)
    assert parts == [whole.answer(0, 2), whole.answer(2, 4)]


def test_a_part_that_sampled_nothing_leaves_the_next_as_it_is() -> None:
    whole = Whole("ab", "12", 4)
    queued = {"text": "", "output_ids": [], "meta_info": {"id": "mine", "finish_reason": ABORT, "weight_version": "0"}}
    prefilled = whole.answer(0, 0)
    prefilled["meta_info"]["id"] = "mine"
    assert prefilled["meta_info"]["routed_experts"], "there are rows of the prompt"
    expected = whole.answer(0, 2)
    expected["meta_info"] |= {"id": "mine", "resumed": 1, "cached_tokens": 7}
    answer = whole.answer(0, 2)
    answer["meta_info"]["cached_tokens"] = 7
    assert join(queued, answer) == expected
    assert join(prefilled, answer) == expected


def test_what_adds_up_is_added_and_what_is_absent_stays_absent() -> None:
    def part(**meta: Any) -> dict[str, Any]:
        return {"text": "", "output_ids": [1], "meta_info": {"finish_reason": ABORT, **meta}}

    joined = join(part(num_retractions=1, e2e_latency=0.5), part(num_retractions=2, e2e_latency=0.25))
    assert joined["meta_info"] == {"num_retractions": 3, "e2e_latency": 0.75, "finish_reason": ABORT, "resumed": 1}


@given(st.lists(st.binary(max_size=7), max_size=5))
def test_base64_is_joined_whatever_its_padding(parts: list[bytes]) -> None:
    joined = ""
    for part in parts:
        joined = join_base64(joined, base64.b64encode(part).decode())
    assert base64.b64decode(joined, validate=True) == b"".join(parts)
    assert joined == base64.b64encode(b"".join(parts)).decode()


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4), max_size=5))
def test_spans_cover_without_gap_and_neighbours_differ(parts: list[list[str]]) -> None:
    joined: list[dict[str, Any]] = []
    before = 0
    for part in parts:
        joined = join_spans(joined, spans(part), before)
        before += len(part)
    every = [version for part in parts for version in part]
    assert joined == (spans(every) if every else [])


@pytest.mark.parametrize(
    ("text", "boundary", "stops", "found"),
    [
        ("one END two", 6, ["END"], (4, "END")),
        ("one END two", 5, ["END"], (4, "END")),
        ("one END two", 4, ["END"], None),  # the second part's engine saw all of it
        ("one END two", 7, ["END"], None),  # the first part's engine did
        ("one EN", 5, ["END"], None),
        ("abcd", 2, ["bcd", "bc", "abc"], (0, "abc")),
        ("ab", 1, ["a", "b"], None),
        ("", 0, ["a"], None),
        ("ab", 1, [], None),
        ("xENENDx", 4, ["END"], (3, "END")),
    ],
)
def test_a_stop_string_across_the_cut_is_found_and_no_other(
    text: str, boundary: int, stops: list[str], found: tuple[int, str] | None
) -> None:
    assert find_stop_across(text, boundary, stops) == found


@given(
    st.text("ab", max_size=8), st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_straddling_agrees_with_a_search_of_every_place(first: str, second: str, stops: list[str]) -> None:
    text, boundary = first + second, len(first)
    places = [
        (at, stop)
        for at in range(boundary)
        for stop in stops
        if text.startswith(stop, at) and at + len(stop) > boundary
    ]
    assert find_stop_across(text, boundary, stops) == min(places, default=None)


@given(
    st.text("ab", max_size=8), st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_a_stop_string_is_forming_exactly_if_something_could_complete_it(
    first: str, second: str, stops: list[str]
) -> None:
    text, boundary = first + second, len(first)
    ends = ("".join(more) for size in range(5) for more in itertools.product("ab", repeat=size))
    seen = find_stop_across(text, boundary, stops)
    could = any(
        text.startswith(stop[: len(text) - at], at) and len(stop) > len(text) - at
        for at in range(boundary)
        for stop in stops
    )
    assert stop_may_form(text, boundary, stops) is could
    if not could:
        assert all(find_stop_across(text + end, boundary, stops) == seen for end in ends)
