"""Whose keys and values a worker's prefix cache may hold, and which generations may share them. Pure.

An engine whose weights change keeps its prefix cache unless it is flushed: what a new generation finds there was
computed by the old weights, and its tokens are stamped with the new ones all the same. So each change of a worker's
weights has a number, and generations are sent with a key made of it (SGLang's `extra_key`). The number 0 needs no key:
no weights have changed since the cache was empty, or since the worker joined.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any

#: Of one worker since it was flushed; caches of older ones are not kept.
MAX_VERSIONS = 1000
_process = secrets.token_hex(4)  # another router may have used the same workers
_numbers = itertools.count(1)
#: How far apart numbers are where several processes send: between two, each has room for its own.
APART = 1 << 64


def set_apart(after: int = 0) -> None:
    """Leave so much room between all numbers from now on, which are greater than `after`."""
    global _numbers
    _numbers = itertools.count((after // APART + 1) * APART, APART)


def new_number() -> int:
    """A number that is greater than all before."""
    return next(_numbers)


class PrefixCaches:
    """The caches in one worker, by the number of the weights that were new when each was begun.

    Args:
        number: a new one where the worker may have been used before, with weights of which nobody knows.
    """

    __slots__ = ("_changing", "_new_number", "_past", "_router", "_since", "number")

    def __init__(self, number: int = 0) -> None:
        #: Of the weights that it has now. Whoever has chosen a cache by another one must choose again.
        self.number = number
        self._since = self.number  # what was begun before is no longer known
        self._changing = False
        #: The weight versions that it had, each with the number of the weights that came next.
        self._past: list[tuple[int, str | None]] = []
        self._new_number: Callable[[], int] = new_number
        self._router = _process

    def key(self, cache: int) -> str:
        """What an engine keeps this cache apart by."""
        return f"weights-{self._router}-{cache}"

    def state(self) -> list[Any]:
        """All that another process has to know to choose as this one would."""
        return [self._router, self.number, self._since, self._changing, self._past]

    def follow(self, state: list[Any], own_number: Callable[[], int]) -> None:
        """Choose as the process that gave this state, with numbers of one's own where no two may share one: between
        the last of that process and its next."""
        self._router, self.number, self._since, self._changing, past = state
        self._past = [(number, version) for number, version in past]
        self._new_number = lambda: self.number + own_number()

    def change(self, version: str | None, number: int, *, under_way: bool = False) -> None:
        """Its weights, of this version, are no longer what they were.

        Args:
            number: a new one; the same for all workers that change together, so that a session that moves from one to
                another finds what is of the same weights there.
            under_way: they are about to change, and nobody knows when. Until the next call no two generations share a
                cache.
        """
        self.number, self._changing = number, under_way
        if self._past and self._past[-1][1] == version:
            self._past.pop()
        self._past.append((self.number, version))
        if len(self._past) > MAX_VERSIONS:
            self._since, _ = self._past.pop(0)

    def flushed(self) -> None:
        """All of them are empty."""
        self._past.clear()
        self.number = self._since = 0

    def choose(self, goes_on: int | None) -> int:
        """The cache of a generation that is sent now.

        Args:
            goes_on: the cache of the generation whose tokens it goes on from, which it keeps; None for a new one.
        """
        if goes_on is not None and self._since <= goes_on < self.number:
            return goes_on
        return self._new_number() if self._changing else self.number

    def versions(self, cache: int, now: str | None) -> list[str | None]:
        """The weight versions that may have filled a cache, oldest first; None for weights that nobody has named.

        Args:
            now: the one that the worker has.
        """
        since = (version for ended, version in self._past if ended > cache)
        return list(dict.fromkeys((*since, now)))
