"""Child processes of the benchmark: free ports, starting, waiting until ready, stopping with all descendants."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 3.0


class PeerError(RuntimeError):
    """A server did not start, or answers something other than it should."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def fetch(port: int, method: str, path: str, body: bytes | None = None, limit: int | None = None) -> tuple[int, bytes]:
    """One request on a connection of its own: the status, and the body or its first `limit` bytes."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read() if limit is None else response.read(limit)
    finally:
        connection.close()


def _wait_ready(process: subprocess.Popen[bytes], command: Sequence[str], port: int, path: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            if fetch(port, "GET", path)[0] == 200:
                return
        time.sleep(0.05)
    state = f"exited with {process.returncode}" if process.poll() is not None else "is not ready"
    tail = log.read_text(errors="replace")[-800:].strip()
    raise PeerError(f"{Path(command[0]).name} {state}: {tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group that `started` made; what does not go at once is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
            return


@contextlib.contextmanager
def started(
    command: Sequence[str],
    port: int,
    ready_path: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Iterator[int]:
    """Run `command` until the block ends; yields its process id once `GET ready_path` answers 200."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=env,
            cwd=directory,
            start_new_session=True,
        )
    try:
        _wait_ready(process, command, port, ready_path, log)
        yield process.pid
    finally:
        _stop(process)
