"""The router's ASGI entry point: it decodes paths, checks access, renders errors, and counts and logs requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any

import orjson

from miles_router.admin.entrance import Entrance
from miles_router.asgi.access import check_origin
from miles_router.asgi.exchange import SCOPE_KEY, Exchange, Outlet, Receive, Scope, Send, request_id
from miles_router.asgi.wire import GROUP, decode_path, first_header
from miles_router.errors import ClientDisconnected, InternalError, RouterError, UnknownModel, UpstreamBroken
from miles_router.fleet.placement.sessions import SESSION_PREFIX
from miles_router.metrics import ClientStatistics
from miles_router.middlewares.contract import ASGIApp, Restores, ShapesErrors
from miles_router.middlewares.loading import each_once
from miles_router.pools.pools import Pools
from miles_router.settings.config import RouterConfig
from miles_router.settings.trained_models import MOUNT, mount_of

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("miles_router.access")

#: Most characters of a path in an error message.
SHOWN = 200


class RouterApp:
    """The complete router as one ASGI app."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        pools: Pools,
        entrances: Mapping[str | None, Entrance],
        stack: ASGIApp,
        clients: ClientStatistics,
        counts: bool = True,
    ) -> None:
        """
        Args:
            entrances: one for each model with middlewares; None is the default model.
            counts: True if clients reach this process directly. False if another process counts and logs the
                requests and forwards them to this one.
        """
        self.pools = pools
        #: The middlewares, outermost first.
        self.layers = entrances[None].layers
        #: The object that middlewares get as `router`.
        self.router = router = pools.default.router
        #: Statistics of client connections, updated by the server of this app.
        self.clients = clients
        self._counts = counts
        self._entrances = entrances
        self._stack = stack
        self._public_url = config.public_url
        self._max_body_bytes = config.max_request_bytes
        self._max_answer_bytes = config.max_answer_bytes
        self._access_log = config.access_log
        self._metrics = router.metrics
        self._owners = router.owners
        self._restoring: dict[str | None, list[Restores]] = {
            model: [each for each in entrance.layers if router.store is not None and isinstance(each, Restores)]
            for model, entrance in entrances.items()
        }
        #: Where the body may name any of the models.
        self._restoring_any = each_once(chain.from_iterable(self._restoring.values()))

    def running(self) -> AbstractAsyncContextManager[Any]:
        """Return a context manager inside which health checks and middlewares run, for use without an ASGI server."""
        routes = self._entrances[None].routes
        return routes.lifespan_context(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP and lifespan; close WebSockets with code 1003. Failed requests raise nothing."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._entrances[None].routes(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1003})
            return
        exchange = Exchange(
            request_id(scope), max_body_bytes=self._max_body_bytes, max_answer_bytes=self._max_answer_bytes
        )
        scope[SCOPE_KEY] = exchange
        outlet = Outlet(send, scope, exchange.request_id)
        refused = 0
        try:
            scope["path"] = decode_path(scope["raw_path"])  # the only place that decodes a path
            if len(self._entrances) > 1 and scope["path"].startswith(MOUNT):
                self._mount(scope, exchange)
            if self._owners.several:
                await self._owners.answer_or_forward(scope, receive, outlet, here=self._here, check=self._check_access)
            else:
                await self._here(scope, receive, outlet)
        except Exception as error:  # a defect is logged with its traceback and answered
            if isinstance(error, RouterError) and error.type:
                if not exchange.forwarded:
                    self._report(error, exchange, scope, began=outlet.status != 0)
                if outlet.status == 0 and not isinstance(error, ClientDisconnected):
                    self._shape_errors(scope, exchange)
                    await _answer(error, exchange, outlet)
                refused = error.status
            else:  # a RouterError without a type is for control flow; a layer should have caught it
                logger.error("internal_error", exc_info=error, extra={"fields": _fields(exchange, scope)})
                if outlet.status == 0:
                    self._shape_errors(scope, exchange)
                    await _answer(InternalError("the router failed; its log has the details"), exchange, outlet)
        finally:
            if self._counts and not exchange.forwarded:  # otherwise the process that answers counts it
                self._finished(scope, exchange, outlet.status or refused)

    def _mount(self, scope: Scope, exchange: Exchange) -> None:
        """Take the model out of a path below `/models/`.

        Raises:
            UnknownModel: no such model is trained.
        """
        _, _, model, *rest = scope["path"].split("/", 3)
        if model not in self._entrances or not rest:
            raise UnknownModel(
                f"{scope['path'][:SHOWN]!r} names no model of --trained-models: write {MOUNT}MODEL_ID/...", "model"
            )
        exchange.pool, exchange.mount = model, mount_of(model)
        scope["path"] = "/" + rest[0]
        scope["raw_path"] = b"/" + scope["raw_path"].split(b"/", 3)[3]

    def _here(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer a request in this process."""
        model, path = _trained(scope), scope["path"]
        any_model = model is None and not path.startswith(SESSION_PREFIX)
        if restoring := self._restoring_any if any_model else self._restoring[model]:
            return self._restore_and_enter(restoring, scope, receive, send)
        return self._enter(scope)(scope, receive, send)

    async def _restore_and_enter(
        self, restoring: Sequence[Restores], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let middlewares restore state, such as a session, that the path or headers of the request name.

        This precedes the key check, because a session's own key is known only after the session is restored.
        """
        if not self._entrances[_trained(scope)].access_rules.lacks_key(scope["path"], scope["headers"]):
            for layer in restoring:
                await layer.restore(scope)
        await self._enter(scope)(scope, receive, send)

    def _check_access(self, scope: Scope) -> None:
        """Check a request before it is forwarded to another process, which also checks the value of the key.

        Raises:
            Unauthorized: the path requires a key, and the request contains none.
            ForeignOrigin: no key is required, and a web page of another origin sent the request.
            BodyTooLarge: the announced body exceeds `--max-request-bytes`.
        """
        access_rules = self._entrances[_trained(scope)].access_rules
        rule = access_rules.of(scope["path"])
        if access_rules.lacks_key(scope["path"], scope["headers"]):
            access_rules.authorize(rule, scope["path"], scope["headers"])
        if rule.cross_origin_methods is not None and not rule.key.required:
            check_origin(scope, rule.cross_origin_methods, self._public_url)
        scope[SCOPE_KEY].check_announced_size(scope)

    def _enter(self, scope: Scope) -> ASGIApp:
        """Check access and return the app that answers: own routes or the middleware stack.

        Replaces the headers in `scope` by those for layers and workers, and records the request's group.

        Raises:
            Unauthorized: the path requires a key, and the request contains no valid one.
            ForeignOrigin: no key is required, and a web page of another origin sent the request.
            BodyTooLarge: the announced body exceeds `--max-request-bytes`.
        """
        entrance = self._entrances[_trained(scope)]
        rule = entrance.access_rules.of(scope["path"])
        scope["headers"] = entrance.access_rules.authorize(rule, scope["path"], scope["headers"])
        if rule.cross_origin_methods is not None and not rule.key.required:
            check_origin(scope, rule.cross_origin_methods, self._public_url)
        scope[SCOPE_KEY].routing.group = first_header(scope["headers"], GROUP)
        scope[SCOPE_KEY].check_announced_size(scope)
        return entrance.routes if rule.own else self._stack

    def _shape_errors(self, scope: Scope, exchange: Exchange) -> None:
        for layer in self._entrances[_trained(scope)].layers:
            if isinstance(layer, ShapesErrors):
                try:
                    layer.shape_errors(scope)
                except Exception as defect:  # the client still gets the error, in the router's plain form
                    logger.error("internal_error", exc_info=defect, extra={"fields": _fields(exchange, scope)})

    def _report(self, error: RouterError, exchange: Exchange, scope: Scope, *, began: bool) -> None:
        """Count a failed request and log it in one line.

        Args:
            began: the reply had begun; it stays incomplete, and the server breaks off the connection.
        """
        fields = {**_fields(exchange, scope), "type": error.type, "reason": str(error)}
        if isinstance(error, ClientDisconnected):
            self._metrics.client_disconnects += 1
            logger.debug("client_disconnected", extra={"fields": fields})
            return
        if isinstance(error, UpstreamBroken) or began:
            self._metrics.broken_replies += 1
        level = logging.WARNING if error.status >= 500 else logging.INFO
        logger.log(level, "request_failed", extra={"fields": {**fields, "status": error.status, "broken_off": began}})

    def _finished(self, scope: Scope, exchange: Exchange, status: int) -> None:
        began_at, head_at = exchange.began_at, exchange.routing.first_byte_at
        seconds, to_head = time.perf_counter() - began_at, None if head_at is None else head_at - began_at
        self._metrics.finished(scope["path"], status, exchange.routing.worker_url, seconds, to_head)
        if self._access_log:
            fields = {**_fields(exchange, scope), "status": status, "seconds": round(seconds, 4)}
            access_logger.info("request", extra={"fields": fields})


def _trained(scope: Scope) -> str | None:
    """Return the trained model that a request is for; None for the default model, or where the body decides. A request
    that another process did not take comes a second time, with the model that its body names."""
    exchange = scope[SCOPE_KEY]
    return exchange.pool if exchange.mount else None


def _fields(exchange: Exchange, scope: Scope) -> dict[str, object]:
    path = exchange.mount + scope["path"]
    fields = {"request_id": exchange.request_id, "method": scope["method"], "path": path}
    return fields if exchange.routing.worker_url is None else {**fields, "worker": exchange.routing.worker_url}


async def _answer(error: RouterError, exchange: Exchange, send: Send) -> None:
    body = orjson.dumps(exchange.error_body(error, exchange.request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    headers += [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
