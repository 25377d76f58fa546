"""The part of the router that middlewares may use. Everything here is public; everything else is not."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client.registry import Collector

from miles_router.asgi.exchange import Scope, request_id
from miles_router.asgi.flight import Flight
from miles_router.asgi.headers import REQUEST_DROPPED, RawHeaders, end_to_end
from miles_router.asgi.origin import base_url
from miles_router.asgi.path import decode_path
from miles_router.control.control import Control
from miles_router.dialects import namespace_of
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import computes, generates
from miles_router.forwarding.forwarded import Forwarded
from miles_router.forwarding.forwarder import Forwarder
from miles_router.forwarding.outgoing import Outgoing
from miles_router.metrics import Metrics, Statistics
from miles_router.metrics.run import RunSeries
from miles_router.middlewares.checkpoint import load_generation_config, load_model_config, load_tokenizer
from miles_router.middlewares.owners import Owners
from miles_router.middlewares.rows import RowChannel
from miles_router.settings.config import RouterConfig
from miles_router.trajectory.rows import KINDS

if TYPE_CHECKING:
    from miles_router.generation.attempt import ResumeServices
    from miles_router.middlewares.episodes import EpisodeSource
    from miles_router.state.store import StateStore
    from miles_router.traces.traces import Traces

Numbers = TypeVar("Numbers", bound=Statistics)


class Router:
    """The handle that each middleware gets as `router=`.

    An ordinary object on purpose: middlewares written for similar routers set attributes of their own on it.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: Fleet,
        forwarder: Forwarder,
        metrics: Metrics,
        control: Control,
        args: Namespace | None,
        store: StateStore | None = None,
        traces: Traces | None = None,
        tokenizer: Any = None,
        owners: Owners | None = None,
    ) -> None:
        self.config = config
        if tokenizer is not None:
            self.tokenizer = tokenizer
        #: The workers; `await router.fleet.facts(url)` returns the facts of a worker's engine.
        self.fleet = fleet
        #: The states, weight versions and requests in flight of the workers.
        self.pool = fleet.pool
        #: The gate: whether the fleet is paused or asleep, and which requests wait.
        self.gate = fleet.gate
        self.metrics = metrics
        #: The owners of objects among the router's processes.
        self.owners = owners or Owners()
        #: Requests to all workers at once.
        self.control = control
        #: The state that outlives the process (`--state-dir`); None without one.
        self.store = store
        #: Receives what a middleware has read of a turn (`--otel`); None without tracing.
        self.traces = traces
        #: Resumes cut generations; None if generations are not resumed.
        self.resume: ResumeServices | None = None
        #: A free namespace in which middlewares share objects that live longer than a request.
        self.state = SimpleNamespace()
        #: The argparse Namespace of the framework that embeds the router, or one with the names such frameworks use.
        self.args = args if args is not None else namespace_of(config)
        #: The middlewares' entries under `statistics` in `GET /router/info`: a function that returns JSON, by name.
        self.statistics: dict[str, Callable[[], Mapping[str, object]]] = {}
        #: The declared numbers among these, by the same name.
        self.published: dict[str, Statistics] = {}
        #: The middlewares' collectors for `GET /metrics`.
        self.collectors: list[Collector] = []
        #: Connects middlewares that hold trajectories with the middleware that captures a kind of rows.
        self.rows = {kind: RowChannel(kind) for kind in KINDS}
        #: The middlewares whose episodes the dashboard shows, by the kind of episode.
        self.episodes: dict[str, EpisodeSource] = {}
        #: The series of `GET /router/run`, fed by recorded generations and by samples that are read.
        self.run = RunSeries(lambda: fleet.pool.weight_version)
        fleet.gate.when_waited = self.run.wait
        self._forwarder = forwarder

    def publish(self, name: str, statistics: Numbers, **facts: Callable[[], object]) -> Numbers:
        """Publish a middleware's numbers at `GET /metrics`, and together with `facts` under `statistics` and this name
        in `GET /router/info`. Return `statistics`.

            self.counts = router.publish("token_cap", Counts())
        """
        self.collectors.append(statistics)
        self.published[name] = statistics
        self.statistics[name] = lambda: {**statistics.numbers(), **{fact: read() for fact, read in facts.items()}}
        return statistics

    @asynccontextmanager
    async def forward(
        self,
        method: str,
        path: str,
        *,
        headers: RawHeaders | None = None,
        body: bytes = b"",
        key: str | None = None,
        flight: Flight | None = None,
        preferred: str | None = None,
    ) -> AsyncIterator[Forwarded]:
        """Send a middleware's own request to a worker, which is chosen and retried like for a client's request. The
        worker at the URL `preferred` is chosen if it takes requests.

            async with router.forward("POST", "/generate", headers=[(b"content-type", b"application/json")],
                                      body=orjson.dumps(payload), key=session_id) as forwarded:
                status, text = forwarded.reply.status, await forwarded.reply.read_all(limit)

        `path` is sent unchanged, including its query. Leaving the block early makes the worker stop generating. A
        generation waits while the gate is closed; an abort of the client's request with this `flight` ends the wait.

        Raises:
            BadRequest: the path is ambiguous.
            NoWorkerAvailable, UpstreamError, FleetPaused: for the same reasons as a client's request.
        """
        sent = end_to_end(headers or [], REQUEST_DROPPED)
        if not any(name == b"x-request-id" for name, _ in sent):
            sent.append((b"x-request-id", request_id({}).encode("ascii")))
        target = path.encode("ascii")
        decided = decode_path(target.partition(b"?")[0])
        request = Outgoing(
            method,
            target,
            sent,
            body,
            key,
            generates=generates(decided),
            computes=computes(decided),
            preferred=preferred,
            path=decided,
        )
        forwarded = await self._forwarder.open_when_admitted(request, flight or Flight())
        try:
            yield forwarded
        finally:
            forwarded.close()

    def end_session(self, key: str) -> None:
        """End the session with this affinity key: its cached tokens no longer count in the choice of workers. Unknown
        keys are ignored."""
        self.fleet.end_session(key)
        if self.traces is not None:
            self.traces.end_session(key)

    def base_url(self, scope: Scope) -> str:
        """Return the router's URL as the client of this request knows it, without a trailing slash.

        Raises:
            BadRequest: `--public-url` is not set, and the request's `Host` is not a valid authority.
        """
        return base_url(scope, self.config.public_url)

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The `config.json` of `--hf-checkpoint`; empty if the file or the setting is missing.

        Raises:
            ConfigError: the file cannot be read.
        """
        return load_model_config(self.config)

    @functools.cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The `generation_config.json` of `--hf-checkpoint`; empty if the file or the setting is missing.

        Raises:
            ConfigError: the file cannot be read.
        """
        return load_generation_config(self.config)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `--hf-checkpoint` (transformers), loaded at the first use.

        Raises:
            ConfigError: no checkpoint is set, the extra `tito` is not installed, or it cannot be loaded.
        """
        return load_tokenizer(self.config)
