"""The benchmark of placement: tiny workloads through our router, its processes real ones, and what it says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.placement.routers import contenders

ROOT = Path(__file__).resolve().parents[2]
EPISODES = [
    *[{"at": 0, "group": "g", "shared_prefix": 60, "prompt_tokens": 60, "turns": [{"output_tokens": 40}]}] * 4,
    *[
        {
            "at": 0.5,
            "group": f"s{number}",
            "shared_prefix": 0,
            "prompt_tokens": 100,
            "turns": [{"output_tokens": 30, "tool_wait_s": 0.5, "append_tokens": 20}] * 3,
        }
        for number in range(3)
    ],
]


def played(folder: Path, router: str) -> list[dict[str, Any]]:
    """What the benchmark says of the tiny workload behind all policies of a router."""
    workload = folder / "tiny.jsonl"
    workload.write_text("".join(json.dumps(each) + "\n" for each in EPISODES))
    command = [
        sys.executable, "-m", "tests.benchmarks.placement", "--workload", str(workload), "--seeds", "1", "--json",
        "--only", router, "--workers", "3", "--loses-at", "1.5", "--gpu-speed", "0.5", "--polite",
        "--plot", str(folder / "plot.png"),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["results"]
    return rows


def test_a_run_ends_with_one_line_of_json_that_has_a_row_for_every_policy_of_ours(tmp_path: Path) -> None:
    rows = played(tmp_path, "miles-router")
    assert [row["policy"] for row in rows] == [each.policy for each in contenders() if each.router == "miles-router"]
    assert [row["default"] for row in rows].count(True) == 1
    for row in rows:
        assert (row["router"], row["workload"], row["failed"]) == ("miles-router", "tiny", 0)
        assert row["makespan_s"] >= row["lower_bound_s"] > 0
        assert 0 < row["turn_p50_s"] <= row["turn_p99_s"] <= row["makespan_s"]
        # The second and third turns of the three sessions find at least what they said; most of it is theirs alone.
        assert 0 < row["prefix_hit_rate"] < 1
    assert (tmp_path / "plot.png").stat().st_size > 1000
