"""The middleware contract as a test suite for any middleware class, without sockets or a test runner.

Each clause wraps a small inner app in the middleware and calls it as the router would, on a path that no middleware has
a reason to change. `miles-router check pkg.module.Class` prints the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ASGIApp(Protocol):
    """A middleware, or the app that it wraps."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None: ...


#: `Build` wraps an inner app in the middleware under test. `Make` does that and also enters the middleware's lifespan.
Build = Callable[[ASGIApp], ASGIApp]
Make = Callable[[ASGIApp], Awaitable[ASGIApp]]

#: Seconds that a clause may wait before the middleware counts as stuck.
PATIENCE = 5.0
CONCURRENT = 100


class Broken(AssertionError):
    """A clause does not hold; the message describes how."""


class _InnerError(Exception):
    """Raised by the inner app; the middleware must let it through unchanged."""


def _scope(body: bytes = b"") -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/miles-router-check",
        "raw_path": b"/miles-router-check",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }


class _Client:
    """The client's side of the ASGI call: sends one request body, disconnects once `left` is set, records the reply."""

    def __init__(self, body: bytes = b"") -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self._body: bytes | None = body
        self._news = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self._news.set()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")

    async def has(self, expected: bytes) -> None:
        while self.body != expected:
            self._news.clear()
            await self._news.wait()


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    await send({"type": "http.response.start", "status": 207, "headers": [(b"x-inner", b"1"), (b"x-inner", b"2")]})
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": body})


async def _brought_about(arrival: Coroutine[Any, Any, object], running: asyncio.Future[None]) -> None:
    """Wait for an event that the running middleware must cause.

    Raises:
        TimeoutError: the event did not happen within `PATIENCE` seconds.
        Exception: the error with which the middleware ended before the event.
    """
    waiting: asyncio.Future[Any] = asyncio.ensure_future(arrival)
    try:
        await asyncio.wait({waiting, running}, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            if running.done():
                running.result()
            raise asyncio.TimeoutError
    finally:
        waiting.cancel()


async def _foreign_path_untouched(make: Make) -> None:
    client = _Client(b"\x00 not JSON \xff")
    layer = await make(_echo)
    await layer(_scope(b"\x00 not JSON \xff"), client.receive, client.send)
    if not client.sent or client.sent[0].get("status") != 207 or client.body != b"\x00 not JSON \xff":
        raise Broken("the reply to a request on a foreign path was changed")
    inner = [value for name, value in client.sent[0]["headers"] if name == b"x-inner"]
    if inner != [b"1", b"2"]:
        raise Broken("repeated reply headers were lost")


async def _chunk_by_chunk(make: Make) -> None:
    client = _Client()
    seen = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await seen.wait()  # the second chunk exists only after the client has the first
        await send({"type": "http.response.body", "body": b"second"})

    running = asyncio.ensure_future((await make(inner))(_scope(), client.receive, client.send))
    try:
        await _brought_about(client.has(b"first "), running)
        seen.set()
        await asyncio.wait_for(running, PATIENCE)
    except asyncio.TimeoutError:
        raise Broken("it holds back a streamed reply instead of passing on each chunk") from None
    finally:
        running.cancel()
        await asyncio.wait({running})
    if client.body != b"first second":
        raise Broken("a streamed reply arrived changed")


async def _errors_pass(make: Make) -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise _InnerError

    client = _Client()
    try:
        await (await make(inner))(_scope(), client.receive, client.send)
    except _InnerError:
        return
    raise Broken("an error of the inner app was swallowed or changed its type")


async def _disconnect_arrives(make: Make) -> None:
    client = _Client()
    disconnected = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        client.left.set()
        if (await receive())["type"] == "http.disconnect":
            disconnected.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await (await make(inner))(_scope(), client.receive, client.send)
    if not disconnected.is_set():
        raise Broken(
            "the inner app does not receive http.disconnect, so the engine would go on after the client has left"
        )


async def _cancellation(make: Make) -> None:
    reached, cancelled = asyncio.Event(), asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    before = asyncio.all_tasks()
    client = _Client()
    running = asyncio.ensure_future((await make(inner))(_scope(), client.receive, client.send))
    await _brought_about(reached.wait(), running)
    running.cancel()
    await asyncio.wait({running}, timeout=PATIENCE)
    if not running.cancelled():
        raise Broken("cancelling the request did not end it")
    if not cancelled.is_set():
        raise Broken("the inner app was not cancelled with the request")
    if left := [task for task in asyncio.all_tasks() - before - {running} if not task.done()]:
        raise Broken(f"a cancelled request leaves tasks behind: {', '.join(task.get_name() for task in left)}")


async def _many_at_once(make: Make) -> None:
    first, second = await make(_echo), await make(_echo)  # two instances, which must not share state

    async def one(number: int) -> bool:
        body = b"request %d" % number
        client = _Client(body)
        await (first if number % 2 else second)(_scope(body), client.receive, client.send)
        return client.body == body

    if not all(await asyncio.gather(*(one(number) for number in range(CONCURRENT)))):
        raise Broken(f"{CONCURRENT} requests at once were mixed up")


async def _other_scopes(make: Make) -> None:
    reached: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["type"])

    client = _Client()
    await (await make(inner))(
        {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, client.receive, client.send
    )
    if reached != ["lifespan"]:
        raise Broken("scopes other than http must be passed on untouched")


async def _capabilities(make: Make) -> None:
    layer: Any = await make(_echo)
    if hasattr(layer, "lifespan"):
        entered = layer.lifespan()
        if not isinstance(entered, AbstractAsyncContextManager):
            raise Broken("lifespan() must return an async context manager")
    if hasattr(layer, "routes") and not all(hasattr(route, "path") for route in layer.routes()):
        raise Broken("routes() must return Starlette routes with a path")
    if hasattr(layer, "metrics") and not all(callable(getattr(each, "collect", None)) for each in layer.metrics()):
        raise Broken("metrics() must return prometheus_client collectors")


CLAUSES: dict[str, Callable[[Make], Awaitable[None]]] = {
    "leaves a foreign path untouched": _foreign_path_untouched,
    "passes a streamed reply on chunk by chunk": _chunk_by_chunk,
    "lets errors through as themselves": _errors_pass,
    "tells the inner app when the client leaves": _disconnect_arrives,
    "survives cancellation and leaves no task": _cancellation,
    f"keeps {CONCURRENT} concurrent requests and two instances apart": _many_at_once,
    "passes other scopes on": _other_scopes,
    "has well-formed capabilities": _capabilities,
}


async def check_middleware(build: Build) -> list[tuple[str, str | None]]:
    """Check the middleware that `build(inner)` returns against every clause of the contract.

    Returns:
        Pairs of clause and problem; a problem of None means that the clause holds.
    """
    return [(clause, await _verdict(check, build)) for clause, check in CLAUSES.items()]


async def _verdict(check: Callable[[Make], Awaitable[None]], build: Build) -> str | None:
    async with AsyncExitStack() as lifespans:

        async def make(inner: ASGIApp) -> ASGIApp:
            layer: Any = build(inner)
            if hasattr(layer, "lifespan"):
                await lifespans.enter_async_context(layer.lifespan())
            made: ASGIApp = layer
            return made

        try:
            await asyncio.wait_for(check(make), 2 * PATIENCE)
        except Broken as broken:
            return str(broken)
        except asyncio.TimeoutError:
            return "it did not finish in time"
        except Exception as error:  # noqa: BLE001 - a user's class may fail in any way; the failure is the result
            return f"{type(error).__name__}: {error}"
    return None
