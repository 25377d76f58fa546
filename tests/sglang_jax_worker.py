"""Real SGLang-Jax workers for tests, where `SGLANG_JAX_SRC` says where its source is (`tests/sglang_jax/README.md`)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.sglang.environment import built, cache_root
from tests.sglang_worker import LOG_DIRECTORY, START_TIMEOUT, tail
from tests.support.ports import free_ports
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import PATIENCE

HERE = Path(__file__).with_name("sglang_jax")
SOURCE = os.environ.get("SGLANG_JAX_SRC")
#: How Qwen3 marks calls and reasoning.
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def python() -> str:
    """The interpreter that has its packages."""
    assert SOURCE is not None
    return os.environ.get("SGLANG_JAX_PYTHON") or str(Path(SOURCE).parent / "venv" / "bin" / "python")


@functools.cache
def model() -> Path:
    """A directory with a tiny mixture of experts and its tokenizer."""

    def build(directory: Path) -> None:
        command = [python(), str(HERE / "make_model.py"), str(directory), tokenizer_directory("qwen3")]
        subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})

    return built(cache_root() / "sglang-jax-model-1", build)


@functools.cache
def model_of_words() -> Path:
    """The same model, with a tokenizer that has no tokens of their own for `MARKS`: where a grammar wants one, the
    engine samples that token, its grammar does not accept it, and the answer ends as aborted."""

    def build(directory: Path) -> None:
        shutil.copytree(model(), directory, dirs_exist_ok=True)
        for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
            file = directory / name
            read = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(read[key], list):
                read[key] = [each for each in read[key] if each["content"] not in MARKS]
            else:
                read[key] = {token: each for token, each in read[key].items() if each["content"] not in MARKS}
            file.write_text(json.dumps(read), encoding="utf-8")

    return built(cache_root() / "sglang-jax-model-of-words-1", build)


class JaxWorker:
    """One server, which computes so many requests in a batch. It and all of its processes end with `kill`.

    Of a batch of several only the first is computed as it is alone: attention on a CPU takes the places of keys for
    those of sequences without the gaps between their pages (`native_backend.forward_attention`). That is no defect of
    what is told: ids and logprobs are those that were sampled. But nobody can score them again.
    """

    def __init__(
        self, seed: int, *, running: int = 1, checkpoint: Path | None = None, more: Sequence[str] = ()
    ) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        LOG_DIRECTORY.mkdir(parents=True, exist_ok=True)
        self._log = LOG_DIRECTORY / f"{os.getpid()}-jax-{self.port}.log"
        jit = cache_root() / "sglang-jax-compiled"
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(jit), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # Each its own seed: by default all sample the same.
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--random-seed", str(seed)]
        flags += ["--model-path", str(checkpoint or model()), "--enable-return-routed-experts"]
        flags += ["--max-running-requests", str(running), *more]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [python(), str(HERE / "launch_worker.py"), *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, **compiled},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Returns when it has generated a token."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"SGLang-Jax ended while it started\n{tail(self._log)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"SGLang-Jax did not answer within {START_TIMEOUT:.0f} s\n{tail(self._log)}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health_generate", timeout=PATIENCE):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """Ends it as the loss of a machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def jax_workers(
    count: int, *, first_seed: int = 11, running: int = 1, checkpoint: Path | None = None, more: Sequence[str] = ()
) -> Iterator[list[JaxWorker]]:
    """`count` workers of a model with these more flags, started side by side and all ready."""
    with contextlib.ExitStack() as stack:
        seeds = range(first_seed, first_seed + count)
        workers = [JaxWorker(seed, running=running, checkpoint=checkpoint, more=more) for seed in seeds]
        for worker in workers:
            stack.callback(worker.kill)
        for worker in workers:
            worker.wait()
        yield workers
