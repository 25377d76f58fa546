"""Tools for authors of middlewares: the contract suite (`miles-router check`), and `stage` for tests with requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from miles_router.app import create_app
from miles_router.asgi.exchange import Message, Scope
from miles_router.asgi.wire import header_texts, raw_headers
from miles_router.edge import RouterApp
from miles_router.engines.events import Event, EventReader
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.loading import find_class, load_middlewares
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing.middleware_contract import check_middleware

if TYPE_CHECKING:
    from miles_router.testing.worker.simulated_worker import SimulatedWorker


def check_path(path: str, config: RouterConfig) -> Iterator[tuple[str, str | None]]:
    """Run the contract suite on a middleware class, and yield each clause with its failure, or None if it holds.

    The middleware gets the options that `config` has for `path`. Other middlewares and the workers are left out.

    Raises:
        ConfigError: the class cannot be loaded, or an option is invalid.
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
    """Run a router with one middleware and one simulated worker, for tests of the middleware.

    Args:
        middleware: a class at the top of its module, or its dotted path.
        worker: options of the `SimulatedWorker`; by default it always generates the maximum number of tokens.
        tokenizer: the `router.tokenizer` of the middleware.
        options: the options of the middleware.

    Raises:
        ConfigError: the class cannot be loaded, or an option is invalid.
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
    """A complete reply, as the client receives it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Parse the body as JSON."""
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
    """A client for tests of a middleware. `worker.log` holds the requests that the simulated engine received."""

    def __init__(self, app: RouterApp, worker: SimulatedWorker) -> None:
        self.router = app.router
        self.worker = worker
        self._app = app

    async def generate(self, text: str = "Hi", **fields: Any) -> StageReply:
        """Send `POST /generate` for 8 tokens. `fields` replace or extend the fields of the request.

        With `stream=True`, `StageReply.events` parses the reply.
        """
        return await self.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 8}, **fields})

    async def chat(self, text: str = "Hi", **fields: Any) -> StageReply:
        """Send `POST /v1/chat/completions` with one user message, for 8 tokens. `fields` replace or extend the request.

        With `stream=True`, `StageReply.events` parses the reply.
        """
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 8, **fields})

    async def post(self, path: str, content: object) -> StageReply:
        """Send a POST request with `content` as JSON."""
        return await self.ask("POST", path, orjson.dumps(content))

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> StageReply:
        """Send a request straight to the ASGI app, and return the complete reply.

        Raises:
            AssertionError: the reply ends before it is complete.
        """
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
