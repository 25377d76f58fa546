"""The middleware contract: a pure ASGI class, `__init__(self, app, *, router, **typed options)`.

Seven further methods are optional and found by name: `lifespan()`, `routes()`, `data_paths()`, `key_of()`,
`owner_name()`, `metrics()`, `restore()`.
A class with `one_model = True` works for one model only: requests for pools other than the default one skip it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from miles_router.asgi.exchange import Receive, Scope, Send

#: Returned by `owner_name` if only the request's body contains the name.
BODY_SAYS = ""


class ASGIApp(Protocol):
    """An ASGI app: a middleware, and the app it wraps."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None: ...


@runtime_checkable
class HasLifespan(Protocol):
    """A middleware that starts and stops things with the router. Entered outermost first, left in reverse order."""

    def lifespan(self) -> AbstractAsyncContextManager[None]: ...


@runtime_checkable
class HasRoutes(Protocol):
    """A middleware with routes of its own, which are looked up before the stack runs."""

    def routes(self) -> Sequence[BaseRoute]: ...


@runtime_checkable
class HasDataPaths(Protocol):
    """A middleware that answers, inside the stack, paths that no worker has. The clients' key opens these paths.

    A path that ends with `/` includes all paths below it. Paths of `routes()` need not be listed here.
    """

    def data_paths(self) -> Sequence[str]: ...


@runtime_checkable
class HasKeys(Protocol):
    """A middleware with keys of its own for some of the paths that the clients' key opens.

    `key_of` returns the key that opens this path, or None. It is called before a request enters the stack and may use
    only the path and the middleware's own state.
    """

    def key_of(self, path: str) -> str | None: ...


@runtime_checkable
class Restores(Protocol):
    """A middleware with state that outlives the process.

    With `--state-dir`, `restore` is called before a request enters the stack, with the decoded path. It loads the state
    that the request names by its path or headers.
    """

    async def restore(self, scope: Scope) -> None: ...


@runtime_checkable
class HasOwners(Protocol):
    """A middleware with objects (such as sessions) that each belong to one of the router's processes.

    `owner_name` returns the name of the object that a request is about, from which its process follows. It returns
    `BODY_SAYS` if only the body contains the name, and None if any process may answer. A router of several processes
    calls it before a request enters the stack; it may use only the request's head. A middleware that returns
    `BODY_SAYS` reads the body and passes the name to `router.owners` before it does anything else.
    """

    def owner_name(self, scope: Scope) -> str | None: ...


@runtime_checkable
class HasMetrics(Protocol):
    """A middleware with its own Prometheus collectors for `GET /metrics`."""

    def metrics(self) -> Iterable[Collector]: ...
