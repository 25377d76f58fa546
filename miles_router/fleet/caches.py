"""Prefix caches by weights, so that new weights never reuse keys and values that old weights computed. Pure.

An engine keeps its prefix cache when its weights change, unless the cache is flushed. A new generation would then reuse
entries of the old weights, while its tokens are stamped with the new version. So each change of a worker's weights gets
a number, and generations are sent with a cache key made of that number (SGLang's `extra_key`). The number 0 needs no
key: the weights have not changed since the cache was empty or since the worker joined.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any

#: Weight changes that are remembered of one worker since its last flush. Caches of older weights are not reused.
MAX_VERSIONS = 1000
_process = secrets.token_hex(4)  # keeps this router's keys apart from those of another one on the same workers
_numbers = itertools.count(1)
#: The distance between two numbers when several processes send, so that each has room for its own between them.
NUMBER_SPACING = 1 << 64


def space_numbers(after: int = 0) -> None:
    """Make all further numbers multiples of `NUMBER_SPACING`, greater than `after`."""
    global _numbers
    _numbers = itertools.count((after // NUMBER_SPACING + 1) * NUMBER_SPACING, NUMBER_SPACING)


def new_number() -> int:
    """Return a number greater than all before."""
    return next(_numbers)


class PrefixCaches:
    """The prefix caches of one worker, each named by the number of the weights under which it began.

    Args:
        number: a new number if the worker may hold a cache of unknown weights, else 0.
    """

    __slots__ = ("_is_changing", "_new_number", "_past", "_router", "_since", "number")

    def __init__(self, number: int = 0) -> None:
        #: The number of the present weights. A cache that was chosen under another number must be chosen again.
        self.number = number
        self._since = self.number  # the oldest cache that is still known
        self._is_changing = False
        #: The past weight versions, each with the number of the weights that followed.
        self._past: list[tuple[int, str | None]] = []
        self._new_number: Callable[[], int] = new_number
        self._router = _process

    def key(self, cache: int) -> str:
        """Return the string that names this cache to the engine."""
        return f"weights-{self._router}-{cache}"

    def state(self) -> list[Any]:
        """Return the state that another process needs to choose the same caches."""
        return [self._router, self.number, self._since, self._is_changing, self._past]

    def apply_state(self, state: list[Any], own_number: Callable[[], int]) -> None:
        """Adopt the state of another process, and choose the same caches from now on.

        Args:
            own_number: yields this process's own small numbers, for caches that no two generations may share. They are
                added to the last number of the other process, so they stay below its next one.
        """
        self._router, self.number, self._since, self._is_changing, past = state
        self._past = [(number, version) for number, version in past]
        self._new_number = lambda: self.number + own_number()

    def change(self, version: str | None, number: int, *, under_way: bool = False) -> None:
        """Record that the worker's weights, which had this version, change.

        Args:
            number: a new number, the same for all workers that change together. A session that moves between them then
                uses the same cache key on both.
            under_way: the change happens at an unknown moment from now on. Until the next call no two generations share
                a cache.
        """
        self.number, self._is_changing = number, under_way
        if self._past and self._past[-1][1] == version:
            self._past.pop()
        self._past.append((self.number, version))
        if len(self._past) > MAX_VERSIONS:
            self._since, _ = self._past.pop(0)

    def record_flush(self) -> None:
        self._past.clear()
        self.number = self._since = 0

    def choose(self, continued: int | None) -> int:
        """Return the number of the cache for a generation that is sent now.

        Args:
            continued: the cache of the generation that this one continues, which is kept; None for a new generation.
        """
        if continued is not None and self._since <= continued < self.number:
            return continued
        return self._new_number() if self._is_changing else self.number

    def versions(self, cache: int, now: str | None) -> list[str | None]:
        """Return the weight versions that may have filled a cache, oldest first; None for weights without a version.

        Args:
            now: the worker's present version.
        """
        since = (version for ended, version in self._past if ended > cache)
        return list(dict.fromkeys((*since, now)))
