"""A sampling mask against lists of ids and logprobs: cut, joined, compared, written and read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.trajectory import InvalidTrajectory, Piece, Trajectory
from miles_router.trajectory.sampling_mask import SamplingMask

IDS = st.integers(0, 5)
Sets = tuple[list[int], float]
Marked = list[tuple[int, Sets]]
#: Tokens, each with the ids that could have been sampled, and its logprob among them.
MARKED = st.lists(
    st.tuples(IDS, st.lists(IDS, max_size=4), st.sampled_from([0.0, -0.5, -2.0])).map(
        lambda each: (each[0], ([each[0], *each[1]], each[2]))
    ),
    max_size=8,
)


def mask_of(marked: Marked) -> SamplingMask:
    tokens = np.array([token for token, _ in marked], dtype=np.int32)
    return SamplingMask.of([ids for _, (ids, _) in marked], [logprob for _, (_, logprob) in marked], tokens)


def sets_of(mask: SamplingMask | None) -> list[Sets]:
    assert mask is not None
    assert mask.logprobs.dtype == np.float32
    spans = zip(mask.offsets, mask.offsets[1:], mask.logprobs.tolist(), strict=False)
    return [(mask.ids[a:b].tolist(), logprob) for a, b, logprob in spans]


@given(MARKED, MARKED, st.integers(0, 8), st.integers(0, 8))
def test_it_is_a_list_of_ids_for_each_token(first: Marked, second: Marked, start: int, stop: int) -> None:
    sets, others = [each for _, each in first], [each for _, each in second]
    mask, other = mask_of(first), mask_of(second)
    assert sets_of(mask) == sets
    start, stop = sorted((min(start, len(sets)), min(stop, len(sets))))
    assert sets_of(mask.cut(start, stop)) == sets[start:stop]
    assert sets_of(SamplingMask.join([mask, other, mask.cut(start, stop)])) == [*sets, *others, *sets[start:stop]]
    equal = [one == another for one, another in zip(sets, others, strict=False)]
    assert mask.common_length(other) == (equal.index(False) if False in equal else len(equal))
    if sets:
        assert sets_of(SamplingMask.from_bytes(mask.to_bytes(), len(mask))) == sets
        assert SamplingMask.from_bytes(mask.to_bytes()[: -4 * len(mask)], len(mask)) is None, "without logprobs"
    assert sets_of(SamplingMask.from_arrays(mask.arrays(), mask.logprobs)) == sets


@given(st.lists(st.tuples(MARKED.filter(len), st.booleans(), st.booleans()), max_size=5))
def test_a_trajectory_has_one_where_all_sampled_tokens_have(parts: list[tuple[Marked, bool, bool]]) -> None:
    pieces, expected, masked, unmasked = [], [], 0, 0
    for marked, sampled, told in parts:
        tokens = [token for token, _ in marked]
        if not sampled:
            pieces.append(Piece.given(tokens))
            expected += [([token], 0.0) for token in tokens]
            continue
        piece = Piece.sampled(tokens, [-1.0] * len(tokens), "1")
        pieces.append(piece.masked(mask_of(marked)) if told else piece)
        expected += [sets for _, sets in marked]
        masked, unmasked = masked + told * len(tokens), unmasked + (not told) * len(tokens)
    trajectory = Trajectory(pieces)
    assert trajectory.unmasked == (unmasked if masked else 0)
    found = trajectory.sampling_mask
    assert (None if found is None else sets_of(found)) == (expected if masked and not unmasked else None)


@pytest.mark.parametrize(
    ("sets", "tokens", "logprobs"),
    [
        *(([[1]], [1, 2], [0, 0]), ([[1], [3]], [1, 2], [0, 0]), ([[]], [1], [0]), ([[1], None], [1, 2], [0, 0])),
        *((["1"], [1], [0]), ([[1, -1]], [1], [0]), ([[1]], [1], []), ([[1]], [1], [0.5]), ([[1]], [1], ["0"])),
    ],
)
def test_one_that_does_not_fit_its_tokens_is_refused(
    sets: list[list[int]], tokens: list[int], logprobs: list[float]
) -> None:
    with pytest.raises(InvalidTrajectory):
        SamplingMask.of(sets, logprobs, np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 1], [0, 3, 2], [0, 2.5]])
def test_arrays_that_are_none_are_refused(offsets: list[int]) -> None:
    with pytest.raises(InvalidTrajectory):
        SamplingMask.from_arrays({"offsets": offsets, "ids": [1, 2]}, [0.0])


def test_arrays_without_logprobs_are_refused() -> None:
    with pytest.raises(InvalidTrajectory):
        SamplingMask.from_arrays({"offsets": [0, 1], "ids": [1]}, None)
