"""The soak finds what it is there for: a short one passes, one with a leak does not; and each rule can break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.soak.oracle import Oracle
from tests.soak.rounds import soak
from tests.soak.verdict import MIB, Look, broken_rules
from tests.support import tiers

SECONDS, ROUND = 20.0, 1.0
LEAK = 512 * 1024
STILL = Look(0.0, 90 * MIB, 40, 3, 0, 0, 0, 100, 900, 900)


def judge(*looks: Look) -> list[str]:
    return broken_rules(looks, max_tokens=1000, max_row_bytes=1000)


def test_what_stays_as_it_is_passes() -> None:
    assert judge(*[STILL] * 9) == []


def test_what_grows_during_the_warm_up_passes() -> None:
    assert judge(replace(STILL, rss=40 * MIB, tasks=1), *[STILL] * 9) == []


@pytest.mark.parametrize(
    ("grown", "name"),
    [({"rss": 101 * MIB}, "memory"), ({"descriptors": 60}, "descriptors"), ({"tasks": 20}, "tasks")],
)
def test_what_grows_is_named(grown: dict[str, Any], name: str) -> None:
    (broken,) = judge(*[STILL] * 6, *[replace(STILL, **grown)] * 3)
    assert broken.startswith(f"{name} grow")


@pytest.mark.parametrize("left", [{"in_flight": 1}, {"held": 1}, {"sessions": 1}])
def test_what_is_left_in_silence_is_named(left: dict[str, Any]) -> None:
    (broken,) = judge(*[STILL] * 6, replace(STILL, **left), *[STILL] * 3)
    assert "left in silence" in broken


@pytest.mark.parametrize("beyond", [{"tokens": 1001}, {"row_bytes": 1001}, {"rss": 600 * MIB}])
def test_what_is_beyond_its_bound_is_named(beyond: dict[str, Any]) -> None:
    assert len(judge(*[replace(STILL, **beyond)] * 9)) == 1


def test_a_run_too_short_to_judge_does_not_pass() -> None:
    assert judge(STILL, STILL) == ["2 looks are too few to judge"]


def test_one_wrong_token_or_one_in_a_wrong_place_is_found() -> None:
    oracle = Oracle()
    tokens, mask = [5, 6, 7, 8], [0, 0, 1, 1]
    logprobs = [0.0, 0.0, *(oracle.logprob(tokens[:place], tokens[place]) for place in (2, 3))]
    oracle.check(tokens, mask, logprobs)
    assert oracle.positions == 2
    for wrong in ([5, 9, 7, 8], [6, 5, 7, 8], [5, 6, 8, 7], [5, 6, 7, 9]):
        with pytest.raises(AssertionError):
            oracle.check(wrong, mask, logprobs)


@pytest.mark.skipif(not tiers.nightly(), reason="takes most of a minute")
@pytest.mark.parametrize("leak", [0, LEAK])
async def test_a_planted_leak_is_found_and_nothing_else(leak: int) -> None:
    outcome = await soak(SECONDS, ROUND, seed=0, leak_bytes=leak)
    assert outcome.counts["positions compared"] > 0
    assert bool(outcome.broken) == bool(leak)
    assert all("memory" in each for each in outcome.broken), outcome.broken
