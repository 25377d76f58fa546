"""The count of reply bytes that were read from workers and not yet sent to clients, over all connections."""

from __future__ import annotations

#: Above this many bytes the router reads only small pieces from every worker.
MAX_BACKLOG = 16 * 1024 * 1024


class Backlog:
    """A counter of the bytes that wait for slow clients. Every buffer that holds reply bytes adjusts `size` itself."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0
