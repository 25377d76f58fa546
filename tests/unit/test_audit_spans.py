"""Which sampled tokens of a line an audit compares."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.auditing.spans import AuditedTurn, Comparable, Distribution, distribution
from middleware_hub.auditing.spans import comparable as of_line
from miles_router.engines.recomputing import AskedSampling
from miles_router.trajectory import Piece

ANY = 1 << 20
PLAIN = AskedSampling({}, None, "")


def comparable(
    line: list[AuditedTurn], elsewhere: dict[int, int], now: str | None, longest: int, *assumed: dict[str, Any]
) -> Comparable:
    """With what an engine assumes."""
    return of_line(line, elsewhere, now, longest, {turn: distribution(turn.asked, assumed) for turn in line})


def turn(number: int, start: int, *sampled: tuple[int, str | None], dropped: int = 0, **facts: Any) -> AuditedTurn:
    """One that sampled from a position on; the next one dropped some of that."""
    pieces = [Piece.sampled(range(count), [-1.0] * count, version) for count, version in sampled]
    end = start + sum(count for count, _ in sampled) - dropped
    known: Any = {"worker": "a", "cache_versions": (), "asked": PLAIN, "chat": True, **facts}
    return AuditedTurn(number=number, start=start, end=end, pieces=pieces, **known)


def test_what_was_given_is_between_the_spans() -> None:
    first, second = turn(0, 10, (5, "1")), turn(1, 18, (4, "1"))
    found = comparable([first, second], {}, "1", ANY)
    assert [(span.turn, span.start, span.end) for span in found.spans] == [(first, 10, 15), (second, 18, 22)]
    assert found.excluded == {}


def test_what_the_next_turn_dropped_is_no_part_of_the_line() -> None:
    first, second = turn(0, 10, (5, "1"), dropped=1), turn(1, 17, (4, "1"))
    assert [(span.start, span.end) for span in comparable([first, second], {}, "1", ANY).spans] == [(10, 14), (17, 21)]


def test_what_another_sample_has_is_left_out() -> None:
    first = turn(0, 10, (2, "1"), (5, "1"))
    assert [(span.start, span.end) for span in comparable([first], {0: 3}, "1", ANY).spans] == [(13, 17)]
    assert comparable([first], {0: 7}, "1", ANY).spans == ()


def test_what_it_was_given_is_none_of_its_samples() -> None:
    mixed = AuditedTurn(0, 0, 9, [Piece.given(range(4)), *turn(0, 0, (5, "1")).pieces], "a", (), PLAIN, chat=False)
    assert [(span.start, span.end) for span in comparable([mixed], {}, "1", ANY).spans] == [(4, 9)]


@pytest.mark.parametrize(
    ("sampled", "facts", "now", "others"),
    [
        ([(5, "1")], {}, "2", {"other_weights": 5}),
        ([(5, None)], {}, "2", {"unknown_weights": 5}),
        ([(5, "1")], {}, None, {"unknown_weights": 5}),
        ([(5, "1"), (3, "2")], {}, "2", {"other_weights": 5, "weights_changed_within": 3}),
        ([(5, "2")], {"cache_versions": ["1", "2"]}, "2", {"old_cache": 5}),
        ([(5, "2")], {"cache_versions": [None, "2"]}, "2", {"old_cache": 5}),
        ([(5, "2")], {"asked": PLAIN._replace(reshaped_by="regex")}, "2", {"reshaped_by_regex": 5}),
        ([(5, "2")], {"asked": PLAIN._replace(adapter=None)}, "2", {"unknown_adapter": 5}),
        ([(5, "2")], {"asked": None}, "2", {"unknown_settings": 5}),
        ([(5, "1")], {"asked": None}, "2", {"other_weights": 5}),
    ],
)
def test_what_cannot_be_compared_says_why(
    sampled: list[tuple[int, str | None]], facts: dict[str, Any], now: str | None, others: dict[str, int]
) -> None:
    found = comparable([turn(0, 10, *sampled, **facts)], {}, now, ANY)
    assert (found.spans, found.excluded) == ((), others)


def test_a_turn_that_found_keys_and_values_of_its_own_weights_is_compared() -> None:
    found = comparable(
        [turn(0, 10, (5, "2"), cache_versions=["2"], asked=PLAIN._replace(adapter="poet"))], {}, "2", ANY
    )
    assert [span.adapter for span in found.spans] == ["poet"]


def test_what_the_engine_does_not_take_is_counted() -> None:
    found = comparable([turn(0, 10, (5, "1"))], {}, "1", 12)
    assert [(span.start, span.end) for span in found.spans] == [(10, 12)]
    assert found.excluded == {"context": 3}
    assert comparable([turn(0, 10, (5, "1"))], {}, "1", 3).excluded == {"context": 5}


@pytest.mark.parametrize(
    ("said", "reshaped", "assumed", "told"),
    [
        ({}, None, {}, Distribution(None, 1.0)),
        ({"temperature": 0.6}, None, {"temperature": 0.7}, Distribution(None, 0.6)),
        ({}, None, {"temperature": 0.7}, Distribution(None, 0.7)),
        ({"temperature": "0.6"}, None, {}, Distribution("reshaped_by_temperature", 1.0)),
        ({}, None, {"repetition_penalty": 1.1}, Distribution("reshaped_by_repetition_penalty", 1.0)),
        ({"repetition_penalty": 1.0}, None, {"repetition_penalty": 1.1}, Distribution(None, 1.0)),
        ({}, "regex", {}, Distribution("reshaped_by_regex", 1.0)),
        ({"top_k": 1}, None, {}, Distribution(None, 1.0)),
        ({"top_k": 1, "temperature": 0.6}, None, {}, Distribution("reshaped_by_temperature", 1.0)),
        ({}, None, {"top_k": 1, "temperature": 0.01}, Distribution("reshaped_by_temperature", 1.0)),
        ({"temperature": 0.6}, None, {"top_k": 1}, Distribution("reshaped_by_temperature", 1.0)),
        ({"top_k": 20}, None, {"top_k": 1, "temperature": 0.6}, Distribution(None, 0.6)),
    ],
)
def test_what_a_request_said_counts_before_what_its_engine_assumes(
    said: dict[str, Any], reshaped: str | None, assumed: dict[str, Any], told: Distribution
) -> None:
    assert distribution(AskedSampling(said, reshaped, ""), [assumed]) == told
