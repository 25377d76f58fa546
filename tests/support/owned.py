"""A layer whose things have one process each, and routers of one cluster in the event loop of a test."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from miles_router.fleet.placement.sessions import NAMES, Affinity
from miles_router.middlewares import ASGIApp, Exchange, Receive, Router, Scope, Send, Watch
from miles_router.middlewares import owners as owning
from miles_router.middlewares.state import BODY_SAYS
from miles_router.settings.config import MiddlewareSpec
from miles_router.slots import slot_of
from tests.support.running_router import RunningRouter
from tests.support.shard_owners import owners_at
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE

PREFIX = "/owned"
CHUNK = 64 * 1024


class Owned:
    """Answers `/owned/{name}` in the process that has this name, which has the session of that name, too; `/owned`
    where the body's `name` is. The answer says which process that was, how many times it has been asked for the name,
    and how long and what the body was; `?bytes` asks for so many more, as a stream, and `?hold` answers once
    `/owned/{name}?release` was asked."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self.router = router
        self.times: dict[str, int] = {}
        self.gates: dict[str, asyncio.Event] = {}

    def data_paths(self) -> list[str]:
        return [PREFIX, f"{PREFIX}/"]

    def owner_name(self, scope: Scope) -> str | None:
        path = scope["path"]
        if path == PREFIX:
            return BODY_SAYS
        if path.startswith("/sessions/"):
            return str(path.split("/")[2])
        return path.removeprefix(f"{PREFIX}/") if path.startswith(f"{PREFIX}/") else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        body = await Exchange.of(scope).read(receive)
        name = scope["path"].removeprefix(f"{PREFIX}/")
        if scope["path"] == PREFIX:
            name = Exchange.of(scope).loads(body)["name"]
            self.router.owners.require(scope, name)
        query = scope["query_string"].decode()
        if query == "release":
            self.gates.setdefault(name, asyncio.Event()).set()
        elif query == "hold":
            with Watch(receive):
                await self.gates.setdefault(name, asyncio.Event()).wait()
        self.times[name] = self.times.get(name, 0) + 1
        more = int(query.removeprefix("bytes=")) if query.startswith("bytes=") else 0
        told = {"pid": os.getpid(), "owner": id(self), "times": self.times[name], "length": len(body)}
        headers = [(b"x-told", orjson.dumps({**told, "head": body[:40].decode("latin-1")}))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, more, CHUNK):
            part = b"." * min(CHUNK, more - start)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def names_of(index: int, count: int, prefix: str = "n") -> Iterator[str]:
    """Names of what the process `index` of so many has."""
    return (name for each in itertools.count() if slot_of(name := f"{prefix}{each}") % count == index)


def name_of(index: int, count: int, prefix: str = "n") -> str:
    return next(names_of(index, count, prefix))


OWNED = MiddlewareSpec("tests.support.owned.Owned")


def be_patient() -> None:
    """However slow the machine is, what waits for a process waits until that is there."""
    owning.PATIENCE = PATIENCE


async def several(stage: Stage, directory: Path, count: int, *workers: Any, **settings: Any) -> list[RunningRouter]:
    """So many routers that share what has one owner, in the event loop of the test. Each on a port of its own."""
    be_patient()
    settings = {"middlewares": (OWNED,), **settings}
    urls: list[str] = []
    owners = [owners_at(index, count, directory, urls, Affinity(NAMES)) for index in range(count)]
    routers = [await stage.router(*workers, owners=each, **settings) for each in owners]
    urls += [router.url for router in routers]
    return routers
