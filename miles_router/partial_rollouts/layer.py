"""The innermost layer of the stack with `--partial-rollout resume` or `--resume-on-worker-loss`."""

from __future__ import annotations

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay
from miles_router.asgi.replies import Tap
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.paths import GENERATE
from miles_router.errors import BadRequest
from miles_router.generation.attempt import LAYER, ResumeServices
from miles_router.generation.generation import generations_of
from miles_router.middlewares.contract import ASGIApp
from miles_router.partial_rollouts.answer import ResumableAnswer
from miles_router.partial_rollouts.stream import ResumableStream


class PartialRollouts:
    """The layer that resumes cut generations of `/generate`."""

    def __init__(self, app: ASGIApp, services: ResumeServices) -> None:
        self.app = app
        self.services = services
        services.router.publish(LAYER, services.counts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a readable `/generate` request; pass every other request through."""
        if scope["type"] != "http" or scope["path"] != GENERATE or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        try:
            request = GenerateRequest.read(exchange.loads(body))
        except (BadRequest, UnknownShape):
            unread = _UnreadRequest(send, self.services.router.metrics)
            await self.app(scope, replay(body, receive), unread.send)
            return
        resumable = ResumableStream if request.stream else ResumableAnswer
        await resumable(self.services, self.app, scope, receive, send, generations_of(request)).run(body)


class _UnreadRequest(Tap):
    """The reply to a request that the router cannot read: mostly an error of the engine. It is not resumed."""

    layer: str = LAYER

    def passes(self, start: Message) -> bool:
        if not super().passes(start):
            self.unread("unknown_request")
        return True
