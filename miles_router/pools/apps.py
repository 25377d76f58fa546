"""The outermost and the innermost ASGI app of a router: one chooses the pool of a request, the other passes it
there."""

from __future__ import annotations

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request. Raises as `PoolChoice.choose` does."""
        if scope["type"] != "http" or not await self._pools.look():
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request.

        Raises:
            UnsupportedByEngine: the request names an adapter that its route cannot apply.
        """
        pools, exchange = self.pools, Exchange.of(scope)
        pool = pools.default if exchange.pool is None else pools.of_id(exchange.pool)
        if exchange.adapter is None or not computes(scope["path"]):
            await pool.app(scope, receive, send)
            return
        body = await exchange.read(receive)
        try:
            written = with_adapter(scope["path"], body, exchange.adapter, exchange.loads)
        except CannotServe as refusal:
            raise UnsupportedByEngine(f"the adapter {exchange.adapter[:SHOWN]!r}: {refusal}") from None
        await pool.app(scope if written is body else with_body(scope, written), replay(written, receive), send)
