"""A leader and its shards keep what they promise, whatever happens; and each rule of theirs is needed for that."""

from __future__ import annotations

import pytest

from miles_router.shards import protocol
from tests.support.shard_world import Broken, World
from tests.support.tiers import examples, nightly

LEASE, NOTHING = 8.0, ((0, 0), None)
#: How many worlds are tried at most until one shows what a rule is for.
WORLDS = 400


@pytest.mark.parametrize("seed", range(examples(40)))
def test_what_a_leader_and_its_shards_promise_holds(seed: int) -> None:
    counts = World(seed).play()
    assert counts["writes"] > 50
    assert counts["turns"] > 50


@pytest.mark.parametrize(
    ("rule", "broken", "known"),
    [
        ("leases from sending", {"one", "barrier", "store"}, 7),
        ("waiting for shards", {"barrier"}, 3),
        ("leases", {"barrier", "store"}, 3),
        ("waiting for leases", {"barrier", "one", "store"}, 2),
        ("the register", {"one", "leader", "barrier", "store"}, 0),
        ("certainty", {"leader", "barrier"}, 0),
        ("epochs", {"store"}, 12),
        ("freshness", {"progress: a shard does not act", "progress: a pause is not answered", "one", "store"}, 0),
        ("clocks that agree", {"one", "barrier", "store"}, 26),
    ],
)
def test_without_a_rule_a_promise_is_broken(rule: str, broken: set[str], known: int) -> None:
    assert _first_broken(rule, known) in broken


def test_a_lease_is_counted_longer_by_who_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLACK", 1.0)
    assert _first_broken("", 57) in {"one", "barrier", "store"}


def test_leader_with_a_possible_rival_waits_for_its_certainty() -> None:
    """It may stand still, and write when it goes on."""
    before = protocol.Leader(1, LEASE, 1, 0.0, first=True, stored=NOTHING)
    before.renew(0.0, 0.0)
    joined = protocol.Join(0, "an instance", True, (1, 1), {})
    after = protocol.Leader(1, LEASE, 2, 1.0, first=False, stored=NOTHING)
    alone = protocol.Leader(1, LEASE, 2, 1.0, first=False, stored=NOTHING, one_leader_at_a_time=True)
    for leader in (after, alone):
        leader.join(joined, 1.0)
        leader.renew(1.0, 1.0)
    assert before.is_sole_leader(1.0)
    assert (after.open, alone.open) == (False, True), "a platform has seen the end of the one before"
    opens = 1.0 + LEASE * protocol.SLACK
    after.renew(opens, opens)
    assert after.open
    assert not before.is_sole_leader(opens)


def test_a_life_goes_on_in_its_seat_where_its_successor_leaves_before_it_has_it() -> None:
    leader = protocol.Leader(1, LEASE, 1, 0.0, first=True, stored=NOTHING)
    leader.renew(0.0, 0.0)
    leader.join(protocol.Join(0, "first", False, (0, 0), None), 0.0)
    leader.renew(0.0, 0.0)
    leader.record_ack(0, "first", protocol.Ack(1, 1, 0.0), 0.0)
    leader.renew(0.0, 0.0)
    leader.join(protocol.Join(0, "second", False, (0, 0), None), 1.0)
    leader.record_ack(0, "first", protocol.Ack(1, 1, 1.0), 1.0)
    assert leader.renew(2.0, 2.0) == [], "no lease is renewed while another instance waits"
    leader.disconnect(0, "second")
    assert leader.renew(2.0, 2.0) == [("first", protocol.LeaseRenewal(1, 1.0))]


def _first_broken(rule: str, known: int) -> str:
    """Name the promise that the first world breaks without `rule`. The search begins with a world that is `known` to
    break one, in the nightly tier with the first world of all."""
    begin = 0 if nightly() else known
    for seed in range(begin, begin + WORLDS):
        try:
            World(seed, rule).play()
        except Broken as broken:
            return str(broken)
    return f"nothing in {WORLDS} worlds"
