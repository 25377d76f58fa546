"""The same rollouts held in three ways, behind one small interface, so that the same measurement runs on each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Protocol

import numpy as np
import psutil
import pygtrie

from middleware_hub.radix_tree.cache import NO_MATCH, PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import TextRecord
from middleware_hub.radix_tree.text_tree import common_length
from tests.benchmarks.rollout_data import ANSWER_CHARS, GROUP, Rollouts, new_cache, text_of

LONG_CHARS = 100_000
MORE_CHARS = 200
LONG_TURNS = (1, 10, 50)


class Holder(Protocol):
    """Something that holds records and finds the longest held prefix of a text."""

    def look_up(self, text: str) -> Any: ...

    def record(self, record: TextRecord, found: Any) -> None: ...

    def retrieve(self, text: str) -> np.ndarray[Any, Any]: ...


class Radix:
    """The cache itself."""

    def __init__(self, cache: RadixTreeCache) -> None:
        self.cache = cache

    def look_up(self, text: str) -> PrefixMatch:
        return self.cache.match(text)

    def record(self, record: TextRecord, found: Any) -> None:
        self.cache.record(record, found)

    def retrieve(self, text: str) -> np.ndarray[Any, Any]:
        return self.cache.retrieve(text)[-1].trajectory().tokens


@dataclass(frozen=True)
class Arrays:
    """A whole trajectory as flat arrays, shared with nobody: what a plain mapping from texts would hold."""

    tokens: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]

    @classmethod
    def of(cls, record: TextRecord) -> Arrays:
        return cls(record.trajectory.tokens, record.ends, record.trajectory.logprobs)


class CharTrie:
    """`pygtrie.CharTrie`: a node for each character. Finds held texts that are prefixes, not partings inside one."""

    def __init__(self) -> None:
        self._trie: Any = pygtrie.CharTrie()

    def look_up(self, text: str) -> Any:
        return self._trie.longest_prefix(text).value

    def record(self, record: TextRecord, found: Any) -> None:
        self._trie[record.text] = Arrays.of(record)

    def retrieve(self, text: str) -> np.ndarray[Any, Any]:
        arrays: Arrays = self._trie[text]
        return arrays.tokens


class LinearScan:
    """A list of texts, each compared with the one in question, and a dictionary for whole ones."""

    def __init__(self) -> None:
        self._held: dict[str, Arrays] = {}

    def look_up(self, text: str) -> Any:
        best, longest = None, 0
        for held, arrays in self._held.items():
            agreed = common_length(held, text, 0)
            if agreed > longest:
                best, longest = arrays, agreed
        return best

    def record(self, record: TextRecord, found: Any) -> None:
        self._held[record.text] = Arrays.of(record)

    def retrieve(self, text: str) -> np.ndarray[Any, Any]:
        return self._held[text].tokens


@dataclass(frozen=True)
class Peer:
    """How to make a holder, and how much it copes with."""

    make: Callable[[], Holder]
    most: int | None = None
    remark: str = ""


RADIX, TRIE, SCAN = "radix tree", "CharTrie", "linear scan"
PEERS: dict[str, Peer] = {
    RADIX: Peer(lambda: Radix(new_cache())),
    TRIE: Peer(
        CharTrie,
        most=104,
        remark="a Python object for each character, so scaled down to 104 rollouts; it shares text, and no tokens.",
    ),
    SCAN: Peer(LinearScan, remark="holds every generation's text and tokens whole."),
}


class _Told(RadixTreeCache):
    """A cache that tells another holder what it records, so that all hold the same generations."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(max_tokens=1 << 40, keep_versions=2)
        self._holder = holder

    def record(self, record: TextRecord, match: Any = NO_MATCH) -> Any:
        self._holder.record(record, None)
        return super().record(record, match)


def filled(peer: Peer, rollouts: int) -> tuple[Holder, RadixTreeCache, Rollouts]:
    """A holder with so many rollouts, and the cache that made them, which is the holder itself where it can be."""
    holder = peer.make()
    cache = holder.cache if isinstance(holder, Radix) else _Told(holder)
    made = Rollouts()
    made.groups(cache, rollouts)
    return holder, cache, made


# Memory


@dataclass(frozen=True)
class Memory:
    """What holding the rollouts took. `text` is the bytes of the characters held, shared ones once."""

    rollouts: int
    entries: int
    tokens: int
    text: int
    grown: int

    @property
    def beside_text(self) -> float:
        """Bytes per distinct token, the text (each run of characters once) not counted."""
        return (self.grown - self.text) / self.tokens


def memory_of(name: str, rollouts: int) -> Memory:
    """Fill a holder in a fresh process and see by how much that grew."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_grown, name, rollouts).result()


def _grown(name: str, rollouts: int) -> Memory:
    """One group first, to have every module and the pool of text in memory. The cache that plays the rollouts for the
    other holders lasts for one group at a time, so that it takes no memory of theirs."""
    process = psutil.Process(os.getpid())
    filled(PEERS[name], GROUP)
    gc.collect()
    before = process.memory_info().rss
    if name == RADIX:
        holder, cache, _ = filled(PEERS[name], rollouts)
        counts = (len(cache), cache.tokens, cache.characters)
    else:
        holder, counts = PEERS[name].make(), (0, 0, 0)
        made = Rollouts()
        for _ in range(rollouts // GROUP):
            cache = _Told(holder)
            made.groups(cache, GROUP)
            counts = (counts[0] + len(cache), counts[1] + cache.tokens, counts[2] + cache.characters)
            del cache
    gc.collect()
    grown = process.memory_info().rss - before
    assert holder is not None
    return Memory(rollouts, *counts, grown)


# Times


@dataclass(frozen=True)
class Times:
    """Seconds of one operation on the long text; medians, and the 99th percentile of the look-up."""

    rollouts: int
    entries: int
    match: float
    match_p99: float
    record: float
    retrieve: float


def play(peer: Peer, rollouts: int, repeat: int, progress: Callable[[str], None]) -> dict[str, Times]:
    """Fill a holder, then time it with long texts that came about in few and in many turns."""
    holder, cache, made = filled(peer, rollouts)
    found = {}
    for turns in LONG_TURNS if isinstance(holder, Radix) else LONG_TURNS[1:2]:
        text = made.long(cache, LONG_CHARS, turns)
        found[f"{turns} turns"] = timed(holder, cache, made, text, repeat, rollouts=rollouts)
        progress(f"look-up of a text of {turns} turns: {found[f'{turns} turns'].match * 1e3:.3f} ms")
    return found


def timed(
    holder: Holder,
    cache: RadixTreeCache,
    made: Rollouts,
    text: str,
    repeat: int,
    *,
    rollouts: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Look up extensions of `text`, record answers to them, retrieve them again, one after another."""
    spans = [_once(holder, cache, made, text, clock) for _ in range(repeat)]
    match, record, retrieve = ([span[place] for span in spans] for place in range(3))
    p99 = quantiles(match, n=100)[98] if len(match) > 1 else match[0]
    return Times(rollouts, len(cache), median(match), p99, median(record), median(retrieve))


def _once(
    holder: Holder, cache: RadixTreeCache, made: Rollouts, text: str, clock: Callable[[], float]
) -> tuple[float, float, float]:
    asked = text + text_of(made.chance, MORE_CHARS)
    begin = clock()
    found = holder.look_up(asked)
    looked = clock() - begin
    match = found if isinstance(found, PrefixMatch) else cache.match(asked)
    assert match.chars == len(text), "the whole of the held text is reused"
    record = made.answered(asked, made.given(match, MORE_CHARS), ANSWER_CHARS)
    begin = clock()
    holder.record(record, found)
    recorded = clock() - begin
    begin = clock()
    tokens = holder.retrieve(record.text)
    retrieved = clock() - begin
    assert np.array_equal(tokens, record.trajectory.tokens), "what is retrieved is what was recorded"
    return looked, recorded, retrieved
