"""Detection of process restarts at a worker's address, by the connections to it. No I/O.

The kernel closes all connections of a process that ends. So while at least one connection to an address stays open
without a gap, the same process is there, and it has one number.
"""

from __future__ import annotations

import itertools


class Processes:
    """A map from a worker's URL to a number for the process there. A number is valid from the first open connection
    until the last one closes; a later process gets another number."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1)

    def connected(self, url: str) -> None:
        """Count a new connection to `url`; the first one gives the process there a new number."""
        if url not in self._open:
            self._open[url], self._numbers[url] = 0, next(self._next)
        self._open[url] += 1

    def disconnected(self, url: str) -> None:
        """Count a lost connection."""
        self._open[url] -= 1
        if not self._open[url]:
            del self._open[url], self._numbers[url]

    def number(self, url: str) -> int | None:
        """Return the number of the process at `url`; None if no connection is open, because it is unknown then."""
        return self._numbers.get(url)
