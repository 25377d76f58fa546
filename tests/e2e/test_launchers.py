"""What starts the parts of a router on several machines: the manifest for Kubernetes, the script for Slurm."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from miles_router.cli import parser
from miles_router.testing import SimulatedWorker
from tests.support.http import ask
from tests.support.ports import free_ports
from tests.support.waiting import STEP

CONFIGS = Path(__file__).parents[2] / "configs"
JSON = [("Content-Type", "application/json")]


def manifests() -> list[dict[str, Any]]:
    text = (CONFIGS / "kubernetes" / "shards.yaml").read_text(encoding="utf-8")
    return [*yaml.safe_load_all(text)]


@pytest.mark.parametrize("place", range(4))
def test_the_manifest_is_what_kubernetes_takes(place: int) -> None:
    kubernetes_validate.validate(manifests()[place], "1.33", strict=True)


def test_the_manifest_starts_as_many_shards_as_it_tells_each_part() -> None:
    parts = {each["metadata"]["name"]: each["spec"] for each in manifests() if each["kind"] == "StatefulSet"}
    leader, shard = (
        parts[name]["template"]["spec"]["containers"][0] for name in ("miles-router-leader", "miles-router-shard")
    )
    words = shard["args"][0].replace("${HOSTNAME##*-}", "0").replace('"', "").split()
    for command in (leader["command"], words[1:]):
        assert parser().parse_args(command[1:]).shards == parts["miles-router-shard"]["replicas"]


#: Runs each task of a step here, as `srun` does on the nodes.
SRUN = """#!/bin/bash
count=1
while [[ "$1" == --* ]]; do [[ "$1" == --ntasks=* ]] && count="${1#--ntasks=}"; shift; done
for ((task = 0; task < count; task++)); do
    SLURM_PROCID=$task SLURMD_NODENAME=127.0.0.1 "$@" &
done
trap 'kill $(jobs -p)' TERM
wait
"""
SCONTROL = """#!/bin/bash
printf '127.0.0.1\\n127.0.0.1\\n'
"""


async def test_the_script_for_slurm_starts_one_router(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(stat.S_IRWXU)
    port = free_ports(3)[1]
    async with SimulatedWorker() as worker:
        own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "two", "PORT": str(port), "SHARED": str(tmp_path)}
        own |= {"STATE": str(tmp_path / "state"), "SETTINGS": f"--worker-urls {worker.url}"}
        own |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        script = str(CONFIGS / "slurm" / "shards.sbatch")
        with (tmp_path / "log").open("wb") as log:
            job = await asyncio.create_subprocess_exec(
                "bash", script, stdout=log, stderr=log, env={**os.environ, **own}, start_new_session=True
            )
        try:
            for shard in (0, 1):
                await answers(f"http://127.0.0.1:{port + shard}", job)
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            await job.wait()


async def answers(url: str, job: asyncio.subprocess.Process) -> None:
    """Wait until a shard answers with what the worker has generated."""
    while True:
        assert job.returncode is None
        try:
            answer = await ask(url, "POST", "/generate", JSON, b'{"text": "Hi"}')
        except OSError:
            answer = None
        if answer is not None and answer.status == 200:
            return
        await asyncio.sleep(STEP)
