"""The `Router` handle: the part of the router that is public for middlewares."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client.registry import Collector

from miles_router.asgi.access import base_url
from miles_router.asgi.exchange import Routing, Scope, request_id
from miles_router.asgi.wire import REQUEST_DROPPED, RawHeaders, decode_path, end_to_end
from miles_router.control.control import Control
from miles_router.dialects import namespace_of
from miles_router.fleet.fleet import Fleet
from miles_router.forwarding.forwarded import Forwarded, Outgoing
from miles_router.forwarding.forwarder import Forwarder
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
        tokenizer: Any = None,
        owners: Owners | None = None,
        mount: str = "",
    ) -> None:
        self.config = config
        #: The beginning of the paths of this model's requests; empty for the default model.
        self.mount = mount
        if tokenizer is not None:
            self.tokenizer = tokenizer
        #: The workers; `await router.fleet.facts(url)` returns the capabilities of a worker's engine.
        self.fleet = fleet
        #: The workers of every model by `model_id`, empty for workers without one; `Pools` adds to it.
        self.fleets: Mapping[str, Fleet] = {config.model_id or "": fleet}
        #: Returns the handle of the pool with this `model_id`, or raises UnknownModel; `Pools` sets it.
        self.of_model: Callable[[str], Router]
        #: The states, weight versions and request counts of the workers.
        self.pool = fleet.pool
        #: The gate at which requests wait while the fleet is paused or asleep.
        self.gate = fleet.gate
        self.metrics = metrics
        #: The owners of sessions and texts among several router processes.
        self.owners = owners or Owners()
        #: Sends one request to all workers at once.
        self.control = control
        #: State that outlives the process (`--state-dir`); None if the option is not set.
        self.store = store
        #: Resumes cut generations; None if that is switched off.
        self.resume: ResumeServices | None = None
        #: A namespace in which middlewares share objects that live longer than a request.
        self.state = SimpleNamespace()
        #: The argparse Namespace of the framework that embeds the router, or one with the names such frameworks use.
        self.args = args if args is not None else namespace_of(config)
        #: For `statistics` in `GET /router/info`: a name, and a function that returns a JSON object.
        self.statistics: dict[str, Callable[[], Mapping[str, object]]] = {}
        #: The declared numbers of `publish`, by the same name.
        self.published: dict[str, Statistics] = {}
        #: The collectors that `GET /metrics` shows.
        self.collectors: list[Collector] = []
        #: Connects middlewares that hold trajectories to the middleware that captures a kind of rows.
        self.rows = {kind: RowChannel(kind) for kind in KINDS}
        #: The sources of the episodes that the dashboard shows, by kind.
        self.episodes: dict[str, EpisodeSource] = {}
        #: Functions to call with the key of each session that ends.
        self.on_session_end: list[Callable[[str], None]] = []
        #: The statistics of recorded generations and of samples that trainers read.
        self.run = RunSeries.of(fleet.pool)
        fleet.gate.when_waited = self.run.wait
        self._forwarder = forwarder

    def publish(self, name: str, statistics: Numbers, **facts: Callable[[], object]) -> Numbers:
        """Show a middleware's statistics at `GET /metrics` and in `GET /router/info`; return `statistics`.

        `GET /router/info` shows them at `statistics.<name>`, with the values of the functions in `facts`.

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
        routing: Routing | None = None,
        preferred: str | None = None,
    ) -> AsyncIterator[Forwarded]:
        """Send a middleware's own request to a worker, which is chosen, leased and retried as for a client's request.

        The worker at the URL `preferred` is chosen while it accepts requests.

            async with router.forward("POST", "/generate", headers=[(b"content-type", b"application/json")],
                                      body=orjson.dumps(payload), key=session_id) as forwarded:
                status, text = forwarded.reply.status, await forwarded.reply.read_all(limit)

        `path` is sent as spelled, query included. Leaving the block early tells the worker to stop generating.
        A generating request waits at the gate while the gate is closed. `routing` is the routing state of the
        client's request that this one serves; aborting that request ends the wait.

        Raises:
            BadRequest: the path is ambiguous.
            NoWorkerAvailable, UpstreamError, FleetPaused: for the same reasons as a client's request.
        """
        sent = end_to_end(headers or [], REQUEST_DROPPED)
        if not any(name == b"x-request-id" for name, _ in sent):
            sent.append((b"x-request-id", request_id({}).encode("ascii")))
        target = path.encode("ascii")
        decided = decode_path(target.partition(b"?")[0])
        request = Outgoing(method, target, sent, body, key, preferred=preferred, path=decided)
        forwarded = await self._forwarder.open_when_admitted(request, routing or Routing())
        try:
            yield forwarded
        finally:
            forwarded.close()

    def end_session(self, key: str) -> None:
        """End the session with this key: its tokens no longer count as load on its workers.

        Listeners in `on_session_end` are called. Unknown keys do no harm.
        """
        self.fleet.end_session(key)
        for listener in self.on_session_end:
            listener(key)

    def base_url(self, scope: Scope) -> str:
        """Return the URL under which this request's client reaches this model, without a slash at the end.

        Raises:
            BadRequest: `--public-url` is not set, and the request's `Host` is not a valid authority.
        """
        return base_url(scope, self.config.public_url) + self.mount

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's `config.json` from `--hf-checkpoint`; empty if the option is not set or the file is missing.

        Raises:
            ConfigError: the file cannot be read.
        """
        return load_model_config(self.config)

    @functools.cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The `generation_config.json` from `--hf-checkpoint`; empty if the option is not set or the file is missing.

        Raises:
            ConfigError: the file cannot be read.
        """
        return load_generation_config(self.config)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of `--hf-checkpoint`, loaded at first use.

        Raises:
            ConfigError: no checkpoint is set, the extra `tito` is not installed, or the tokenizer cannot be loaded.
        """
        return load_tokenizer(self.config)
