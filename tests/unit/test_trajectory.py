"""The exact-token kernel: cutting and joining lose nothing, and what no rollout can have is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miles_router.trajectory import InvalidTrajectory, Piece, Trajectory, VersionRun, from_arrays
from miles_router.trajectory.trajectory import common_prefix

TURN = Trajectory(
    [
        Piece.given([1, 2, 3]),
        Piece.sampled([4, 5], [-0.5, -0.25], "1"),
        Piece.sampled([6], [-1.5], "2"),
        Piece.given([7]),
        Piece.sampled([8, 9], [0.0, -2.0], "2"),
    ]
)
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LOGPROBS = [0, 0, 0, -0.5, -0.25, -1.5, 0, 0, -2]
MASK = [0, 0, 0, 1, 1, 1, 0, 1, 1]
VERSIONS = [("1", 3, 5), ("2", 5, 6), ("2", 7, 9)]


def flat(trajectory: Trajectory) -> tuple[Any, ...]:
    runs = [tuple(run) for run in trajectory.weight_versions]
    return trajectory.tokens.tolist(), trajectory.logprobs.tolist(), trajectory.loss_mask.tolist(), runs


def joined(*parts: Trajectory) -> Trajectory:
    return Trajectory(piece for part in parts for piece in part.pieces)


def untrained(trajectory: Trajectory) -> Trajectory:
    return Trajectory(piece.untrained() for piece in trajectory.pieces)


def test_arrays_are_aligned_and_compact() -> None:
    assert flat(TURN) == (TOKENS, LOGPROBS, MASK, VERSIONS)
    assert [str(each.dtype) for each in (TURN.tokens, TURN.logprobs, TURN.loss_mask)] == ["int32", "float32", "uint8"]
    assert len(TURN) == 9
    assert TURN.nbytes == 4 * 9 + 4 * 5


def test_neighbours_of_one_version_are_one_run() -> None:
    trajectory = Trajectory([Piece.sampled([1], [-1.0], "1"), Piece.sampled([2], [-1.0], "1")])
    assert trajectory.weight_versions == [VersionRun("1", 0, 2)]


@pytest.mark.parametrize("start", range(10))
@pytest.mark.parametrize("stop", [0, 2, 4, 5, 8, 9, 20])
def test_a_slice_is_the_slice_of_every_array(start: int, stop: int) -> None:
    part = TURN[start:stop]
    expected = (TOKENS[start:stop], LOGPROBS[start:stop], MASK[start:stop])
    assert flat(part)[:3] == expected
    spread = {i: v for v, a, b in VERSIONS for i in range(a, b)}
    assert [v for v, a, b in flat(part)[3] for _ in range(a, b)] == [
        spread[i] for i in range(start, min(stop, 9)) if i in spread
    ]
    assert joined(TURN[:start], TURN[start:]) == TURN


def test_negative_slices_count_from_the_end_and_steps_are_refused() -> None:
    assert TURN[-2:].tokens.tolist() == [8, 9]
    with pytest.raises(ValueError, match="contiguous"):
        TURN[::2]


def test_branches_share_the_memory_of_their_prefix() -> None:
    one, other = TURN.append(Piece.given([10])), TURN.append(Piece.given([11]))
    assert one.pieces[0].tokens is other.pieces[0].tokens
    assert np.shares_memory(TURN[:2].tokens, TURN.pieces[0].tokens)


def test_nothing_can_be_written_through_a_piece() -> None:
    for array in (TURN.pieces[0].tokens, TURN.pieces[1].logprobs, TURN[:2].tokens):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 99


def test_equality_looks_at_positions_and_not_at_pieces() -> None:
    cut = joined(TURN[:4], TURN[4:8], TURN[8:])
    assert len(cut.pieces) > len(TURN.pieces)
    assert cut == TURN
    assert TURN[:8] != TURN
    assert TURN != "something else"


@pytest.mark.parametrize(
    ("change", "agree"),
    [
        (Trajectory([Piece.given([1, 2, 9])]), 2),
        (TURN[:3].append(Piece.sampled([4, 5], [-0.5, -0.125], "1")), 4),
        (TURN[:3].append(Piece.sampled([4, 5], [-0.5, -0.25], "7")), 3),
        (TURN[:3].append(Piece.given([4, 5])), 3),
        (joined(untrained(TURN[:5]), TURN[5:]), 3),
        (TURN.append(Piece.given([1])), 9),
        (Trajectory(), 0),
    ],
)
def test_common_prefixes_end_where_token_logprob_version_or_origin_part(change: Trajectory, agree: int) -> None:
    assert common_prefix(TURN, change) == common_prefix(change, TURN) == agree


def test_what_another_sample_trains_keeps_its_logprobs_and_leaves_the_loss() -> None:
    taken = untrained(TURN)
    assert taken.loss_mask.sum() == 0
    assert taken.logprobs.tolist() == LOGPROBS
    assert flat(taken)[3] == VERSIONS


def test_arrays_make_a_trajectory_and_come_back() -> None:
    assert from_arrays(TOKENS, LOGPROBS, MASK, VERSIONS) == TURN
    assert flat(from_arrays([], [], [])) == ([], [], [], [])


@pytest.mark.parametrize(
    ("broken", "changed"),
    [
        ("tokens_are_ids", {"tokens": [-1, 2, 3], "logprobs": [0, 0], "mask": [0, 7, 0]}),
        ("tokens_are_ids", {"tokens": [1, 2**31, 3]}),
        ("tokens_are_ids", {"tokens": [1, "two", 3]}),
        ("tokens_are_ids", {"tokens": [1, 2.7, 3]}),
        ("tokens_are_ids", {"tokens": [1, 2**64, 3]}),
        ("tokens_are_ids", {"tokens": [1, [2], 3]}),
        ("tokens_are_ids", {"tokens": [[1], [2], [3]]}),
        ("aligned", {"logprobs": [0, 0], "mask": [0, 7]}),
        ("aligned", {"mask": [0, 1, 1, 1]}),
        ("mask_is_binary", {"mask": [0, 2, 1], "logprobs": [0, 5.0, 0]}),
        ("logprobs_are_logprobs", {"logprobs": [0, 0.5, -1], "versions": [("1", 9, 3)]}),
        ("logprobs_are_logprobs", {"logprobs": [0, float("nan"), -1]}),
        ("logprobs_are_logprobs", {"logprobs": [0, float("-inf"), -1]}),
        ("versions_in_order", {"versions": [("1", 1, 3), ("2", 2, 3)]}),
        ("versions_in_order", {"versions": [("1", 2, 4)]}),
        ("versions_in_order", {"versions": [("1", 2, 2)]}),
        ("versions_cover_the_loss", {"versions": [("1", 1, 2)]}),
    ],
)
def test_the_first_broken_invariant_is_named(broken: str, changed: dict[str, Any]) -> None:
    good: dict[str, Any] = {"tokens": [1, 2, 3], "logprobs": [0, -1, -1], "mask": [0, 1, 1], "versions": [("1", 1, 3)]}
    from_arrays(*good.values())
    with pytest.raises(InvalidTrajectory, match=broken) as refused:
        from_arrays(*{**good, **changed}.values())
    assert refused.value.invariant == broken


@pytest.mark.parametrize(
    ("broken", "make"),
    [
        ("tokens_are_ids", lambda: Piece.given([-3])),
        ("aligned", lambda: Piece.sampled([1, 2], [-1.0], "1")),
        ("aligned", lambda: Trajectory([Piece(TURN.tokens, np.array([-1], dtype=np.float32))]).logprobs),
        ("logprobs_are_logprobs", lambda: Piece.sampled([1], [2.0], "1")),
        ("logprobs_are_logprobs", lambda: Piece.sampled([1], ["x"], "1")),  # type: ignore[list-item]
    ],
)
def test_pieces_are_checked_as_they_are_made(broken: str, make: Any) -> None:
    with pytest.raises(InvalidTrajectory) as refused:
        make()
    assert refused.value.invariant == broken


def test_a_million_tokens_cost_bytes_each() -> None:
    long = Trajectory([Piece.sampled(np.arange(1_000_000), np.full(1_000_000, -1.0), "1")])
    assert long.nbytes == 8_000_000
    assert len(long[500_000:].pieces) == 1
