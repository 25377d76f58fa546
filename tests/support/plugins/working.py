"""Middlewares that load and do something a test can see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import orjson
from prometheus_client import Counter
from prometheus_client.registry import Collector
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from miles_router import Router, Statistics, counter
from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.errors import RouterError, UpstreamUnreachable
from miles_router.middlewares.contract import ASGIApp


class Passing:
    """Passes everything on."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class Tags(Statistics, prefix="tagging"):
    tags = counter("Tags written, by tag.", by="tag")


class Tagging:
    """Writes its tag into the request and the reply: shows order, options, its own route, lifespan and metrics."""

    def __init__(self, app: ASGIApp, *, router: Router, tag: str = "a", times: int = 1) -> None:
        self.app = app
        self.router = router
        self.tag = tag.encode() * times
        self.seen = Counter("tagging_requests", "Requests tagged.", registry=None)
        self.counts = router.publish("tagging", Tags(), length=lambda: len(self.tag))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self.app(scope, receive, send)
            return
        self.seen.inc()
        self.counts.tags[self.tag.decode()] += 1
        scope = {**scope, "headers": [*scope["headers"], (b"x-tag", self.tag)]}

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-tag", self.tag)]}
            await send(message)

        await self.app(scope, receive, tagged)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        log = self.router.state.__dict__.setdefault("lifespans", [])
        log.append(f"enter {self.tag.decode()}")
        yield
        log.append(f"leave {self.tag.decode()}")

    def lifespan(self) -> AbstractAsyncContextManager[None]:
        return self._run()

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/tagging/{name}", self._say, methods=["GET"])]

    def metrics(self) -> Iterable[Collector]:
        return [self.seen]

    async def _say(self, request: Request) -> Response:
        return JSONResponse({"tag": self.tag.decode(), "name": request.path_params["name"]})


class Lasting(BaseHTTPMiddleware):
    """Logs its lifespan and nothing else."""

    def __init__(self, app: Any, *, router: Router) -> None:
        super().__init__(app)
        self.router = router

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        self.router.state.lifespans.append("enter lasting")
        yield
        self.router.state.lifespans.append("leave lasting")


class Plain:
    """Wants nothing but its place in the stack; says so in the request it passes on."""

    def __init__(self, app: ASGIApp, *, router: Router, mode: Literal["on", "off"] = "on") -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "headers": [*scope["headers"], (b"x-tag", b"plain")]}, receive, send)


class Legacy(BaseHTTPMiddleware):
    """Written for another router of this shape: Starlette's base class, attributes set on the router, `router.args`."""

    def __init__(self, app: Any, *, router: Any) -> None:
        super().__init__(app)
        self.router = router
        router.radix_tree = self
        self.checkpoint = router.args.hf_checkpoint

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        body = await request.body()
        response = await call_next(request)
        response.headers["x-legacy"] = f"{len(body)} bytes"
        return response


class Rewriting(Passing):
    """Adds a field to the body of `/generate`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        changed = orjson.dumps({**exchange.loads(body), "return_logprob": True})
        await self.app(with_body(scope, changed), replay(changed, receive), send)


class Reading(Passing):
    """Parses the body and leaves what it saw in the exchange's notes and the reply."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        exchange.notes.setdefault("parses", []).append(exchange.loads(body))

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                same = len({id(parsed) for parsed in exchange.notes["parses"]}) == 1
                message = {**message, "headers": [*message["headers"], (b"x-one-parse", str(same).encode())]}
            await send(message)

        await self.app(scope, replay(body, receive), counted)


class Retrying:
    """Asks the inner app again when the worker could not be reached."""

    def __init__(self, app: ASGIApp, *, router: Router, attempts: int = 2) -> None:
        self.app = app
        self.attempts = attempts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Exchange.of(scope).read(receive)
        for attempt in range(self.attempts):
            try:
                await self.app(scope, replay(body, receive), send)
                return
            except UpstreamUnreachable:
                if attempt + 1 == self.attempts:
                    raise


class Asking(Passing):
    """Answers `/ask` with what a worker says to a request of its own."""

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/ask", self._ask, methods=["POST"])]

    async def _ask(self, request: Request) -> Response:
        async with self.router.forward("POST", "/generate?own=1", body=b'{"own": true}', key="k") as forwarded:
            in_flight = forwarded.worker.in_flight
            answer = await forwarded.reply.read_all(1 << 20)
        return JSONResponse({"status": forwarded.reply.status, "answer": answer.decode(), "in_flight": in_flight})


class Observing(Passing):
    """Has a page that needs no key, and a route that needs the key of administration."""

    def __init__(
        self, app: ASGIApp, *, router: Router, page: str = "/observed", about: str = "/router/{name}/o"
    ) -> None:
        super().__init__(app, router=router)
        self._open, self._admin = page, about

    def open_routes(self) -> Sequence[BaseRoute]:
        return [Route(self._open, self._say, methods=["GET"])]

    def admin_routes(self) -> Sequence[BaseRoute]:
        return [Route(self._admin, self._say, methods=["GET"])]

    async def _say(self, request: Request) -> Response:
        return JSONResponse({"path": request.url.path})


class Odd(Plain):
    """Has the routes or paths that a test gives it."""

    def __init__(self, app: ASGIApp, *, router: Router, power: str, given: Any) -> None:
        super().__init__(app, router=router)
        setattr(self, power, lambda: given)


class CannotGoOn(RouterError):
    """A layer's own control flow; it has no answer of its own."""


class Leaking(Passing):
    """Does not catch what it raises for itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise CannotGoOn("control flow with a secret in its message")


class Failing(Passing):
    """Has a defect."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("a defect with a secret in its message")


class Misshaping(Passing):
    """Has a defect where it gives errors another form."""

    def shape_errors(self, scope: Scope) -> None:
        raise ZeroDivisionError("a defect with a secret in its message")


class Silent(Passing):
    """Answers nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return None


class Breaking(Passing):
    """Begins a reply and has a defect then."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        raise ZeroDivisionError


class Unread:
    """Answers without having read the request, when `router.state.answer` is set."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.router = router
        self.router.state.answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.router.state.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


class Splitting(Passing):
    """Puts what it was sent into a header of the reply, line ends included."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Exchange.of(scope).read(receive)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-echo", body)]})
        await send({"type": "http.response.body", "body": b"{}"})


class Stealing(Passing):
    """Wants a path that is the router's own."""

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/metrics", lambda request: Response(), methods=["GET"])]


class Inside(Passing):
    """Says what it answers inside the stack; as a text, where it is careless."""

    def __init__(self, app: ASGIApp, *, router: Router, careless: bool = False) -> None:
        super().__init__(app, router=router)
        self.careless = careless

    def data_paths(self) -> Sequence[str]:
        return "/inside/" if self.careless else ["/inside/", "/v1/exactly"]


class Demanding(Passing):
    """Has an option without a default."""

    def __init__(self, app: ASGIApp, *, router: Router, limit: int) -> None:
        super().__init__(app, router=router)


class Unaware:
    """A plain Starlette middleware that knows nothing of a router."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app


class Misshapen(Passing):
    """Has the name of a capability that is none."""

    routes = ("/a",)


not_a_class = 7
