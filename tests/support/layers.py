"""A router of several processes with layers, and the ports on which each process alone listens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE
from tests.support.forks import fork_router
from tests.support.http import RawReply, ask
from tests.support.owned import name_of
from tests.support.processes import Processes, processes
from tests.support.running_router import RouterOfProcesses
from tests.support.session_trial import SESSIONS

JSON = [("Content-Type", "application/json")]


def written(directory: Path, layers: Sequence[tuple[str, dict[str, Any]]], **settings: Any) -> Path:
    path = directory / "router.yaml"
    middlewares = [{"path": each, "options": options} for each, options in layers]
    path.write_text(json.dumps({"middlewares": middlewares, **settings}), encoding="utf-8")
    return path


@contextlib.asynccontextmanager
async def layered(
    config: Path, *workers: SimulatedWorker, count: int = 2, expect_status: int = 0
) -> AsyncIterator[Processes]:
    urls, given = [each.url for each in workers], ("--config", str(config))
    start = partial(fork_router, tokenizer=_checkpoint(config))
    async with processes(urls, *given, count=count, expect_status=expect_status, start=start) as router:
        yield router


@contextlib.asynccontextmanager
async def recording(directory: Path, checkpoint: str) -> AsyncIterator[list[str]]:
    """A router of two processes that records sessions and texts, before a worker; gives where each process is
    reached."""
    config = written(directory, ((SESSIONS, {}), (CACHE, {})), hf_checkpoint=checkpoint)
    worker = SimulatedWorker(tokenizer=checkpoint, weight_version="1")
    async with worker, layered(config, worker) as router:
        yield [each.url for each in await ports(router)]


def _checkpoint(config: Path) -> str | None:
    found: str | None = json.loads(config.read_text(encoding="utf-8")).get("hf_checkpoint")
    return found


async def ports(router: Processes) -> list[RouterOfProcesses]:
    """Each process by a port of its own; what sessions say of it. They are deleted again."""
    found = []
    for index in range(router.count):
        name = name_of(index, router.count, "port")
        made = (await post(router.url, "/sessions", {"session_id": name})).json()
        found.append(RouterOfProcesses(f"http://127.0.0.1:{urlsplit(made['owner_url']).port}"))
        assert (await ask(router.url, "DELETE", f"/sessions/{name}")).status == 204
    assert len({urlsplit(each.url).port for each in found} | {urlsplit(router.url).port}) == router.count + 1
    return found


async def post(url: str, path: str, body: Any = None, *headers: tuple[str, str]) -> RawReply:
    """A JSON request on a connection of its own; again while a process that has died is not there, however long that
    takes on a slow machine."""
    while True:
        reply = await ask(url, "POST", path, [*JSON, *headers], json.dumps(body or {}).encode())
        if reply.status != 503 or reply.error_type != "unavailable":
            return reply


async def listed(url: str) -> list[str]:
    while (reply := await ask(url, "GET", "/sessions")).status == 503:  # as of `post`
        pass
    return sorted(each["session_id"] for each in reply.json()["sessions"])


async def process_at(router: Processes, own: RouterOfProcesses) -> int:
    """The process id of the one that listens on this port."""
    (found,) = [each for each in await router.data() if _listens(each, urlsplit(own.url).port)]
    return found


def _listens(process: int, port: int | None) -> bool:
    return any(each.laddr.port == port for each in psutil.Process(process).net_connections("inet") if not each.raddr)
