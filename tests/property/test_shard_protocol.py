"""A leader and its shards keep what they promise, whatever happens; and each rule of theirs is needed for that."""

from __future__ import annotations

import pytest

from miles_router.shards import protocol
from tests.support.shard_world import Broken, World
from tests.support.tiers import examples

#: How many worlds are tried at most until one shows what a rule is for.
WORLDS = 400


@pytest.mark.parametrize("seed", range(examples(40)))
def test_what_a_leader_and_its_shards_promise_holds(seed: int) -> None:
    counts = World(seed).play()
    assert counts["writes"] > 50
    assert counts["turns"] > 50


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("leases from sending", {"one", "barrier", "store"}),
        ("waiting for shards", {"barrier"}),
        ("leases", {"barrier", "store"}),
        ("waiting for leases", {"barrier", "one", "store"}),
        ("the register", {"one", "leader", "barrier", "store"}),
        ("certainty", {"leader", "barrier"}),
        ("epochs", {"store"}),
        ("freshness", {"progress: a seat does not act", "progress: a pause is not answered", "one", "store"}),
        ("clocks that agree", {"one", "barrier", "store"}),
    ],
)
def test_without_a_rule_a_promise_is_broken(rule: str, broken: set[str]) -> None:
    assert _first_broken(rule) in broken


def test_a_lease_is_counted_longer_by_who_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLACK", 1.0)
    assert _first_broken("") in {"one", "barrier", "store"}


def _first_broken(rule: str) -> str:
    for seed in range(WORLDS):
        try:
            World(seed, rule).play()
        except Broken as broken:
            return str(broken)
    return f"nothing in {WORLDS} worlds"
