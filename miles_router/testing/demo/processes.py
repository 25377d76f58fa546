"""The demo's child processes: each has a log file, and all are stopped together."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

STOP_PATIENCE = 15.0
POLL = 0.1

T = TypeVar("T")


class ProcessError(Exception):
    """A child process ended or was not ready in time; the message shows the end of its log."""


class Process:
    """A child process in its own process group, so that Ctrl-C reaches only the demo, which then ends the group."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        self.name = name
        self._log = logs / f"{name.replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def output(self) -> str:
        """Everything in the process's log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    async def until(self, what: str, seconds: float, ready: Callable[[], Awaitable[T | None]]) -> T:
        """Poll `ready` until it returns something other than None, and return that.

        Args:
            what: what the process must do, for the error message.

        Raises:
            ProcessError: the process ended first, or `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (result := await ready()) is not None:
                return result
            if self._child.poll() is not None:
                raise self._error(f"ended with status {self._child.returncode}")
            await asyncio.sleep(POLL)
        raise self._error(f"did not {what} within {seconds:g} s")

    def _error(self, problem: str) -> ProcessError:
        return ProcessError("\n    ".join([f"the {self.name} {problem}; it said:", *self.output.splitlines()[-15:]]))

    def wait(self, deadline: float) -> None:
        """Block until the process has ended or `time.monotonic()` reaches `deadline`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, deadline - time.monotonic()))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, if it still exists."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


class DemoFleet:
    """Processes that are stopped together. `logs` is the directory of their log files."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Process] = []

    def start(self, name: str, *command: str) -> Process:
        process = Process(name, command, self._logs)
        self._running.append(process)
        return process

    def stop(self) -> None:
        """Send SIGTERM to all processes, then SIGKILL to those that are left after `STOP_PATIENCE` seconds."""
        for process in self._running:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_PATIENCE
        for process in self._running:
            process.wait(deadline)
            process.signal(signal.SIGKILL)
            process.wait(time.monotonic() + STOP_PATIENCE)


def free_port() -> int:
    """Return a free port below the system's ephemeral range, so that no outgoing connection takes it meanwhile."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
