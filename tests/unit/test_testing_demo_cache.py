"""The demo's claim of exactness fails where a single position is not what the workers said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miles_router.testing.demo.cache import (
    Exactness,
    Rollout,
    Turn,
    cache_lines,
    right_positions,
)

TURNS = [Turn(given=2, ids=[5, 6], logprobs=[-0.5, -0.1]), Turn(given=5, ids=[7], logprobs=[-0.25])]


def retrieved() -> dict[str, Any]:
    """The second turn was given the first one's tokens and one more."""
    return {
        "tokens": [1, 2, 5, 6, 3, 7],
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "rollout_logp": [0.0, 0.0, -0.5, -0.1, 0.0, -0.25],
    }


def test_what_the_workers_said_is_right_throughout() -> None:
    assert right_positions(TURNS, retrieved()) == [True] * 6


@pytest.mark.parametrize(
    ("tamper", "wrong"),
    [
        (lambda arrays: arrays["tokens"].__setitem__(3, 9), [3]),
        (lambda arrays: arrays["rollout_logp"].__setitem__(2, -0.6), [2]),
        (lambda arrays: arrays["loss_mask"].__setitem__(0, 1), [0]),
        (lambda arrays: arrays["loss_mask"].__setitem__(5, 0), [5]),
        (lambda arrays: [array.append(0) for array in arrays.values()], range(7)),
    ],
)
def test_a_position_that_differs_is_wrong(tamper: Callable[[dict[str, Any]], object], wrong: list[int]) -> None:
    arrays = retrieved()
    tamper(arrays)
    right = right_positions(TURNS, arrays)
    assert [place for place, is_right in enumerate(right) if not is_right] == list(wrong)


def test_a_share_is_100_percent_only_if_it_is() -> None:
    exactness = Exactness()
    exactness.take(Rollout("text", "rid", TURNS), retrieved())
    info = {"statistics": {"radix_tree": {"reused_tokens": 4}}}
    assert "exact      100 % of the tokens, 1 of 1 rollouts" in list(cache_lines(exactness, info))
    exactness.take(Rollout("text", "rid", TURNS), {**retrieved(), "tokens": [1, 2, 5, 6, 3, 8]})
    assert "exact      91.67 % of the tokens, 1 of 2 rollouts" in list(cache_lines(exactness, info))
    nearly = Exactness(rollouts=2, exact=1, tokens=10**6, right=10**6 - 1)
    assert "exact      99.99 % of the tokens, 1 of 2 rollouts" in list(cache_lines(nearly, info))
