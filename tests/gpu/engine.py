"""The worker, asked directly, and the process that sends weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import aiohttp

from tests.gpu.model import Shape
from tests.support.ports import free_ports
from tests.support.waiting import STEP

FLAGS = ("--load-format", "dummy", "--enable-return-routed-experts", "--skip-server-warmup")
LAST_ID = Shape.vocab_size - 1  # SGLang 0.5.23 tells this id of a prompt as 0, with the right logprob
START = 1800.0  # seconds that a worker may take to come up
ROOT = Path(__file__).resolve().parents[2]


def add_options(parser: ArgumentParser) -> None:
    """What every command here is told of model and worker."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory that `python -m tests.gpu.model` wrote")
    add("--python", default=sys.executable, help="the interpreter, or command, that has SGLang (default: this one)")
    add("--worker", help="URL of a running worker; by default one is started")
    add("--flag", action="append", default=[], help="one more flag for the worker that is started; may come often")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where the sender's weights are (default: cuda)")
    add("--bucket-mib", type=int, default=1024, help="size of what is sent at a time (default: %(default)s)")
    add("--report", type=Path, help="file for the JSON report (default: it is printed)")


def write_report(arguments: Namespace, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1)
    if arguments.report is None:
        print(text)
    else:
        arguments.report.write_text(text + "\n")


class Engine:
    """One SGLang worker."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def get(self, path: str) -> Any:
        async with self._http.get(self.url + path) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def generate(self, body: dict[str, Any]) -> Any:
        async with self._http.post(f"{self.url}/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def running(self) -> int:
        """How many requests it decodes; -1 where some wait."""
        (load,) = (await self.get("/v1/loads"))["loads"]
        return -1 if load["num_waiting_reqs"] else int(load["num_running_reqs"])

    async def recompute(self, ids: Sequence[int]) -> dict[str, Any]:
        """What it says of these ids in one prefill, computed anew: `logprobs` of all but the first, and `experts`."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
            "extra_key": secrets.token_hex(8),  # a prefix cache of its own
        }
        meta = (await self.generate(body))["meta_info"]
        assert not meta["cached_tokens"]
        logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == [0 if each == LAST_ID else each for each in ids]
        return {"logprobs": logprobs, "experts": meta["routed_experts"]}

    async def facts(self) -> dict[str, Any]:
        """What figures mean nothing without."""
        info = await self.get("/server_info")
        names = ("version", "attention_backend", "sampling_backend", "chunked_prefill_size", "mem_fraction_static")
        told = {name: info[name] for name in names if name in info}
        return {"engine": "SGLang", **told, "max_total_num_tokens": info.get("max_total_num_tokens")}


@contextlib.asynccontextmanager
async def engine(arguments: Namespace) -> AsyncIterator[Engine]:
    """The worker that the options name, or one that they start and the block's end ends."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        if arguments.worker:
            yield Engine(arguments.worker.rstrip("/"), http)
            return
        port = free_ports(1)[0]
        command = [*shlex.split(arguments.python), "-m", "sglang.launch_server", "--model-path", str(arguments.model)]
        command += ["--port", str(port), *FLAGS, *arguments.flag]
        process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr, start_new_session=True)
        try:
            made = Engine(f"http://127.0.0.1:{port}", http)
            await asyncio.wait_for(_answers(made, process), START)
            yield made
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _answers(made: Engine, process: Process) -> None:
    while True:
        assert process.returncode is None, "the worker ended while it started"
        with contextlib.suppress(aiohttp.ClientConnectionError):
            await made.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
            return
        await asyncio.sleep(0.5)


class Sender:
    """The process `tests.gpu.sender`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def send(self, seed: int, step: float = 0.0) -> dict[str, Any]:
        """Send the weights of a policy; what the sender says of it."""
        assert self._process.stdin
        print(json.dumps({"seed": seed, "step": step}), file=self._process.stdin, flush=True)
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line, "the sender ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def sender(arguments: Namespace, url: str) -> AsyncIterator[Sender]:
    """The process that sends weights to `url`, ready."""
    command = [*shlex.split(arguments.python), "-m", "tests.gpu.sender", "--model", str(arguments.model), "--url", url]
    command += ["--bucket-mib", str(arguments.bucket_mib), "--device", arguments.device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # Its end is waited for, not that of its output: a helper of torch's, which outlives it, has that too.
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment, text=True) as process:  # noqa: ASYNC220
        made = Sender(process)
        await made.answer()
        yield made


async def until_running(made: Engine, count: int) -> None:
    """Until so many requests are decoded, and none waits."""
    while await made.running() != count:  # noqa: ASYNC110 (another process's fact)
        await asyncio.sleep(STEP)


def device_name() -> str:
    """The GPU, as its driver names it."""
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except FileNotFoundError:
        return "none"
