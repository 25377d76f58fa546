"""How long a router keeps everybody waiting: a process of its own asks `/health` all the time.

async with pulse(router.url, router.process.pid) as beat:
    await beat.worst()          # seconds, since the last look

What a busy machine does is not the router's doing: time in which its event loop, or who asks, was ready to go on and
had no processor is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import select
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.waiting import soon

#: Seconds between an answer and the next question.
PAUSE = 0.002


class Pulse:
    """The process that asks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def worst(self) -> float:
        """Seconds that the slowest answer took of those awaited since the last look; the one awaited now is waited
        for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await soon(self._process.stdout.readline()))


@contextlib.asynccontextmanager
async def pulse(url: str, process_id: int) -> AsyncIterator[Pulse]:
    """Ask a router, which is that process, until the block ends."""
    command = [sys.executable, "-m", __name__, url, str(process_id)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        beat = Pulse(process)
        await beat.worst()  # it has begun
        yield beat
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await soon(process.wait())


def starved(*processes: str) -> float:
    """Seconds that the main threads of these processes, together, were ready and waited for a processor; 0.0 where the
    system does not tell (Linux, Documentation/scheduler/sched-stats)."""
    waited = 0
    for process in processes:
        with contextlib.suppress(FileNotFoundError):
            waited += int(Path("/proc", process, "schedstat").read_bytes().split()[1])
    return waited * 1e-9


def main(url: str, router: str) -> None:
    """Ask until the standard input ends; for each line of it, write the worst since the last."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    worst = 0.0
    while True:
        begun, before = time.perf_counter(), starved(router, "self")
        connection.request("GET", "/health")
        connection.getresponse().read()
        took = time.perf_counter() - begun
        worst = max(worst, took - (starved(router, "self") - before))
        if select.select([sys.stdin], [], [], PAUSE)[0]:
            if not sys.stdin.readline():
                return
            print(worst, flush=True)
            worst = 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
