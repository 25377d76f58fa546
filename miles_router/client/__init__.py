"""The client library for rollout code and trainers. It talks to a router over HTTP and imports nothing of the server.

RouterClient   generations, exact tokens, sessions, control of the fleet
Session        one agent episode: `base_url` for the agent, `collect()` for the trainer
Sample         exact tokens with loss mask, logprobs, weight versions and routed experts; checked
rollouts       single_turn, multi_turn, agentic, group: to use, or to copy from
errors         the exceptions, by what a caller would do about them
dialects       the calls that the rollout code of training frameworks makes
"""

from miles_router.client.answers import Generation
from miles_router.client.control import PauseMode, WorkerInfo
from miles_router.client.errors import (
    ConnectionLost,
    ErrorReply,
    FanOutFailed,
    InvalidReply,
    InvalidSample,
    NotConnected,
    NotFound,
    RouterClientError,
    TimedOut,
)
from miles_router.client.rollouts import agentic, group, multi_turn, single_turn
from miles_router.client.router_client import RouterClient
from miles_router.client.session import EpisodeInfo, Session, SessionInfo
from miles_router.client.transport import Retries
from miles_router.trajectory import InvalidTrajectory, Retrieved, Sample
from miles_router.trajectory.sample import Status

__all__ = [
    "ConnectionLost",
    "EpisodeInfo",
    "ErrorReply",
    "FanOutFailed",
    "Generation",
    "InvalidReply",
    "InvalidSample",
    "InvalidTrajectory",
    "NotConnected",
    "NotFound",
    "PauseMode",
    "Retries",
    "Retrieved",
    "RouterClient",
    "RouterClientError",
    "Sample",
    "Session",
    "SessionInfo",
    "Status",
    "TimedOut",
    "WorkerInfo",
    "agentic",
    "group",
    "multi_turn",
    "single_turn",
]
