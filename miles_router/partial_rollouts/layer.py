"""The innermost layer of the stack while `--partial-rollout resume` or `--resume-on-worker-loss` is set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay
from miles_router.asgi.replies import Tap
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.paths import CHAT, GENERATE
from miles_router.errors import BadRequest
from miles_router.fleet.inflight import InFlight
from miles_router.middlewares.chat import ChatTurn
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts.answer import ResumableAnswer
from miles_router.partial_rollouts.chat import resumable_chat
from miles_router.partial_rollouts.generation import generations_of
from miles_router.partial_rollouts.leg import LAYER, ResumeContext
from miles_router.partial_rollouts.stream import ResumableStream


class PartialRollouts:
    """The layer.

    Args:
        is_paused: whether the worker at a URL was paused by somebody else than the router.
        resume_cut: carry on what a pause cut.
        resume_lost: carry on streams whose worker was lost.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        in_flight: InFlight,
        is_paused: Callable[[str], Awaitable[bool]],
        resume_cut: bool,
        resume_lost: bool,
    ) -> None:
        self.app = app
        self.context = context = ResumeContext(app, router, in_flight, is_paused, resume_cut, resume_lost)
        router.publish(LAYER, context.counts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; anything but a `/generate` that can be read, and turns of chat, passes."""
        if scope["type"] != "http" or scope["path"] not in (GENERATE, CHAT) or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        if scope["path"] == CHAT:
            turn = ChatTurn.of(exchange)
            if turn is None:
                await self.app(scope, receive, send)
            else:
                await resumable_chat(self.context, scope, receive, send, turn)
            return
        body = await exchange.read(receive)
        try:
            request = GenerateRequest.read(exchange.loads(body))
        except (BadRequest, UnknownShape):
            unread = _UnreadRequest(send, self.context.router.metrics)
            await self.app(scope, replay(body, receive), unread.send)
            return
        resumable = ResumableStream if request.stream else ResumableAnswer
        await resumable(self.context, scope, receive, send, generations_of(request)).run(body)


class _UnreadRequest(Tap):
    """The reply to a request that cannot be read. Mostly the engine says what is wrong with it; where it knows what to
    do, its answer cannot be resumed."""

    layer: str = LAYER

    def passes(self, start: Message) -> bool:
        if not super().passes(start):
            self.unread("unknown_request")
        return True
