"""Errors about rows, which name the kind of row in their message."""

from __future__ import annotations

from collections.abc import Mapping

from miles_router.errors import NotFound, UpstreamError
from miles_router.trajectory.rows import RowKind

#: The header that tells another process of the router not to look further: this one knows the trajectory.
KNOWN = "x-trajectory"


class RowsNotHeld(NotFound):
    """The trajectory is known, but its rows never came, did not fit, or have been evicted."""

    headers: Mapping[str, str] = {KNOWN: "known"}


class RowsMissing(UpstreamError):
    """A worker answered without rows, which are required."""

    def __init__(self, kind: RowKind, worker_url: str | None, remedy: str) -> None:
        super().__init__(
            f"worker {worker_url} answered without {kind.title}: {remedy}, "
            f"or set {kind.name}_middleware.required=false to go on without"
        )
