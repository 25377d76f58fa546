"""Standard error that nobody reads, or that has no room: the router answers, and counts the lines that it drops."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterator

import pytest

from miles_router.log import MAX_WAITING
from tests.support.http import Client, RawReply, ask
from tests.support.ports import free_ports
from tests.support.running_router import COMMAND
from tests.support.waiting import until

DROPPED = "miles_router_dropped_log_lines_total"
PATH = "/" + "x" * 7000


class Silenced:
    """The command, writing where nothing can be written."""

    def __init__(self, stderr: int) -> None:
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        command = [str(COMMAND), "--port", str(self._port), "--access-log", "true"]
        self.process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL)

    async def answers(self) -> None:
        await until(lambda: self._listens() or self.process.poll() is not None, "the router listens")
        assert (await self.ask("/health")).status == 200

    def _listens(self) -> bool:
        with socket.socket() as trying:
            return trying.connect_ex(("127.0.0.1", self._port)) == 0

    async def ask(self, path: str) -> RawReply:
        return await ask(self.url, "GET", path)

    async def dropped(self) -> int:
        found = re.search(rf"^{DROPPED} (\S+)$", (await self.ask("/metrics")).body.decode(), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    async def ends(self) -> int:
        self.process.terminate()
        await until(lambda: self.process.poll() is not None, "the router has ended")
        return int(self.process.returncode)


@contextlib.contextmanager
def silenced(stderr: int) -> Iterator[Silenced]:
    router = Silenced(stderr)
    try:
        yield router
    finally:
        router.process.kill()
        router.process.wait()


async def test_a_pipe_that_nobody_reads_stops_nothing() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"-" * 65536)
    os.set_blocking(writing, True)
    with silenced(writing) as router:
        os.close(writing)
        await router.answers()
        async with await Client.connect(router.url) as client:
            for _ in range(MAX_WAITING // len(PATH) + 100):
                assert (await client.ask("GET", PATH)).status == 503
        dropped = await router.dropped()
        assert dropped > 0
        with os.fdopen(reading, "rb") as reader:
            os.set_blocking(reader.fileno(), True)
            seen = b""
            while b"miles-router " not in seen:  # the banner, which waited as well
                seen += reader.read1(1 << 20)
            router.process.terminate()
            seen += reader.read()
        assert f"log_lines_dropped count={dropped}".encode() in seen
        assert await router.ends() == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
async def test_a_full_disk_stops_nothing() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with silenced(full) as router:
        os.close(full)
        await router.answers()
        assert await router.dropped() > 0
        assert await router.ends() == 0
