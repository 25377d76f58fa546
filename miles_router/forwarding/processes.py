"""Which process answers at an address, told by its connections. Pure.

A process that ends loses all of its connections (the kernel closes them), and whoever listens at its address next has
none of them. So for as long as at least one connection to an address has been open without a break, the same process
has been there, and it gets one number.
"""

from __future__ import annotations

import itertools


class Processes:
    """A number for the process at each address, from its first connection until its last is lost."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1)

    def connected(self, url: str) -> None:
        """A connection was made."""
        if url not in self._open:
            self._open[url], self._numbers[url] = 0, next(self._next)
        self._open[url] += 1

    def disconnected(self, url: str) -> None:
        """A connection was lost."""
        self._open[url] -= 1
        if not self._open[url]:
            del self._open[url], self._numbers[url]

    def number(self, url: str) -> int | None:
        """The number of the process that answers there; None where no connection is open, so that nobody can say."""
        return self._numbers.get(url)
