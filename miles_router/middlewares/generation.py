"""The sub-API for generation: what the layers that record generations tell the layers inside, their clients and the
log."""

from miles_router.asgi.heartbeat import Heartbeat, HeartbeatForm
from miles_router.asgi.replies import UnreadCounter
from miles_router.middlewares.chat import ChatTurn
from miles_router.middlewares.invalid_answers import flag_worker

__all__ = ["ChatTurn", "Heartbeat", "HeartbeatForm", "UnreadCounter", "flag_worker"]
