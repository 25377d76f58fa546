"""Real vLLM workers for tests, where their environment was built (`tests/vllm/environment.py`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from tests.sglang_worker import LOG_DIRECTORY, tail
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE
from tests.vllm.environment import found, model, venv

PYTHON = found()
#: Seconds that a start may take: 60 to 160 on two cores.
START_TIMEOUT = 600.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
FLAGS = (
    *("--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "4096", "--enable-scale-out"),
    *("--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--additional-config", '{"tool_call_parser": "hermes"}'),
)
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8")


class RealVLLM:
    """One server. It and all of its processes end with `kill`."""

    def __init__(self, checkpoint: Path, seed: int, more: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        LOG_DIRECTORY.mkdir(parents=True, exist_ok=True)
        self.log_path = LOG_DIRECTORY / f"{os.getpid()}-vllm-{self.port}.log"
        command = [str(venv()), "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *FLAGS]
        command += ["--port", str(self.port), "--seed", str(seed), *more]  # each its own: else all sample the same
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, **environment},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it has sampled a token."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if not self.alive:
                raise RuntimeError(f"vLLM ended while it started\n{tail(self.log_path)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM did not answer within {START_TIMEOUT:.0f} s\n{tail(self.log_path)}")
            time.sleep(0.5)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def _answers(self) -> bool:
        body = orjson.dumps({"token_ids": [40], "sampling_params": {"max_tokens": 1}})
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/inference/v1/generate", body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE):
                return True
        except OSError:
            return False

    def stop_core(self, *, stopped: bool = True) -> None:
        """Have its engine core stand still, or go on; its HTTP process answers."""
        found = subprocess.run(
            ["pgrep", "-s", str(self._process.pid), "-f", "EngineCore"], capture_output=True, text=True, check=True
        )
        for each in found.stdout.split():
            os.kill(int(each), signal.SIGSTOP if stopped else signal.SIGCONT)

    def kill(self) -> None:
        """End it as the loss of a machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def vllm_workers(
    count: int, *more: str, environment: Mapping[str, str] | None = None, checkpoint: Path | None = None
) -> Iterator[list[RealVLLM]]:
    """Workers with these more flags, started one after the other: two at once take twice the time.

    Args:
        checkpoint: of their model; by default the tiny one, with room for adapters.
    """
    more += () if checkpoint else ADAPTERS
    with contextlib.ExitStack() as stack:
        workers = []
        for seed in range(11, 11 + count):
            worker = RealVLLM(checkpoint or model(), seed, more, environment or {})
            stack.callback(worker.kill)
            worker.wait()
            workers.append(worker)
        yield workers
