"""Real SGLang workers for tests: started, killed and restarted as processes of this machine."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from tests.sglang.environment import NURSERY, ensure, transfer_parts, venv
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE

START_TIMEOUT = 10 * PATIENCE  # about 10 s on an idle machine
STOP_TIMEOUT = PATIENCE
FLAGS = (
    "--skip-server-warmup",  # readiness is a first answered request anyway
    "--sleep-on-idle",  # the scheduler polls otherwise: one core per idle worker
    "--constrained-json-disable-any-whitespace",  # random weights would spend their whole budget on it
    *("--tool-call-parser", "qwen"),
)
#: What makes a worker one half of a prefill/decode pair.
MODE = "--disaggregation-mode"
LOG_DIRECTORY = Path(tempfile.gettempdir()) / "miles-router-sglang-logs"


@dataclass(frozen=True)
class RealHalves:
    """Prefill workers, the port at which each is met, and decode workers."""

    prefills: list[RealWorker]
    ports: list[int]
    decodes: list[RealWorker]


class Nursery:
    """The process that has imported SGLang and forks workers; they end with it, and it with this process."""

    def __init__(self) -> None:
        LOG_DIRECTORY.mkdir(parents=True, exist_ok=True)
        self.log_path = LOG_DIRECTORY / f"{os.getpid()}-nursery.log"
        command = [str(venv()), str(NURSERY)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        atexit.register(self.close)

    def fork(self, flags: tuple[str, ...], environment: Mapping[str, str], log_path: Path, scratch: str) -> int:
        """Starts a worker and returns its process id, which is also its process group."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            order = {"flags": flags, "environment": environment, "log": str(log_path), "scratch": scratch}
            print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"SGLang could not be imported\n{tail(self.log_path)}")
        return int(answer)

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def nursery() -> Nursery:
    return Nursery()


def tail(path: Path, lines: int = 40) -> str:
    text = path.read_text(errors="replace") if path.exists() else "(no log)"
    return "\n".join([f"--- {path}", *(line[:400] for line in text.splitlines()[-lines:])])


@dataclass
class RealWorker:
    """One SGLang server. `with RealWorker.start(moe=True) as worker:` waits until it has answered a request."""

    running: ClassVar[list[RealWorker]] = []

    port: int
    flags: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    pid: int | None = None
    _scratch: str = field(default="", repr=False)

    @classmethod
    def start(
        cls,
        *flags: str,
        moe: bool = False,
        model: Path | None = None,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> RealWorker:
        """Starts the processes and returns, so that several can come up side by side; `wait` or `with` waits. `model`
        is a directory in place of the random models."""
        if model is None:
            model = ensure().moe_model if moe else ensure().dense_model
        worker = cls(port or free_ports(1)[0], ("--model-path", str(model), *FLAGS, *flags), environment or {})
        worker._spawn()
        return worker

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        return LOG_DIRECTORY / f"{os.getpid()}-{self.port}.log"

    @property
    def alive(self) -> bool:
        return self.pid is not None and _exists(os.kill, self.pid)

    def __enter__(self) -> RealWorker:
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait(self, timeout: float = START_TIMEOUT) -> None:
        """Returns when the worker has generated a token."""
        deadline = time.monotonic() + timeout
        while not self._answers():
            if not self.alive:
                raise RuntimeError(f"SGLang ended while it started\n{tail(self.log_path)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"SGLang did not answer within {timeout:.0f} s\n{tail(self.log_path)}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it as an operator would: SIGTERM, and SIGKILL where that takes too long."""
        if self.pid is not None:
            leftovers = _shared_memory(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self._gone_within(STOP_TIMEOUT)
            self._kill_and_clear(leftovers)

    def kill(self) -> None:
        """Ends all of its processes at once, as the loss of a machine would."""
        if self.pid is not None:
            self._kill_and_clear(_shared_memory(self.pid))

    def restart(self) -> None:
        """Kills it where it still runs, starts it on the same port and waits for it."""
        self.kill()
        self._spawn()
        self.wait()

    def _spawn(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="sglang-")
        self.pid = nursery().fork(
            ("--port", str(self.port), *self.flags), self.environment, self.log_path, self._scratch
        )
        RealWorker.running.append(self)

    def _kill_and_clear(self, leftovers: list[Path]) -> None:
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self._gone_within(STOP_TIMEOUT):
            raise TimeoutError(f"process group {self.pid} survives SIGKILL")
        self.pid = None
        RealWorker.running.remove(self)
        for path in leftovers:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _gone_within(self, timeout: float) -> bool:
        assert self.pid is not None
        deadline = time.monotonic() + timeout
        while _exists(os.killpg, self.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _answers(self) -> bool:
        try:
            self._call("/model_info")
            if MODE in self.flags:  # one half generates nothing by itself
                self._call("/health_generate")
            else:
                self._call("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        except OSError:
            return False
        return True

    def _call(self, path: str, body: object = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            response.read()


#: Without it, the halves of a pair refuse requests for sampling masks.
MASKS = {"SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1"}


@contextlib.contextmanager
def real_pair(*flags: str, moe: bool = False, prefills: int = 1, decodes: int = 1) -> Iterator[RealHalves]:
    """So many halves of prefill/decode pairs, started side by side and all ready. They tell sampling masks."""
    parts = ("--transfer-parts", str(transfer_parts()), "--disaggregation-transfer-backend", "mooncake")
    ports = free_ports(prefills)
    with contextlib.ExitStack() as stack:

        def start(mode: str, port: int) -> RealWorker:
            # Else a decode half wants 10 GB of the host for what it retracts.
            backup = ("--disaggregation-decode-retraction-backup", "cpu_tensor") if mode == "decode" else ()
            own = (MODE, mode, "--disaggregation-bootstrap-port", str(port), *backup)
            worker = RealWorker.start(*parts, *own, *flags, moe=moe, environment=MASKS)
            stack.callback(worker.kill)
            return worker

        halves = RealHalves(
            [start("prefill", port) for port in ports], ports, [start("decode", ports[0]) for _ in range(decodes)]
        )
        for worker in (*halves.prefills, *halves.decodes):
            worker.wait()
        yield halves


def _shared_memory(pid: int) -> list[Path]:
    """Segments of a worker that SGLang leaves behind even where it is stopped gently."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    return [Path(name) for name in set(re.findall(r"/dev/shm/sglang_\S+", maps))]


def _exists(signalled: Callable[[int, int], None], pid: int) -> bool:
    try:
        signalled(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def real_workers(count: int, *flags: str, moe: bool = False, model: Path | None = None) -> Iterator[list[RealWorker]]:
    """`count` workers, started side by side and all ready."""
    with contextlib.ExitStack() as stack:
        workers = [RealWorker.start(*flags, moe=moe, model=model) for _ in range(count)]
        for worker in workers:
            stack.callback(worker.kill)
        for worker in workers:
            worker.wait()
        yield workers
