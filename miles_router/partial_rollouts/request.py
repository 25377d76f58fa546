"""The common part of plain and streamed requests that resume."""

from __future__ import annotations

from abc import abstractmethod

from miles_router.asgi.exchange import Receive, Scope, Send
from miles_router.generation.attempt import ContinuedRequest, ResumeServices
from miles_router.generation.generation import ResumableGeneration
from miles_router.middlewares.contract import ASGIApp


class ResumableRequest(ContinuedRequest):
    """A `/generate` request and its generations."""

    def __init__(
        self,
        services: ResumeServices,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        generations: list[ResumableGeneration],
    ) -> None:
        super().__init__(services, app, scope, receive)
        self.send = send
        self.generations = generations
        #: Whether its answers are a list, or events with an `index`.
        self.indexed = bool(generations) and generations[0].client_request.indexed

    @abstractmethod
    async def run(self, body: bytes) -> None:
        """Send the request, and answer the client."""
