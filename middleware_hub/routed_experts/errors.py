"""Errors about rows, by kind.

NotFound
└── RowsNotHeld            404: the trajectory is known, its rows are not in memory
    ├── ExpertsNotHeld         routed_experts_not_held
    └── PositionsNotHeld       indexer_topk_not_held
UpstreamError
└── RowsMissing            502: a worker answered without the required rows
    ├── ExpertsMissing         routed_experts_missing
    └── PositionsMissing       indexer_topk_missing
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_router.errors import NotFound, UpstreamError
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, RowKind


class RowsNotHeld(NotFound):
    """The trajectory is known, but its rows never came, did not fit, or have been evicted."""


class ExpertsNotHeld(RowsNotHeld):
    """The trajectory is known, but its routed experts never came, did not fit, or have been evicted."""

    type = "routed_experts_not_held"


class PositionsNotHeld(RowsNotHeld):
    """The trajectory is known, but its chosen positions never came, did not fit, or have been evicted."""

    type = "indexer_topk_not_held"


class RowsMissing(UpstreamError):
    """A worker answered without rows, which are required."""

    def __init__(self, kind: RowKind, worker_url: str | None, remedy: str) -> None:
        super().__init__(
            f"worker {worker_url} answered without {kind.title}: {remedy}, "
            f"or set {kind.name}_middleware.required=false to go on without"
        )


class ExpertsMissing(RowsMissing):
    """A worker answered without routed experts, which `RoutedExpertsMiddleware` requires."""

    type = "routed_experts_missing"


class PositionsMissing(RowsMissing):
    """A worker answered without chosen positions, which `IndexerTopkMiddleware` requires."""

    type = "indexer_topk_missing"


NOT_HELD: Mapping[RowKind, type[RowsNotHeld]] = {ROUTED_EXPERTS: ExpertsNotHeld, INDEXER_TOPK: PositionsNotHeld}
MISSING: Mapping[RowKind, type[RowsMissing]] = {ROUTED_EXPERTS: ExpertsMissing, INDEXER_TOPK: PositionsMissing}
