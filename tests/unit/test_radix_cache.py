"""The text cache by itself: what is found, what is reused, what goes first when room is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from middleware_hub.radix_tree.cache import ENTRY_CHARGE, NO_MATCH, PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import Entry, TextRecord
from miles_router.engines.spelling import NO_CUT
from miles_router.trajectory import Piece, Trajectory
from tests.support.cache_integrity import check_integrity


def held(*, max_tokens: int = 10_000, keep_versions: int = 1) -> RadixTreeCache:
    return RadixTreeCache(max_tokens=max_tokens, keep_versions=keep_versions)


def letters(
    given: str, sampled: str, rid: str, *, hidden: str = "", version: str = "1", finish: str = "stop"
) -> TextRecord:
    """One token a letter, its id the letter's code; sampled ones in capital ids, so that encoding would differ."""
    text = given + sampled + hidden
    ids = [ord(letter) + 1000 for letter in sampled + hidden]
    pieces = [Piece.given([ord(letter) for letter in given]), Piece.sampled(ids, [-0.5] * len(ids), version)]
    ends = np.arange(1, len(text) + 1, dtype=np.uint32)
    return TextRecord(text, len(given + sampled), Trajectory(pieces), ends, rid, finish)


def put(cache: RadixTreeCache, record: TextRecord, match: PrefixMatch = NO_MATCH) -> Entry:
    entry = cache.record(record, match)
    assert entry is not None
    return entry


def rids(cache: RadixTreeCache) -> set[str]:
    return {entry.rid for node in cache._tree.nodes() for entry in node.entries}


def reused(cache: RadixTreeCache, text: str) -> tuple[int, str]:
    match = cache.match(text)
    assert len(match.trajectory) == len(match.ends)
    sampled = sum(len(piece) for piece in match.trajectory.pieces if piece.logprobs is not None)
    return sampled, text[: match.chars]


# Looking up


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ask", "ask"),  # a whole prompt, as it was given
        ("askANSWER", "askANSWER"),
        ("askANSWER more", "askANSWER"),
        ("askANSWER$ more", "askANSWER$"),  # the hidden tail, spelled out
        ("askANSxyz", "askANS"),
        ("askxyz", ""),  # parted right behind what was only given
        ("asxyz", ""),
        ("nothing of it", ""),
    ],
)
def test_the_reused_prefix_ends_behind_the_last_sampled_token_in_the_common_text(text: str, found: str) -> None:
    cache = held()
    put(cache, letters("ask", "ANSWER", "r", hidden="$"))
    assert reused(cache, text) == (max(0, len(found) - 3), found)


def test_a_token_that_the_text_cuts_through_is_not_reused() -> None:
    cache = held()
    pieces = [Piece.given([1]), Piece.sampled([2, 3, 4], [-1.0] * 3, "1")]
    put(cache, TextRecord("q the é", 7, Trajectory(pieces), np.array([1, 5, NO_CUT, 7], dtype=np.uint32), "r", "stop"))
    assert reused(cache, "q th and") == (0, "")
    assert reused(cache, "q the and") == (1, "q the")
    assert reused(cache, "q the é and") == (3, "q the é")


def test_entry_ending_here_is_found_behind_a_newer_one_that_cannot_be_cut() -> None:
    cache = held()
    put(cache, letters("q", "aa", "short"))
    pieces = [Piece.given([1]), Piece.sampled([7], [-1.0], "1")]
    put(cache, TextRecord("qaaaa", 5, Trajectory(pieces), np.array([1, 5], dtype=np.uint32), "passes", "stop"))
    assert reused(cache, "qaa and more") == (2, "qaa")


def test_an_entry_with_sampled_tokens_is_found_though_a_newer_one_has_given_ones() -> None:
    cache = held()
    put(cache, letters("q", "aa", "sampled"))
    put(cache, letters("qaa", "", "given", hidden="$"))
    assert reused(cache, "qaa and more") == (2, "qaa")


def test_the_newest_of_equal_texts_is_taken() -> None:
    cache = held()
    put(cache, letters("q", "ab", "old"))
    joined = [Piece.given([ord("q")]), Piece.sampled([5000], [-1.0], "1")]
    put(cache, TextRecord("qab", 3, Trajectory(joined), np.array([1, 3], dtype=np.uint32), "new", "stop"))
    assert cache.match("qab!").trajectory.tokens.tolist() == [ord("q"), 5000]
    assert [entry.rid for entry in cache.retrieve("qab")] == ["old", "new"]


def test_an_empty_cache_and_an_empty_text_give_nothing() -> None:
    cache = held()
    assert reused(cache, "anything") == (0, "")
    put(cache, letters("q", "a", "r"))
    assert reused(cache, "") == (0, "")
    assert cache.retrieve("never") == []
    assert cache.by_rid("never") is None


def test_numbers_say_what_was_reused() -> None:
    cache = held()
    put(cache, letters("q", "abc", "r"))
    cache.match("qabc more")
    cache.match("something else")
    assert (cache.statistics.lookups, cache.statistics.hits, cache.statistics.reused_tokens) == (2, 1, 4)


# What entries share


def record(rid: str, text: str, shown: int, pieces: list[Piece], ends: list[int]) -> TextRecord:
    return TextRecord(text, shown, Trajectory(pieces), np.array(ends, dtype=np.uint32), rid, "stop")


def sampled(*ids: int) -> Piece:
    return Piece.sampled(ids, [-0.5] * len(ids), "1")


def test_sibling_that_branches_inside_a_turn_shares_only_the_common_part() -> None:
    # The newest generation below the parting is a second turn, whose own tokens begin behind it.
    cache = held()
    turn = record("first", "Qabc", 4, [Piece.given([1]), sampled(2, 3, 4)], [1, 2, 3, 4])
    cache.record(turn)
    more = record("second", "Qabcde", 6, [*turn.trajectory.pieces, Piece.given([5]), sampled(6)], [1, 2, 3, 4, 5, 6])
    cache.record(more, cache.match("Qabcd"))
    sibling = record("sibling", "Qabx", 4, [Piece.given([1]), sampled(2, 3, 9)], [1, 2, 3, 4])
    entry = cache.record(sibling)
    assert entry is not None
    assert entry.trajectory() == sibling.trajectory
    check_integrity(cache)


def test_equal_ids_under_different_texts_are_not_shared_beyond_the_common_text() -> None:
    # Greedy twice, with and without skip_special_tokens: the same ids and logprobs, one text shows the special token.
    cache = held()
    pieces = [Piece.given([1]), sampled(5, 99, 6)]
    cache.record(record("hidden", "Qab", 3, pieces, [1, 2, 2, 3]))
    cache.record(record("shown", "Qa<s>b", 6, pieces, [1, 2, 5, 6]))
    match = cache.match("Qa<s>b and more")
    assert (match.trajectory.tokens.tolist(), match.chars) == ([1, 5, 99, 6], 6)


def test_a_generation_repeated_token_for_token_has_no_tokens_of_its_own() -> None:
    cache = held()
    pieces = [Piece.given([1]), sampled(5)]
    first, again = (cache.record(record(rid, "Qa", 2, pieces, [1, 2])) for rid in ("first", "again"))
    assert first is not None
    assert again is not None
    assert (first.own, again.own) == (2, 0)
    assert again.trajectory() == first.trajectory()
    assert [entry.rid for entry in cache.retrieve("Qa")] == ["first", "again"]


def test_saying_what_a_generation_continues_changes_nothing_of_what_it_shares() -> None:
    caches = [held(), held()]
    for cache in caches:
        cache.record(record("first", "Qab", 3, [Piece.given([1]), sampled(2, 3)], [1, 2, 3]))
        match = cache.match("Qabcd")
        trajectory = match.trajectory.append(Piece.given([4]), sampled(5))
        continued = TextRecord("Qabcd", 5, trajectory, np.array([1, 2, 3, 4, 5], dtype=np.uint32), "second", "stop")
        entry = put(cache, continued, match if cache is caches[0] else NO_MATCH)
        assert (entry.reused, entry.own) == (3, 2)
        assert entry.trajectory() == trajectory


# Evicting


def room_for(*entries: int) -> int:
    """A budget in which entries with so many own tokens just fit."""
    return sum(entries) + ENTRY_CHARGE * len(entries)


def test_the_least_recently_used_goes_first() -> None:
    cache = held(max_tokens=room_for(3, 3, 3))
    for name in "abc":
        put(cache, letters(name, "xy", name))
    cache.match("axy and more")  # used again
    put(cache, letters("d", "xy", "d"))
    assert rids(cache) == {"a", "c", "d"}
    assert cache.retrieve("cxy")
    put(cache, letters("e", "xy", "e"))
    assert rids(cache) == {"c", "d", "e"}
    assert cache.by_rid("d")
    put(cache, letters("f", "xy", "f"))
    assert rids(cache) == {"d", "e", "f"}
    assert cache.statistics.evicted == 3
    assert cache.statistics.evicted_tokens == 9
    check_integrity(cache)


def test_versions_before_those_kept_go_before_anything_else() -> None:
    cache = held(max_tokens=room_for(3, 3, 3, 3), keep_versions=1)
    for name, version in (("a", "v1"), ("b", "v2"), ("c", "v1"), ("d", "v3")):
        put(cache, letters(name, "xy", name, version=version))
    cache.match("axy and more")
    put(cache, letters("e", "xy", "e", version="v3"))
    assert rids(cache) == {"a", "b", "d", "e"}, "v1 is two behind v3: the least recently used of it goes"
    put(cache, letters("f", "xy", "f", version="v3"))
    assert rids(cache) == {"b", "d", "e", "f"}
    put(cache, letters("g", "xy", "g", version="v3"))
    assert rids(cache) == {"d", "e", "f", "g"}, "nothing stale is left: the least recently used"


def test_a_prefix_stays_as_long_as_something_hangs_on_it() -> None:
    cache = held(max_tokens=room_for(3, 3, 3))
    put(cache, letters("q", "ab", "turn 1"))
    more = letters("qabu", "c", "turn 2")
    first = cache.match("qabu")
    trajectory = first.trajectory.append(Piece.given([ord("u")]), more.trajectory.pieces[-1])
    put(cache, TextRecord(more.text, more.shown_chars, trajectory, more.ends, "turn 2", "stop"), first)
    assert cache.tokens == 5, "the shared prefix is counted once"
    put(cache, letters("x", "yz", "other"))
    cache.by_rid("other")
    put(cache, letters("z", "yz", "another"))
    assert rids(cache) == {"turn 1", "other", "another"}, "the leaf went, its prefix did not"
    check_integrity(cache)


def test_what_a_request_in_flight_uses_is_not_evicted() -> None:
    cache = held(max_tokens=room_for(3, 3))
    oldest = put(cache, letters("a", "xy", "a"))
    with cache.pinned(oldest, None), cache.pinned(oldest):
        for name in "bcd":
            put(cache, letters(name, "xy", name))
        assert rids(cache) == {"a", "d"}
    for name in "ef":
        put(cache, letters(name, "xy", name))
    assert rids(cache) == {"e", "f"}, "pinned no more"


def test_when_all_is_pinned_the_budget_is_kept_as_soon_as_it_can_be() -> None:
    cache = held(max_tokens=room_for(3))
    with cache.pinned(put(cache, letters("a", "xy", "a"))):
        put(cache, letters("b", "xy", "b"))
        assert rids(cache) == {"a"}
    assert cache.tokens + ENTRY_CHARGE * len(cache) <= room_for(3)


def test_a_generation_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    cache = held(max_tokens=room_for(3))
    put(cache, letters("a", "xy", "a"))
    assert cache.record(letters("b", "wxyz", "b")) is None
    assert (rids(cache), cache.statistics.refused) == ({"a"}, 1)


def test_a_million_tokens_stay_within_the_budget() -> None:
    cache = held(max_tokens=100_000)
    ids = np.arange(1000)
    for number in range(1000):
        ends = np.arange(1, 1001, dtype=np.uint32)
        sampled = Piece.sampled(ids[1:], np.full(999, -1.0), f"{number // 100}")
        trajectory = Trajectory([Piece.given([number]), sampled])
        put(cache, TextRecord(f"{number:04}" * 250, 1000, trajectory, ends, f"r{number}", "stop"))
        assert cache.tokens + ENTRY_CHARGE * len(cache) <= 100_000
    assert cache.tokens > 97_000
    assert cache.nbytes <= 12 * cache.tokens
    assert 990 * len(cache) < cache.characters <= 1000 * len(cache), "texts share their beginnings"
    assert min(int(rid[1:]) for rid in rids(cache)) == 1000 - len(cache)
    check_integrity(cache)


def test_a_rid_used_twice_is_the_later_generations() -> None:
    cache = held()
    put(cache, letters("a", "x", "same"))
    later = put(cache, letters("b", "x", "same"))
    assert cache.by_rid("same") is later
    assert cache.text_of(later) == "bx"


def test_partial_generations_are_marked() -> None:
    cache = held()
    finished = [put(cache, letters(f, "x", f, finish=f)).finished for f in ("stop", "length", "abort")]
    assert finished == [True, True, False]
    assert cache.statistics.partial == 1


def test_many_siblings_of_one_text_are_all_kept() -> None:
    cache = held()
    for number in range(20):
        pieces = [Piece.given([1]), Piece.sampled([100 + number], [-1.0], "1")]
        put(cache, TextRecord("qa", 2, Trajectory(pieces), np.array([1, 2], dtype=np.uint32), f"r{number}", "stop"))
    found: Sequence[Any] = cache.retrieve("qa")
    assert [int(entry.trajectory().tokens[-1]) for entry in found] == list(range(100, 120))
