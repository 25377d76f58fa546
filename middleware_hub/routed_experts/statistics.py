"""The numbers of each kind of rows, for `GET /metrics` and `GET /router/info`."""

from __future__ import annotations

from collections.abc import Mapping

from miles_router.middlewares import Statistics, counter, gauge
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, RowKind


class RowStatistics(Statistics):
    """Counters of transferred, reused and evicted rows since the start, and gauges of the rows in memory."""

    answers = counter("Answers whose rows were taken.")
    transferred_rows = counter("Rows that workers sent.")
    reused_rows = counter("Rows that were in memory already and were not sent again.")
    saved_bytes = counter("Bytes of answers that reused rows saved.")
    evicted = counter("Generations whose rows were evicted.")
    evicted_bytes = counter("Bytes of these rows.")
    generations = gauge("Generations with rows in memory.")
    bytes = gauge("Bytes of rows in memory.")
    missing = counter("Answers whose rows were missing or unusable, by reason.", by="reason")


class ExpertStatistics(RowStatistics, prefix="miles_router_routed_experts"):
    """Statistics of routed experts."""


class PositionStatistics(RowStatistics, prefix="miles_router_indexer_topk"):
    """Statistics of chosen positions."""


STATISTICS: Mapping[RowKind, type[RowStatistics]] = {
    ROUTED_EXPERTS: ExpertStatistics,
    INDEXER_TOPK: PositionStatistics,
}
