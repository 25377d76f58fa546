"""The innermost layer of the stack while `--partial-rollout resume` or `--resume-on-worker-loss` is set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send, replay
from miles_router.errors import RouterError
from miles_router.fleet.inflight import InFlight
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts.parts import split
from miles_router.partial_rollouts.run import Shared
from miles_router.partial_rollouts.stream import Stream
from miles_router.partial_rollouts.whole import Whole

PATH = "/generate"


class PartialRollouts:
    """The layer. `resume_cut`: carry on what a pause cut; `resume_lost`: carry on streams whose worker was lost.
    `is_paused` asks whether the worker at a URL was paused by somebody else than the router."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        in_flight: InFlight,
        is_paused: Callable[[str], Awaitable[bool]],
        resume_cut: bool = True,
        resume_lost: bool = False,
    ) -> None:
        self.app = app
        self.shared = shared = Shared(app, router, in_flight, is_paused, resume_cut, resume_lost)
        router.statistics["partial_rollouts"] = lambda: {"resumed": shared.resumed, "returned": shared.returned}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; anything but a well-formed `/generate` passes."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        try:
            parsed = exchange.loads(body)
            parts = split(parsed)
            stream = bool(parsed.get("stream"))
        except (RouterError, AttributeError, KeyError, TypeError, ValueError, IndexError):
            await self.app(scope, replay(body, receive), send)  # the engine says what is wrong with it
            return
        run = (Stream if stream else Whole)(self.shared, scope, receive, send, exchange, parts)
        await run.run(body)
