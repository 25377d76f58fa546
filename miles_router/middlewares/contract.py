"""The middleware contract: a pure ASGI class with `__init__(self, app, *, router, **typed options)`.

Ten methods are optional; the router finds them by name: `lifespan()`, `routes()`, `admin_routes()`, `open_routes()`,
`data_paths()`, `key_of()`, `owner_name()`, `metrics()`, `restore()`, `shape_errors()`.

A class with `one_model = True` serves one model: it is built for each trained model, and requests for other models
skip it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from miles_router.asgi.exchange import Receive, Scope, Send

#: Returned by `owner_name` if the name that decides the owner is in the request's body.
BODY_SAYS = ""


class ASGIApp(Protocol):
    """An ASGI application; each middleware wraps one and is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None: ...


@runtime_checkable
class HasLifespan(Protocol):
    """A middleware that starts and stops with the router. Lifespans are entered outermost first and left in reverse."""

    def lifespan(self) -> AbstractAsyncContextManager[None]: ...


@runtime_checkable
class HasRoutes(Protocol):
    """A middleware with routes of its own, which are matched before the stack runs."""

    def routes(self) -> Sequence[BaseRoute]: ...


@runtime_checkable
class HasAdminRoutes(Protocol):
    """A middleware with routes that need the administration key. Their paths begin with `/router/`."""

    def admin_routes(self) -> Sequence[BaseRoute]: ...


@runtime_checkable
class HasOpenRoutes(Protocol):
    """A middleware with routes that need no key, such as a page in the browser. Their paths have no parameters."""

    def open_routes(self) -> Sequence[BaseRoute]: ...


@runtime_checkable
class HasDataPaths(Protocol):
    """A middleware that answers paths inside the stack, which clients may call with the clients' key. A path that ends
    with `/` includes all paths below it. Paths from `routes()` need no entry here."""

    def data_paths(self) -> Sequence[str]: ...


@runtime_checkable
class HasKeys(Protocol):
    """A middleware with access keys of its own, for some paths that the clients' key opens.

    `key_of` returns the key for a path, or None. The router calls it before a request enters the stack, so it may use
    only the path as spelled and the middleware's own memory.
    """

    def key_of(self, path: str) -> str | None: ...


@runtime_checkable
class Restores(Protocol):
    """A middleware with state that outlives the process.

    With `--state-dir`, the router awaits `restore` before a request enters the stack, with the path decoded. It loads
    the state that the request's path or headers name into memory.
    """

    async def restore(self, scope: Scope) -> None: ...


@runtime_checkable
class HasOwners(Protocol):
    """A middleware with sessions or texts that are each owned by one of several router processes.

    `owner_name` returns the name of the session or text that a request is about; the name decides the owning process.
    It returns `BODY_SAYS` if that name is in the body, and None if any process may answer. A router with several
    processes calls it before a request enters the stack, so it may use only the path and headers.

    After `BODY_SAYS`, the middleware reads the whole body and calls `router.owners.require` before it does anything
    else.
    """

    def owner_name(self, scope: Scope) -> str | None: ...


@runtime_checkable
class ShapesErrors(Protocol):
    """A middleware whose paths belong to another API, which has a form of its own for errors.

    The router calls `shape_errors` for an error that may have been raised before the request entered the stack: for a
    wrong key, a body that is too large, an owner that is down. It sets `error_body` of the request's exchange.
    """

    def shape_errors(self, scope: Scope) -> None: ...


@runtime_checkable
class HasMetrics(Protocol):
    """A middleware with collectors of its own for `GET /metrics`."""

    def metrics(self) -> Iterable[Collector]: ...
