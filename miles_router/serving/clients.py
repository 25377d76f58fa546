"""The state that all client connections share: the connection limit and the timeouts."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from miles_router.asgi.watch import Deadlines
from miles_router.metrics import ClientStatistics
from miles_router.middlewares.contract import ASGIApp
from miles_router.serving.client_connection import ClientConnection
from miles_router.serving.client_request import ClientRequest

logger = logging.getLogger(__name__)

#: Seconds for which bytes that a client sends after its last reply are read and dropped. Closing a socket with unread
#: bytes sends a reset, which could destroy the reply on its way.
LINGER = 2.0
#: Seconds between two checks of a half-closed client.
CHECK_INTERVAL = 0.1
#: Seconds between two log lines about refused connections.
REFUSALS_LOGGED_EVERY = 10.0


class ClientConnections:
    """The protocol factory that uvicorn calls for each new connection.

    Args:
        limit: maximum number of open connections.
        idle_seconds: timeout between two requests.
        head_seconds: timeout from the start of a connection, or the first byte of a request, to the end of its head.
    """

    def __init__(
        self,
        app: ASGIApp,
        statistics: ClientStatistics,
        *,
        limit: int,
        idle_seconds: float,
        head_seconds: float,
    ) -> None:
        self._app = app
        self._statistics = statistics
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._head_seconds = head_seconds
        self._shared: Shared | None = None

    def __call__(self, *, server_state: Any, app_state: dict[str, Any], **_: Any) -> ClientConnection:
        """Return the protocol of a new connection; `server_state` and `app_state` are uvicorn's."""
        return ClientConnection(self._share(), server_state, app_state)

    def _share(self) -> Shared:
        if self._shared is None:
            self._shared = Shared(self._app, self._statistics, self._limit, self._idle_seconds, self._head_seconds)
        return self._shared


class Shared:
    """The state shared by the connections of one server."""

    def __init__(
        self, app: ASGIApp, statistics: ClientStatistics, limit: int, idle_seconds: float, head_seconds: float
    ) -> None:
        self.app = app
        self.statistics = statistics
        self.limit = limit
        self.loop = loop = asyncio.get_running_loop()
        #: Connections between two requests.
        self.idle: Deadlines[ClientConnection] = Deadlines(idle_seconds, ClientConnection.close_idle, loop)
        #: Connections that wait for their first request, or for the rest of a request.
        self.arriving: Deadlines[ClientConnection] = Deadlines(head_seconds, ClientConnection.handle_late_request, loop)
        #: Connections that wait for their client to stop sending.
        self.lingering: Deadlines[ClientConnection] = Deadlines(LINGER, ClientConnection.close, loop)
        #: Connections whose client has closed its sending side.
        self.half_closed: Deadlines[ClientConnection] = Deadlines(CHECK_INTERVAL, ClientConnection.check_client, loop)
        self.sent: asyncio.Future[None] = loop.create_future()
        self.sent.set_result(None)
        self._held: list[ClientRequest] = []
        self._refused_at = -math.inf

    def make_room(self) -> bool:
        """Return True if one more connection is allowed. At the limit, close the oldest idle connection for it."""
        if self.statistics.open < self.limit:
            return True
        idle = self.idle.oldest() or self.arriving.oldest()
        if idle is not None and idle.idle:
            idle.close_idle()
            return True
        if self.loop.time() - self._refused_at > REFUSALS_LOGGED_EVERY:
            self._refused_at = self.loop.time()
            logger.warning("too_many_connections", extra={"fields": {"limit": self.limit}})
        return False

    def flush_soon(self, request: ClientRequest) -> None:
        """Call `request.flush` at the end of this step of the event loop."""
        if not self._held:
            self.loop.call_soon(self._flush)
        self._held.append(request)

    def _flush(self) -> None:
        held, self._held = self._held, []
        for request in held:
            request.flush()
