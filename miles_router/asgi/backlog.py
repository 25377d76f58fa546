"""Bytes of replies that were read from workers and that no client has taken yet, over all connections."""

from __future__ import annotations

#: Beyond this many bytes little is read at once from workers, whoever it is for.
MAX_BACKLOG = 16 * 1024 * 1024


class Backlog:
    """How much waits for clients that read slowly. One number, which each place that holds bytes moves."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        #: Bytes.
        self.size = 0
