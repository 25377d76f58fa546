"""The one public door for middlewares: everything of the router that a layer may use.

Besides this door a middleware imports `miles_router.errors`, the errors that become answers, and the two libraries that
know nothing of the router: `miles_router.engines`, the engine's wire, and `miles_router.trajectory`, exact tokens.
"""

from miles_router.asgi.exchange import (
    Exchange,
    Message,
    Receive,
    Scope,
    Send,
    is_too_deep,
    may_have_many_values,
    nests_too_deep,
    read_json,
    refuse_many_values,
    replay,
    with_body,
)
from miles_router.asgi.headers import RawHeaders, first, header_texts, raw_headers
from miles_router.asgi.heartbeat import Heartbeat, HeartbeatForm
from miles_router.asgi.moving import Elsewhere
from miles_router.asgi.replies import OK, TOO_LARGE, Collected, Kind, Tap, UnreadCounter, with_length
from miles_router.asgi.watch import Watch
from miles_router.control.fan_out import FleetAnswer
from miles_router.engines.events import LAST_EVENT, Event, write_event
from miles_router.engines.generate import GenerateRequest, UnknownShape
from miles_router.engines.scan import Field
from miles_router.fleet.workers import Worker
from miles_router.metrics.run import RunSeries
from miles_router.metrics.statistics import Statistics, counter, gauge, histogram
from miles_router.middlewares.chat import ChatTurn, KnownVersions
from miles_router.middlewares.contract import (
    BODY_SAYS,
    ASGIApp,
    HasDataPaths,
    HasKeys,
    HasLifespan,
    HasMetrics,
    HasOwners,
    HasRoutes,
    Restores,
)
from miles_router.middlewares.episodes import (
    ENDED,
    IDLE,
    RUNNING,
    WAITING,
    EpisodeLine,
    EpisodePlace,
    EpisodeRow,
    EpisodeShelf,
    EpisodeSource,
    EpisodeView,
    Facets,
    ListedEpisode,
    TokenCounts,
    TurnRow,
    version_spans,
)
from miles_router.middlewares.invalid_answers import flag_worker
from miles_router.middlewares.owners import HeldNames, Owners
from miles_router.middlewares.roots import Root
from miles_router.middlewares.router import Router
from miles_router.middlewares.row_bytes import (
    NOT_WRITTEN,
    can_be_written,
    key_of_rows,
    parent_of,
    read_rows,
    written_rows,
)
from miles_router.middlewares.rows import (
    NO_ROWS,
    Handover,
    Handovers,
    RowChannel,
    RowMatch,
    RowPrefix,
    RowsByKind,
    RowSource,
    TrajectoryRows,
    first_prefix,
)
from miles_router.slots import SLOTS
from miles_router.state.rows import Change, StateRow, header_of, with_header
from miles_router.state.store import StateStore
from miles_router.tasks import Pace, cancelled, spawn, within

__all__ = [
    "BODY_SAYS",
    "ENDED",
    "IDLE",
    "LAST_EVENT",
    "NOT_WRITTEN",
    "NO_ROWS",
    "OK",
    "RUNNING",
    "SLOTS",
    "TOO_LARGE",
    "WAITING",
    "ASGIApp",
    "Change",
    "ChatTurn",
    "Collected",
    "Elsewhere",
    "EpisodeLine",
    "EpisodePlace",
    "EpisodeRow",
    "EpisodeShelf",
    "EpisodeSource",
    "EpisodeView",
    "Event",
    "Exchange",
    "Facets",
    "Field",
    "FleetAnswer",
    "GenerateRequest",
    "Handover",
    "Handovers",
    "HasDataPaths",
    "HasKeys",
    "HasLifespan",
    "HasMetrics",
    "HasOwners",
    "HasRoutes",
    "Heartbeat",
    "HeartbeatForm",
    "HeldNames",
    "Kind",
    "KnownVersions",
    "ListedEpisode",
    "Message",
    "Owners",
    "Pace",
    "RawHeaders",
    "Receive",
    "Restores",
    "Root",
    "Router",
    "RowChannel",
    "RowMatch",
    "RowPrefix",
    "RowSource",
    "RowsByKind",
    "RunSeries",
    "Scope",
    "Send",
    "StateRow",
    "StateStore",
    "Statistics",
    "Tap",
    "TokenCounts",
    "TrajectoryRows",
    "TurnRow",
    "UnknownShape",
    "UnreadCounter",
    "Watch",
    "Worker",
    "can_be_written",
    "cancelled",
    "counter",
    "first",
    "first_prefix",
    "flag_worker",
    "gauge",
    "header_of",
    "header_texts",
    "histogram",
    "is_too_deep",
    "key_of_rows",
    "may_have_many_values",
    "nests_too_deep",
    "parent_of",
    "raw_headers",
    "read_json",
    "read_rows",
    "refuse_many_values",
    "replay",
    "spawn",
    "version_spans",
    "with_body",
    "with_header",
    "with_length",
    "within",
    "write_event",
    "written_rows",
]
