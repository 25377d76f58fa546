"""What entries share is exactly what they have in common."""

from __future__ import annotations

import numpy as np

from middleware_hub.radix_tree.cache import RadixTreeCache, Record
from miles_router.trajectory import Piece, Trajectory


def record(rid: str, text: str, shown: int, pieces: list[Piece], ends: list[int]) -> Record:
    return Record(text, shown, Trajectory(pieces), np.array(ends, dtype=np.uint32), rid, "stop")


def sampled(*ids: int) -> Piece:
    return Piece.sampled(ids, [-0.5] * len(ids), "1")


def test_a_sibling_that_parts_inside_an_earlier_turn_shares_no_more_than_it_has_in_common() -> None:
    # The newest generation below the parting is a second turn, whose own tokens begin behind it.
    cache = RadixTreeCache(max_tokens=1000, keep_versions=1)
    turn = record("first", "Qabc", 4, [Piece.given([1]), sampled(2, 3, 4)], [1, 2, 3, 4])
    cache.record(turn)
    more = record("second", "Qabcde", 6, [*turn.trajectory.pieces, Piece.given([5]), sampled(6)], [1, 2, 3, 4, 5, 6])
    cache.record(more, hint=cache.match("Qabcd"))
    sibling = record("sibling", "Qabx", 4, [Piece.given([1]), sampled(2, 3, 9)], [1, 2, 3, 4])
    entry = cache.record(sibling)
    assert entry is not None
    assert entry.trajectory() == sibling.trajectory
    cache.check_integrity()


def test_equal_ids_under_different_texts_are_not_shared_beyond_the_common_text() -> None:
    # Greedy twice, with and without skip_special_tokens: the same ids and logprobs, one text shows the special token.
    cache = RadixTreeCache(max_tokens=1000, keep_versions=1)
    pieces = [Piece.given([1]), sampled(5, 99, 6)]
    cache.record(record("hidden", "Qab", 3, pieces, [1, 2, 2, 3]))
    cache.record(record("shown", "Qa<s>b", 6, pieces, [1, 2, 5, 6]))
    match = cache.match("Qa<s>b and more")
    assert (match.trajectory.tokens.tolist(), match.chars) == ([1, 5, 99, 6], 6)


def test_a_generation_repeated_token_for_token_has_no_tokens_of_its_own() -> None:
    cache = RadixTreeCache(max_tokens=1000, keep_versions=1)
    pieces = [Piece.given([1]), sampled(5)]
    first, again = (cache.record(record(rid, "Qa", 2, pieces, [1, 2])) for rid in ("first", "again"))
    assert first is not None
    assert again is not None
    assert (first.own, again.own) == (2, 0)
    assert again.trajectory() == first.trajectory()
    assert [entry.rid for entry in cache.retrieve("Qa")] == ["first", "again"]


def test_a_hint_that_is_a_match_gives_what_a_hint_that_is_an_entry_gives() -> None:
    caches = [RadixTreeCache(max_tokens=1000, keep_versions=1) for _ in range(2)]
    for cache in caches:
        cache.record(record("first", "Qab", 3, [Piece.given([1]), sampled(2, 3)], [1, 2, 3]))
        match = cache.match("Qabcd")
        trajectory = match.trajectory.append(Piece.given([4]), sampled(5))
        continued = Record("Qabcd", 5, trajectory, np.array([1, 2, 3, 4, 5], dtype=np.uint32), "second", "stop")
        entry = cache.record(continued, hint=match if cache is caches[0] else match.entry)
        assert entry is not None
        assert (entry.reused, entry.own) == (3, 2)
        assert entry.trajectory() == trajectory
