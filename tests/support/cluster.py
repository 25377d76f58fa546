"""Routers of one cluster, a process each, without a supervisor; `python -m tests.support.cluster` is one of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

from miles_router import log
from miles_router.app import create_app
from miles_router.fleet.placement.sessions import Affinity
from miles_router.serving.server import banner, listen, raise_file_limit, serve_at
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from tests.support.http import Pairs, RawReply, ask
from tests.support.owned import be_patient
from tests.support.running_router import QUIETLY
from tests.support.shard_owners import owners_at
from tests.support.waiting import until


class Member:
    """One process of the cluster, on a port of its own."""

    def __init__(
        self, index: int, directory: Path, urls: Sequence[str], sock: socket.socket, settings: Any, file: IO[bytes]
    ) -> None:
        self.index = index
        self._log = file
        own = {"index": index, "directory": str(directory), "urls": urls}
        command = [
            sys.executable,
            "-m",
            "tests.support.cluster",
            json.dumps({**own, "sock": sock.fileno(), **settings}),
        ]
        self.process = subprocess.Popen(command, stdout=file, stderr=file, pass_fds=[sock.fileno()])
        self.url = ""

    async def serves(self) -> None:
        await until(lambda: self._banner() or self.process.poll() is not None, "a banner")
        assert self.process.poll() is None, self.log()
        self.url = self._banner()

    def _banner(self) -> str:
        found = re.search(r"listening +(http://\S+)", self.log())
        return found[1] if found else ""

    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8")

    async def ask(self, method: str, target: str, headers: Pairs = (), body: bytes | None = None) -> RawReply:
        return await ask(self.url, method, target, headers, body)

    def open_files(self) -> list[str]:
        """What its descriptors are of."""
        found: list[str] = []
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(each))
        return found

    def kill(self, kind: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal; wait for its end if that is one."""
        self.process.send_signal(kind)
        if kind == signal.SIGKILL:
            self.process.wait()


class Cluster:
    """All members."""

    def __init__(self, directory: Path, count: int, stack: contextlib.ExitStack, settings: dict[str, Any]) -> None:
        self._directory = directory
        self._stack = stack
        self._settings = settings
        #: Held here, so that requests wait in them for a process that is started again.
        self._sockets = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(count)]
        self.members: list[Member] = []

    async def start(self, index: int) -> Member:
        name = self._directory / f"{index}-{len(list(self._directory.glob('*.log')))}.log"
        file = self._stack.enter_context(name.open("wb"))
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in self._sockets]
        member = Member(index, self._directory, urls, self._sockets[index], self._settings, file)
        self._stack.callback(_end, member.process)
        await member.serves()
        self.members[index : index + 1] = [member]
        return member


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@contextlib.asynccontextmanager
async def cluster(
    count: int, *workers: str, middlewares: Sequence[str] = (), **settings: Any
) -> AsyncIterator[Cluster]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-")))
        made = Cluster(directory, count, stack, {"worker_urls": workers, "middlewares": middlewares, **settings})
        for index in range(count):
            await made.start(index)
        yield made


def main() -> None:
    asked = json.loads(sys.argv[1])
    index, directory, urls = asked.pop("index"), Path(asked.pop("directory")), asked.pop("urls")
    sock = socket.socket(fileno=asked.pop("sock"))
    asked["middlewares"] = tuple(MiddlewareSpec(path) for path in asked["middlewares"])
    asked["worker_urls"] = tuple(asked["worker_urls"])
    config, owners = RouterConfig(**{**QUIETLY, **asked}), owners_at(index, len(urls), directory, urls, Affinity())
    log.configure(config.log_level, config.log_format)
    be_patient()
    raise_file_limit()
    app = create_app(config, owners=owners)
    serve_at(app, sock, lambda: log.show(banner(config, sock.getsockname())))


if __name__ == "__main__":
    main()
