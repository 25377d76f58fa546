"""The edge: the ASGI callable of the router. It decodes paths, checks access, renders errors and counts requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Router as Routes

from miles_router.asgi.doors import Doors
from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Receive, Scope, Send, request_id
from miles_router.asgi.headers import GROUP, first_header
from miles_router.asgi.origin import check_origin
from miles_router.asgi.outlet import Outlet
from miles_router.asgi.path import decode_path
from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken
from miles_router.metrics import ClientStatistics
from miles_router.middlewares.contract import ASGIApp, Restores
from miles_router.pools.pools import Pools
from miles_router.settings.config import RouterConfig

if TYPE_CHECKING:
    from miles_router.traces.traces import Traces

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("miles_router.access")


class RouterApp:
    """The whole router as one ASGI app."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        pools: Pools,
        routes: Routes,
        doors: Doors,
        stack: ASGIApp,
        layers: Sequence[ASGIApp],
        clients: ClientStatistics,
        counts: bool = True,
    ) -> None:
        """Build the app from its parts.

        Args:
            counts: False if another process has accepted the requests, and counts and logs them.
        """
        self.pools = pools
        #: The middlewares, outermost first.
        self.layers = layers
        #: The handle that the middlewares got.
        self.router = router = pools.default.router
        self.doors = doors
        #: The counts of client connections, which the server updates.
        self.clients = clients
        self._counts = counts
        self._routes = routes
        self._stack = stack
        self._public_url = config.public_url
        self._max_body_bytes = config.max_request_bytes
        self._max_answer_bytes = config.max_answer_bytes
        self._access_log = config.access_log
        self._metrics = router.metrics
        self._owners = router.owners
        self._restoring = () if router.store is None else tuple(each for each in layers if isinstance(each, Restores))

    def running(self) -> AbstractAsyncContextManager[Any]:
        """Return a context within which health checks and middlewares run: the lifespan without a server."""
        return self._routes.lifespan_context(self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI scope: HTTP or lifespan; websockets are closed."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._routes(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1003})
            return
        started_at = time.perf_counter()
        exchange = Exchange(
            request_id(scope), max_body_bytes=self._max_body_bytes, max_answer_bytes=self._max_answer_bytes
        )
        scope[SCOPE_KEY] = exchange
        outlet = Outlet(send, scope, exchange.request_id)
        refused = 0
        try:
            scope["path"] = decode_path(scope["raw_path"])  # the only decoding: later code must not decode again
            if self._owners.several:
                await self._owners.answer(scope, receive, outlet, here=self._here, check=self._check_door)
            else:
                await self._restore(scope)
                await self._enter(scope)(scope, receive, outlet)
        except Exception as error:  # a bug is logged with its traceback and answered with 500
            if isinstance(error, RouterError) and error.type != RouterError.type:
                if not exchange.forwarded:
                    self._report(error, exchange, scope, began=outlet.status != 0)
                if outlet.status == 0 and not isinstance(error, ClientDisconnected):
                    await _answer(error, exchange, outlet)
                refused = error.status
            else:  # a bug, or a RouterError without a type, which is for control flow and should have been caught
                logger.error("internal_error", exc_info=error, extra={"fields": _fields(exchange, scope)})
                if outlet.status == 0:
                    await _answer(RouterError("the router failed; its log has the details"), exchange, outlet)
        finally:
            if self._counts and not exchange.forwarded:  # otherwise another process counts it
                self._finished(scope, exchange, outlet.status or refused, started_at)

    async def _restore(self, scope: Scope) -> None:
        """Let middlewares load the state that the request names, unless the request lacks a required key.

        This comes before the key is compared, since a session's own key is known only after the session is loaded.
        """
        if self._restoring and not self.doors.lacks_key(scope["path"], scope["headers"]):
            for layer in self._restoring:
                await layer.restore(scope)

    async def _here(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in this process, not in the owner's."""
        await self._restore(scope)
        await self._enter(scope)(scope, receive, send)

    def _check_door(self, scope: Scope) -> None:
        """Refuse a request that no process would accept, before it is forwarded. Raises the errors of `_enter`.

        A key is only checked for presence here; the process that answers compares it.
        """
        door = self.doors.of(scope["path"])
        if self.doors.lacks_key(scope["path"], scope["headers"]):
            self.doors.authorize(door, scope["path"], scope["headers"])
        if door.cross_origin_methods is not None and not door.key.required:
            check_origin(scope, door.cross_origin_methods, self._public_url)
        scope[SCOPE_KEY].check_announced_size(scope)

    def _enter(self, scope: Scope) -> ASGIApp:
        """Check whether a request may enter, and return the app that answers it.

        Raises:
            Unauthorized: the key for this path is missing or wrong.
            ForeignOrigin: the path needs no key, and the request comes from a web page of another origin.
            BodyTooLarge: the announced body length is over the limit.
        """
        door = self.doors.of(scope["path"])
        scope["headers"] = self.doors.authorize(door, scope["path"], scope["headers"])
        if door.cross_origin_methods is not None and not door.key.required:
            check_origin(scope, door.cross_origin_methods, self._public_url)
        scope[SCOPE_KEY].flight.group = first_header(scope["headers"], GROUP)
        scope[SCOPE_KEY].check_announced_size(scope)
        return self._routes if door.own else self._stack

    def _report(self, error: RouterError, exchange: Exchange, scope: Scope, *, began: bool) -> None:
        """Log and count a failed request. If its reply has begun, the server closes the connection without an end."""
        fields = {**_fields(exchange, scope), "type": error.type, "reason": str(error)}
        if isinstance(error, ClientDisconnected):
            self._metrics.client_disconnects += 1
            logger.debug("client_disconnected", extra={"fields": fields})
            return
        if isinstance(error, UpstreamBroken) or began:
            self._metrics.broken_replies += 1
        level = logging.WARNING if error.status >= 500 else logging.INFO
        logger.log(level, "request_failed", extra={"fields": {**fields, "status": error.status, "broken_off": began}})

    def _finished(self, scope: Scope, exchange: Exchange, status: int, started_at: float) -> None:
        seconds = time.perf_counter() - started_at
        to_head = None if exchange.flight.first_byte_at is None else exchange.flight.first_byte_at - started_at
        self._metrics.finished(scope["path"], status, exchange.flight.worker_url, seconds, to_head)
        if self._access_log:
            fields = {**_fields(exchange, scope), "status": status, "seconds": round(seconds, 4)}
            access_logger.info("request", extra={"fields": fields})


_finished = RouterApp._finished


class TracedRouterApp(RouterApp):
    """A `RouterApp` that traces each turn."""

    def __init__(self, traces: Traces, **parts: Any) -> None:
        super().__init__(**parts)
        self._traces = traces
        self._kept, self._plain_turns, self._in_a_row = traces.kept, traces.queue.turns, traces.queue.in_a_row

    def _report(self, error: RouterError, exchange: Exchange, scope: Scope, *, began: bool) -> None:
        super()._report(error, exchange, scope, began=began)
        if exchange.flight.trace is not None:
            exchange.flight.trace.detailed().error = error.type

    def _finished(self, scope: Scope, exchange: Exchange, status: int, started_at: float) -> None:
        _finished(self, scope, exchange, status, started_at)  # `super()` would cost a lookup for each request
        flight = exchange.flight
        turn = flight.trace
        if turn is None:
            return
        request, workers, traceparent, head_at = turn.request, turn.workers, turn.traceparent, flight.first_byte_at
        if (turn.details is not None or traceparent is None or head_at is None) or (
            workers is None or request is None or request.tried
        ):
            self._traces.finish(exchange, turn, scope["path"], status, started_at)
        elif traceparent.endswith(self._kept):  # inlined: a call costs a few thousandths of a small request
            path, worker, turns = scope["path"], flight.worker_url, self._plain_turns
            version, own, ended_at = workers.version_of(worker), exchange.request_id, time.perf_counter()
            turns.append((traceparent, path, worker, version, status, own, started_at, head_at, ended_at))
            if len(turns) >= self._in_a_row:
                self._traces.queue.write()


def _fields(exchange: Exchange, scope: Scope) -> dict[str, object]:
    fields = {"request_id": exchange.request_id, "method": scope["method"], "path": scope["path"]}
    return fields if exchange.flight.worker_url is None else {**fields, "worker": exchange.flight.worker_url}


async def _answer(error: RouterError, exchange: Exchange, send: Send) -> None:
    body = orjson.dumps(exchange.error_body(error, exchange.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    headers += [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
