"""`POST /reach`: an answer whose delay, stream and size the client chooses, to learn what lies between."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from miles_router.asgi.access import base_url
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.asgi.watch import Watch
from miles_router.errors import BadRequest, Unavailable

PATH = "/reach"
#: Most seconds of one answer, and most answers at once.
LONGEST, MOST = 600.0, 16
#: Fewest seconds between two events.
SHORTEST = 0.05


class Reach:
    """The handler of `POST /reach?delay=SECONDS&seconds=SECONDS&every=SECONDS`.

    It reads the body, waits `delay`, answers `{"received": bytes, "base_url": url}` as the first event of a stream, and
    sends a further event each `every` for `seconds`.
    """

    def __init__(self, public_url: str | None) -> None:
        self._public_url = public_url
        self._running = 0

    def route(self) -> Route:
        """Return the route, which needs the clients' key."""
        return Route(PATH, self, methods=["POST"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        delay, seconds, every = (_seconds(request, name) for name in ("delay", "seconds", "every"))
        if self._running >= MOST:
            raise Unavailable(f"{MOST} requests to {PATH} run already; repeat later")
        self._running += 1
        try:
            exchange = Exchange.of(scope)
            received = len(await exchange.read(receive))
            event = {"received": received, "base_url": base_url(scope, self._public_url) + exchange.mount}
            with Watch(receive):
                await asyncio.sleep(delay)
            events = _events(event, seconds, max(every, SHORTEST))
            await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
        finally:
            self._running -= 1


async def _events(event: dict[str, object], seconds: float, every: float) -> AsyncIterator[bytes]:
    yield b"data: " + orjson.dumps(event) + b"\n\n"
    for _ in range(int(seconds / every)):
        await asyncio.sleep(every)
        yield b"data: {}\n\n"
    yield b"data: [DONE]\n\n"


def _seconds(request: Request, name: str) -> float:
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST:
        raise BadRequest(f"{name} must be seconds from 0 to {LONGEST:g}, got {text[:100]!r}")
    return value
