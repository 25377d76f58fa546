"""A layer that says how many tasks the router has. It can be made to lose memory, to see that a soak finds that."""

from __future__ import annotations

import asyncio
import gc

import orjson

from miles_router import Router
from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.middlewares.contract import ASGIApp

PATH = "/soak"


class Probe:
    """Answers `GET /soak` with the number of tasks, without those that answer it.

    Args:
        leak_bytes: bytes that every other request loses for ever.
    """

    def __init__(self, app: ASGIApp, *, router: Router, leak_bytes: int = 0) -> None:
        self.app = app
        self._leak_bytes = leak_bytes
        self._lost: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            if self._leak_bytes:
                self._lost.append(b"x" * self._leak_bytes)
            await self.app(scope, receive, send)
            return
        gc.collect()
        names = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        body = orjson.dumps({"tasks": len(names), "names": sorted(names)})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
