"""The outermost and the innermost ASGI app of a router: one chooses the pool of a request, the other passes it
there."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send, replay, with_body
from miles_router.engines.engine import CannotServe
from miles_router.engines.known import with_adapter
from miles_router.errors import UnsupportedByEngine
from miles_router.fleet.gate import computes
from miles_router.middlewares.contract import ASGIApp
from miles_router.pools.choice import PoolChoice
from miles_router.pools.pools import SHOWN, Pools


class Reception:
    """The outermost app: it finds the pool and the LoRA adapter that a request names. It reads no body until a worker
    has a `model_id` or an engine applies adapters."""

    def __init__(self, app: ASGIApp, pools: Pools) -> None:
        self._app = app
        self._pools = pools
        self._choice = PoolChoice(pools)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Run one request. Raises as `PoolChoice.choose` does."""
        if scope["type"] != "http" or self._pools.has_one_model():  # no coroutine: it would cost 1 % of a short request
            return self._app(scope, receive, send)
        return self._choose(scope, receive, send)

    async def _choose(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await self._pools.must_read_model():
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        written = await self._choice.choose(scope, exchange, body)
        await self._app(scope if written is body else with_body(scope, written), replay(written, receive), send)


class Dispatch:
    """The innermost app: it passes each request to its pool, with the adapter written where the route reads it."""

    def __init__(self) -> None:
        self.pools: Pools

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Run one request.

        Raises:
            UnsupportedByEngine: the request names an adapter that its route cannot apply.
        """
        pools, exchange = self.pools, Exchange.of(scope)
        app = (pools.default if exchange.pool is None else pools.of_id(exchange.pool)).app
        if exchange.adapter is None or not computes(scope["path"]):
            return app(scope, receive, send)
        return _apply(exchange.adapter, exchange, app, scope, receive, send)


async def _apply(adapter: str, exchange: Exchange, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    body = await exchange.read(receive)
    try:
        written = with_adapter(scope["path"], body, adapter, exchange.loads)
    except CannotServe as refusal:
        raise UnsupportedByEngine(f"the adapter {adapter[:SHOWN]!r}: {refusal}") from None
    await app(scope if written is body else with_body(scope, written), replay(written, receive), send)
