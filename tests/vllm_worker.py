"""Real vLLM workers for tests, where `VLLM_VENV` names the environment (`tests/vllm/README.md`)."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from tests.sglang.environment import built, cache_root
from tests.sglang_worker import LOG_DIRECTORY, tail
from tests.support.ports import free_ports
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import PATIENCE

HERE = Path(__file__).with_name("vllm")
VENV = os.environ.get("VLLM_VENV")
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
    *("--additional-config", '{"tool_call_parser": "hermes"}', "--enable-lora", "--max-lora-rank", "8"),
)


def python() -> str:
    """The interpreter that has vLLM."""
    assert VENV is not None
    return str(Path(VENV) / "bin" / "python")


@functools.cache
def model(seed: int = 0) -> Path:
    """A directory with a tiny dense model, its tokenizer, and an adapter in `adapter`. Another seed is another version
    of its weights."""

    def build(directory: Path) -> None:
        command = [python(), str(HERE / "make_model.py"), str(directory), tokenizer_directory("qwen3"), str(seed)]
        subprocess.run(command, check=True)

    return built(cache_root() / f"vllm-model-1-{seed}", build)


class RealVLLM:
    """One server. It and all of its processes end with `kill`."""

    def __init__(self, seed: int, more: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        LOG_DIRECTORY.mkdir(parents=True, exist_ok=True)
        self._log = LOG_DIRECTORY / f"{os.getpid()}-vllm-{self.port}.log"
        command = [str(Path(python()).with_name("vllm")), "serve", str(model()), *FLAGS]
        command += ["--port", str(self.port), "--seed", str(seed), *more]  # each its own: else all sample the same
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it has sampled a token."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended while it started\n{tail(self._log)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM did not answer within {START_TIMEOUT:.0f} s\n{tail(self._log)}")
            time.sleep(0.5)

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
def vllm_workers(count: int, *more: str, environment: Mapping[str, str] | None = None) -> Iterator[list[RealVLLM]]:
    """Workers of a model with these more flags, started one after the other: two at once take twice the time."""
    with contextlib.ExitStack() as stack:
        workers = []
        for seed in range(11, 11 + count):
            worker = RealVLLM(seed, more, environment)
            stack.callback(worker.kill)
            worker.wait()
            workers.append(worker)
        yield workers
