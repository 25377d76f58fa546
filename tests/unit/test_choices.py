"""What endpoints sampled, in one form: pieces of one weight version each, and versions as the router sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.openai.choices import Choice, VersionTrack
from miles_router.trajectory import InvalidTrajectory, VersionRun

Runs = Sequence[tuple[str, int, int]]


def choice(versions: Runs, ids: Any = (1, 2, 3), logprobs: Any = (-1.0, -2.0, -3.0)) -> Choice:
    runs = [VersionRun(*run) for run in versions]
    return Choice(0, {"role": "assistant"}, "stop", None, ids, logprobs, runs)


def test_sampled_tokens_are_one_piece_for_each_version() -> None:
    pieces = choice([("1", 0, 2), ("2", 2, 3)]).pieces()
    assert [(piece.version, piece.tokens.tolist()) for piece in pieces] == [("1", [1, 2]), ("2", [3])]
    assert [piece.logprobs.tolist() for piece in pieces if piece.logprobs is not None] == [[-1.0, -2.0], [-3.0]]
    assert all(piece.trained for piece in pieces)


def test_an_empty_run_is_nobody_s() -> None:
    pieces = choice([("1", 0, 0), ("2", 0, 3), ("3", 3, 3)]).pieces()
    assert [(piece.version, len(piece)) for piece in pieces] == [("2", 3)]


def test_without_versions_a_piece_has_none() -> None:
    assert [(piece.version, len(piece)) for piece in choice([]).pieces()] == [(None, 3)]
    assert choice([], (), ()).pieces() == choice([("1", 0, 0)], (), ()).pieces() == ()


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ((1, 2), (-1.0,)),
        ((1,), (-1.0, -2.0)),
        ((-1,), (-1.0,)),
        ((2**31,), (-1.0,)),
        (("a",), (-1.0,)),
        ((1,), (None,)),
        ((1,), (float("nan"),)),
        ((1,), (0.5,)),
    ],
)
def test_what_no_engine_can_have_sampled_is_refused(ids: Any, logprobs: Any) -> None:
    with pytest.raises(InvalidTrajectory):
        choice([], ids, logprobs).pieces()


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ([("1", 1, 3)], "versions_leave_gaps"),
        ([("1", 0, 1), ("2", 2, 3)], "versions_leave_gaps"),
        ([("1", 0, 2), ("2", 1, 3)], "versions_leave_gaps"),
        ([("1", 0, 3), ("2", 3, 1), ("3", 1, 3)], "versions_leave_gaps"),
        ([("1", 0, 2)], "versions_end_elsewhere"),
        ([("1", 0, 4)], "versions_end_elsewhere"),
    ],
)
def test_versions_that_do_not_fit_the_tokens_are_refused(versions: Runs, reason: str) -> None:
    with pytest.raises(UnreadableAnswer, match=reason):
        choice(versions).pieces()


@pytest.mark.parametrize(
    ("seen", "runs"),
    [
        (["1", "1", "1"], [("1", 0, 3)]),
        (["1", None, None], [("1", 0, 3)]),
        ([None, None, None], []),
        ([None, "1", "1"], []),
        (["1", "2", "1"], [("1", 0, 1), ("2", 1, 2), ("1", 2, 3)]),
    ],
)
def test_worker_that_left_keeps_its_version_and_an_unknown_one_has_none(seen: Sequence[str | None], runs: Runs) -> None:
    track = VersionTrack()
    for end, version in enumerate(seen, start=1):
        track.record(end, version)
        track.record(end, "no token came")
    assert track.runs == runs
