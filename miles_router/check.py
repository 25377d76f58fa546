"""Tests for authors of middlewares: the contract, clause by clause (`miles-router check`), and `stage`, a router with
one middleware and a simulated worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from miles_router.app import create_app
from miles_router.asgi.exchange import Message, Scope
from miles_router.asgi.headers import header_texts, raw_headers
from miles_router.edge import RouterApp
from miles_router.engines.events import Event, EventReader
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.loading import find_class, load_middlewares
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing.middleware_contract import check_middleware

if TYPE_CHECKING:
    from miles_router.testing.worker.simulated_worker import SimulatedWorker


def check_path(path: str, config: RouterConfig) -> Iterator[tuple[str, str | None]]:
    """Check a middleware class, and yield each clause of the contract with the violation found, or None.

    The options that the configuration gives for `path` are used; the other middlewares of the configuration are not.

    Raises:
        MiddlewareLoadError: the class cannot be loaded.
    """
    find_class(path)
    spec = next((spec for spec in config.middlewares if spec.path == path), MiddlewareSpec(path))
    loaded = load_middlewares([spec])[0]
    router = create_app(dataclasses.replace(config, middlewares=(), worker_urls=())).router

    def build(inner: ASGIApp) -> ASGIApp:
        return loaded.cls(inner, router=router, **loaded.options)

    yield from asyncio.run(check_middleware(build))


@asynccontextmanager
async def stage(
    middleware: type | str, /, *, worker: Mapping[str, Any] | None = None, tokenizer: Any = None, **options: Any
) -> AsyncIterator[Stage]:
    """Run a router with one middleware in front of a simulated worker, for tests of that middleware.

    Args:
        middleware: a class at the top level of its module, or its dotted path.
        worker: options of the `SimulatedWorker`; by default it generates exactly `max_new_tokens` tokens.
        tokenizer: the object that the middleware gets as `router.tokenizer`.
        options: the middleware's options.

    Raises:
        MiddlewareLoadError: the class cannot be loaded, or an option does not fit.
    """
    from miles_router.testing.worker.simulated_worker import SimulatedWorker  # needs the extra `testing`

    path = middleware if isinstance(middleware, str) else f"{middleware.__module__}.{middleware.__qualname__}"
    async with AsyncExitStack() as running:
        simulated = await running.enter_async_context(SimulatedWorker(**{"stop_probability": 0.0, **(worker or {})}))
        config = RouterConfig(middlewares=(MiddlewareSpec(path, options),), worker_urls=(simulated.url,))
        app = create_app(config, tokenizer=tokenizer)
        await running.enter_async_context(app.running())
        yield Stage(app, simulated)


@dataclasses.dataclass(frozen=True)
class StageReply:
    """A complete reply as a client gets it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the parsed body."""
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        """Return the parsed JSON of each event of a stream, without `[DONE]`.

        Raises:
            ValueError: the stream ended inside an event.
        """
        reader = EventReader()
        parsed = [Event.read(raw).parse() for raw in reader.feed(self.body)]
        if reader.rest:
            raise ValueError(f"the stream ended inside an event: {reader.rest!r}")
        return [each for each in parsed if each is not None]


class Stage:
    """A router under test; `worker.door` records the requests that the simulated engine got."""

    def __init__(self, app: RouterApp, worker: SimulatedWorker) -> None:
        self.router = app.router
        self.worker = worker
        self._app = app

    async def generate(self, text: str = "Hi", **fields: Any) -> StageReply:
        """Send `POST /generate`, for 8 tokens unless `sampling_params` is given. `stream=True` makes it a stream."""
        return await self.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 8}, **fields})

    async def chat(self, text: str = "Hi", **fields: Any) -> StageReply:
        """Send `POST /v1/chat/completions` with one user message. `stream=True` makes it a stream."""
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 8, **fields})

    async def post(self, path: str, content: object) -> StageReply:
        """Send a POST with a JSON body."""
        return await self.ask("POST", path, orjson.dumps(content))

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> StageReply:
        """Send any request. Raise the router's exception if the reply breaks off."""
        given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        route, _, query = path.partition("?")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": route,
            "raw_path": route.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": raw_headers(given.items()),
        }
        sent: list[Message] = []
        gone, request = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        if sent[-1].get("more_body", sent[-1]["type"] == "http.response.start"):
            raise AssertionError(f"the reply to {method} {path} has no end")
        start, *rest = sent
        shown = dict(header_texts(start["headers"]))
        return StageReply(start["status"], shown, b"".join(message.get("body", b"") for message in rest))
