"""The one public door for middlewares: everything of the router that a layer may use.

Besides this door a middleware imports `miles_router.errors`, the errors that become answers, and the two libraries that
know nothing of the router: `miles_router.engines`, the engine's wire, and `miles_router.trajectory`, exact tokens.
"""

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.asgi.headers import RawHeaders, first
from miles_router.asgi.keys import Key
from miles_router.asgi.replies import Collected, Kind, Tap, readable
from miles_router.engines.events import Event, write_event
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.scan import Field
from miles_router.forwarding.outgoing import Outgoing
from miles_router.metrics.statistics import Statistics, counter, gauge, histogram
from miles_router.middlewares.contract import ASGIApp, HasLifespan, HasMetrics, HasRoutes
from miles_router.middlewares.router import Router
from miles_router.middlewares.rows import (
    Handover,
    RowChannel,
    RowMatch,
    RowPrefix,
    RowSource,
    TrajectoryRows,
    first_prefix,
)

__all__ = [
    "ASGIApp",
    "Collected",
    "Event",
    "Exchange",
    "Field",
    "GenerateRequest",
    "Handover",
    "HasLifespan",
    "HasMetrics",
    "HasRoutes",
    "Key",
    "Kind",
    "Message",
    "Outgoing",
    "RawHeaders",
    "Receive",
    "Router",
    "RowChannel",
    "RowMatch",
    "RowPrefix",
    "RowSource",
    "Scope",
    "Send",
    "Statistics",
    "Tap",
    "TrajectoryRows",
    "UnknownShape",
    "counter",
    "first",
    "first_prefix",
    "gauge",
    "histogram",
    "readable",
    "replay",
    "with_body",
    "write_event",
]
