"""The public API for middlewares. docs/writing-a-middleware.md says what each name is for.

The router's own large layers also use four sub-APIs, which promise less: `middlewares.rows`, `middlewares.generation`,
`middlewares.state` and `middlewares.episodes`.

Besides these a middleware imports `miles_router.errors`, the errors that become answers, and the two libraries that
know nothing of the router: `miles_router.engines`, the engine's wire, and `miles_router.trajectory`, exact tokens.
"""

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.asgi.headers import first_header
from miles_router.asgi.replies import Collected, Kind, Tap
from miles_router.asgi.watch import Watch
from miles_router.engines.events import Event, write_event
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.scan import Field
from miles_router.fleet.workers import Worker
from miles_router.metrics.statistics import Statistics, counter, gauge, histogram
from miles_router.middlewares.contract import ASGIApp, HasDataPaths, HasKeys, HasLifespan, HasRoutes
from miles_router.middlewares.router import Router
from miles_router.tasks import Pace, cancelled, spawn, within

__all__ = [
    "ASGIApp",
    "Collected",
    "Event",
    "Exchange",
    "Field",
    "GenerateRequest",
    "HasDataPaths",
    "HasKeys",
    "HasLifespan",
    "HasRoutes",
    "Kind",
    "Message",
    "Pace",
    "Receive",
    "Router",
    "Scope",
    "Send",
    "Statistics",
    "Tap",
    "UnknownShape",
    "Watch",
    "Worker",
    "cancelled",
    "counter",
    "first_header",
    "gauge",
    "histogram",
    "replay",
    "spawn",
    "with_body",
    "within",
    "write_event",
]
