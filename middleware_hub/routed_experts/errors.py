"""Errors about rows, which name the kind of row in their message."""

from __future__ import annotations

from typing import Any

from miles_router.errors import NotFound, UpstreamError
from miles_router.trajectory.rows import RowKind

#: In the error's body: this process knows the trajectory, so no other process need be asked for its rows.
ROWS_NOT_HELD = "rows_not_held"


class RowsNotHeld(NotFound):
    """The trajectory is known, but its rows never came, did not fit, or have been evicted."""

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON body of the error reply, with `reason`."""
        return {"error": {**super().body(request_id)["error"], "reason": ROWS_NOT_HELD}}


class RowsMissing(UpstreamError):
    """A worker answered without rows, which are required."""

    def __init__(self, kind: RowKind, worker_url: str | None, remedy: str) -> None:
        super().__init__(
            f"worker {worker_url} answered without {kind.title}: {remedy}, "
            f"or set {kind.name}_middleware.required=false to go on without"
        )
