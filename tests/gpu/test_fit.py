"""The cost model's prices are what was measured, and the fit finds the prices that made some times."""

from __future__ import annotations

import json

from tests.gpu.fit import DECODE, PREFILL, REPORT, chunks, errors, fit, points
from tests.support.simulated.costs.gpu import QWEN3_8B_H100, QWEN3_30B_A3B_H100


def test_the_prices_that_stand_in_the_cost_model_are_those_of_the_fit() -> None:
    fitted = fit(json.loads(REPORT.read_text()))
    for name in (*PREFILL, *DECODE, "kv_tokens", "chunk_tokens"):
        assert getattr(QWEN3_30B_A3B_H100, name) == getattr(fitted, name), name


def test_the_prices_that_made_a_report_are_found_again() -> None:
    report = json.loads(REPORT.read_text())
    measured = report["prefill"] + report["decode"]
    for each, point in zip(measured, points(report), strict=True):
        each["seconds" if "seconds" in each else "step_seconds"] = point.cost(QWEN3_8B_H100)
    fitted = fit(report)
    for name in (*PREFILL, *DECODE):
        assert getattr(fitted, name) == getattr(QWEN3_8B_H100, name), name
    assert {row[3] for row in errors(report, QWEN3_8B_H100)} == {"+0% to +0%"}


def test_requests_are_cut_into_prefill_chunks_behind_the_cached_prefix() -> None:
    assert list(chunks(2, 3, 0, 8)) == [[(3, 0), (3, 0)]]
    assert list(chunks(3, 4, 0, 8)) == [[(4, 0), (4, 0)], [(4, 0)]]
    assert list(chunks(1, 19, 5, 8)) == [[(8, 5)], [(8, 13)], [(3, 21)]]
    assert list(chunks(2, 6, 1, 8)) == [[(6, 1), (2, 1)], [(4, 3)]]
