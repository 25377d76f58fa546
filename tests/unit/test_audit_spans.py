"""Which sampled tokens of a line an audit compares."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.openai_session.audit.spans import Comparable, Distribution, distribution
from middleware_hub.openai_session.audit.spans import comparable as of_line
from middleware_hub.openai_session.sessions.tree import Turn
from miles_router.trajectory import Piece

ANY = 1 << 20
Line = list[Turn]


def comparable(
    line: Line, elsewhere: dict[Turn, int], now: str | None, longest: int, *assumed: dict[str, Any]
) -> Comparable:
    """With what an engine assumes."""
    return of_line(line, elsewhere, now, longest, {turn: distribution(turn, assumed) for turn in line})


def turn(parent: Turn | None, given: int, *sampled: tuple[int, str | None], dropped: int = 0, **facts: Any) -> Turn:
    pieces = tuple(Piece.sampled(range(count), [-1.0] * count, version) for count, version in sampled)
    return Turn(
        "", parent, (), b"", {}, Piece.given(range(given)), dropped, pieces, "stop", ended_itself=True, facts=facts
    )


def test_what_was_given_is_between_the_spans() -> None:
    first = turn(None, 10, (5, "1"))
    second = turn(first, 3, (4, "1"))
    found = comparable([first, second], {}, "1", ANY)
    assert [(span.turn, span.start, span.end) for span in found.spans] == [(first, 10, 15), (second, 18, 22)]
    assert found.others == {}


def test_what_the_next_turn_dropped_is_no_part_of_the_line() -> None:
    first = turn(None, 10, (5, "1"))
    second = turn(first, 3, (4, "1"), dropped=1)
    assert [(span.start, span.end) for span in comparable([first, second], {}, "1", ANY).spans] == [(10, 14), (17, 21)]


def test_what_another_sample_has_is_left_out() -> None:
    first = turn(None, 10, (2, "1"), (5, "1"))
    assert [(span.start, span.end) for span in comparable([first], {first: 3}, "1", ANY).spans] == [(13, 17)]
    assert comparable([first], {first: 7}, "1", ANY).spans == ()


@pytest.mark.parametrize(
    ("sampled", "facts", "now", "others"),
    [
        ([(5, "1")], {}, "2", {"other_weights": 5}),
        ([(5, None)], {}, "2", {"unknown_weights": 5}),
        ([(5, "1")], {}, None, {"unknown_weights": 5}),
        ([(5, "1"), (3, "2")], {}, "2", {"other_weights": 5, "weights_changed_within": 3}),
        ([(5, "2")], {"cache_versions": ["1", "2"]}, "2", {"old_cache": 5}),
        ([(5, "2")], {"cache_versions": [None, "2"]}, "2", {"old_cache": 5}),
        ([(5, "2")], {"reshaped_by": "regex"}, "2", {"reshaped_by_regex": 5}),
        ([(5, "2")], {"adapter": None}, "2", {"unknown_adapter": 5}),
    ],
)
def test_what_cannot_be_compared_says_why(
    sampled: list[tuple[int, str | None]], facts: dict[str, Any], now: str | None, others: dict[str, int]
) -> None:
    found = comparable([turn(None, 10, *sampled, **facts)], {}, now, ANY)
    assert (found.spans, found.others) == ((), others)


def test_a_turn_that_found_keys_and_values_of_its_own_weights_is_compared() -> None:
    found = comparable([turn(None, 10, (5, "2"), cache_versions=["2"], adapter="poet")], {}, "2", ANY)
    assert [span.adapter for span in found.spans] == ["poet"]


def test_what_the_engine_does_not_take_is_counted() -> None:
    found = comparable([turn(None, 10, (5, "1"))], {}, "1", 12)
    assert [(span.start, span.end) for span in found.spans] == [(10, 12)]
    assert found.others == {"context": 3}
    assert comparable([turn(None, 10, (5, "1"))], {}, "1", 3).others == {"context": 5}


@pytest.mark.parametrize(
    ("facts", "assumed", "told"),
    [
        ({}, {}, Distribution(None, 1.0)),
        ({"sampling": {"temperature": 0.6}}, {"temperature": 0.7}, Distribution(None, 0.6)),
        ({}, {"temperature": 0.7}, Distribution(None, 0.7)),
        ({"sampling": {"temperature": "0.6"}}, {}, Distribution("temperature", 1.0)),
        ({}, {"repetition_penalty": 1.1}, Distribution("repetition_penalty", 1.0)),
        ({"sampling": {"repetition_penalty": 1.0}}, {"repetition_penalty": 1.1}, Distribution(None, 1.0)),
        ({"reshaped_by": "regex"}, {}, Distribution("regex", 1.0)),
    ],
)
def test_what_a_request_said_counts_before_what_its_engine_assumes(
    facts: dict[str, Any], assumed: dict[str, Any], told: Distribution
) -> None:
    assert distribution(turn(None, 1, (1, "1"), **facts), [assumed]) == told
