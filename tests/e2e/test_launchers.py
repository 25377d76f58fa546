"""What starts the parts of a router on several machines: the manifest for Kubernetes, the script for Slurm."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from miles_router.cli import parser
from miles_router.settings.config import FIELDS, load
from miles_router.testing import SimulatedWorker
from tests.support.http import ask
from tests.support.ports import free_ports
from tests.support.waiting import STEP

CONFIGS = Path(__file__).parents[2] / "configs"
JSON = [("Content-Type", "application/json")]


def manifests(name: str = "shards.yaml") -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((CONFIGS / "kubernetes" / name).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", ["shards.yaml", "router.yaml", "engines.yaml"])
def test_the_manifests_are_what_kubernetes_takes(name: str) -> None:
    for each in manifests(name):
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_the_router_s_manifest_finds_its_engines_and_outlives_its_requests() -> None:
    service, engines, router = manifests("router.yaml")
    (workers,) = manifests("engines.yaml")
    spec = router["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    config = load(vars_of(parser().parse_args(container["args"])), {}).config
    (source,) = config.discover
    assert source == f"dns://{engines['metadata']['name']}:{engines['spec']['ports'][0]['port']}"
    assert engines["spec"]["clusterIP"] == "None"
    assert engines["spec"]["selector"] == workers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == router["spec"]["template"]["metadata"]["labels"]
    assert spec["terminationGracePeriodSeconds"] > config.shutdown_timeout
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "startup", "readiness")}
    assert probes == {"liveness": "/liveness", "startup": "/health", "readiness": "/readiness"}
    assert {f"MILES_ROUTER_{name.upper()}" for name in ("api_key", "admin_api_key")} == {
        each["name"] for each in container["env"]
    }


def vars_of(options: Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name in FIELDS and value is not None}


def test_the_kustomization_names_files_that_are_there() -> None:
    found = yaml.safe_load((CONFIGS / "kustomization.yaml").read_text(encoding="utf-8"))
    (dashboard,) = found["configMapGenerator"]
    for name in (*found["resources"], *dashboard["files"]):
        assert (CONFIGS / name).is_file()
    assert set(found) == {"apiVersion", "kind", "resources", "configMapGenerator"}


def test_the_image_runs_the_wheel_as_a_user_without_rights() -> None:
    lines = [line.strip() for line in (CONFIGS.parent / "Dockerfile").read_text(encoding="utf-8").splitlines()]
    last = lines.index("FROM ${PYTHON}")
    assert "USER 10001" in lines[last:]
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")]
    assert parser().parse_args(yaml.safe_load(entry)[1:]).host == "0.0.0.0"
    kept = (CONFIGS.parent / ".dockerignore").read_text(encoding="utf-8").split("!")[1:]
    assert {"LICENSE", "README.md", "pyproject.toml", "miles_router"} <= {each.split()[0] for each in kept}


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
#: Runs a step of one task for each node and place.
SRUN_ALL = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"
"""
ONE_NODE = """#!/bin/bash
echo 127.0.0.1
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


async def test_the_script_for_slurm_starts_workers_that_a_router_finds(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN_ALL), ("scontrol", ONE_NODE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(stat.S_IRWXU)
    port, first = free_ports(2)
    own = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "one", "SLURM_NTASKS_PER_NODE": "1", "SHARED": str(tmp_path)}
    own |= {"PORT": str(port), "WORKER_PORT": str(first), "WORKER": "miles-router-worker"}
    own |= {"SETTINGS": "--health-check-interval 0.5"}
    own |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (tmp_path / "log").open("wb") as log:
        job = await asyncio.create_subprocess_exec(
            *("bash", str(CONFIGS / "slurm" / "workers.sbatch")),
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
            start_new_session=True,
        )
    try:
        await answers(f"http://127.0.0.1:{port}", job)
        assert (tmp_path / "workers-8").read_text() == f"http://127.0.0.1:{first}\n"
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
