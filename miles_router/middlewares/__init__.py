"""The public API for middlewares; docs/writing-a-middleware.md describes each name.

The router's own large middlewares also use four sub-APIs, which are less stable: `middlewares.rows`,
`middlewares.generation`, `middlewares.state` and `middlewares.episodes`.

A middleware may also import `miles_router.errors` (errors that become HTTP replies) and two libraries that do not
depend on the router: `miles_router.engines` (the engines' wire formats) and `miles_router.trajectory` (exact tokens).
"""

from miles_router.asgi.exchange import Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.asgi.replies import Collected, Kind, Tap
from miles_router.asgi.watch import Watch
from miles_router.asgi.wire import first_header
from miles_router.engines.events import Event, write_event
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.json_bytes import Field
from miles_router.fleet.workers import Worker
from miles_router.metrics.metrics import Statistics, counter, gauge, histogram
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
