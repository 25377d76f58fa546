"""The middleware contract: a pure ASGI class, `__init__(self, app, *, router, **typed options)`.

Seven further powers are optional and found by shape: `lifespan()`, `routes()`, `data_paths()`, `key_of()`,
`owner_name()`, `metrics()`, `restore()`.
A class with `one_model = True` holds what is of one model: requests for other pools than the default one pass it by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from miles_router.asgi.exchange import Receive, Scope, Send

#: In place of a name: the body says whose a request is.
BODY_SAYS = ""


class ASGIApp(Protocol):
    """What a layer wraps and what it is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None: ...


@runtime_checkable
class HasLifespan(Protocol):
    """Wants to start and stop things with the router; entered outermost first, left in reverse."""

    def lifespan(self) -> AbstractAsyncContextManager[None]: ...


@runtime_checkable
class HasRoutes(Protocol):
    """Answers paths of its own; they are looked up before the stack runs."""

    def routes(self) -> Sequence[BaseRoute]: ...


@runtime_checkable
class HasDataPaths(Protocol):
    """Answers paths inside the stack that no worker knows, and the clients' key opens them. One that ends with `/`
    stands for all beneath it. Its `routes()` are opened without this."""

    def data_paths(self) -> Sequence[str]: ...


@runtime_checkable
class HasKeys(Protocol):
    """Gives keys of its own, for some paths that the clients' key opens: the one that opens this path, or None. It is
    asked before a request enters, and must look at nothing but the path's spelling and what it holds."""

    def key_of(self, path: str) -> str | None: ...


@runtime_checkable
class Restores(Protocol):
    """Has things that outlive the process. Where `--state-dir` is set it is asked before a request enters, with the
    path decoded, to bring back what the request names by its path or headers."""

    async def restore(self, scope: Scope) -> None: ...


@runtime_checkable
class HasOwners(Protocol):
    """Holds things of which one process of several has each: the name of what a request is about, by which its process
    is found; `BODY_SAYS` where the head does not say it; None where any process may answer. It is asked before a
    request enters, wherever the router has several processes, and must look at nothing but the head. What a body says,
    the layer tells `router.owners` itself, before it does anything and with the body read."""

    def owner_name(self, scope: Scope) -> str | None: ...


@runtime_checkable
class HasMetrics(Protocol):
    """Shows numbers of its own at `GET /metrics`."""

    def metrics(self) -> Iterable[Collector]: ...
