"""What a middleware may see of the router. Everything here is public; everything else is not."""

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

Numbers = TypeVar("Numbers", bound=Statistics)


class Router:
    """The handle each middleware gets as `router=`.

    An ordinary object on purpose: middlewares written for other routers of this shape set attributes of their own.
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
    ) -> None:
        self.config = config
        if tokenizer is not None:
            self.tokenizer = tokenizer
        #: Who the workers are; `await router.fleet.facts(url)` is what the engine of one can do.
        self.fleet = fleet
        #: Their states, their weight versions, and how many requests each carries.
        self.pool = fleet.pool
        #: Whether the fleet is paused or asleep, and who waits.
        self.gate = fleet.gate
        self.metrics = metrics
        #: Which of several processes has what.
        self.owners = owners or Owners()
        #: Requests to every worker at once.
        self.control = control
        #: What outlives the process (`--state-dir`); None where nothing does.
        self.store = store
        #: Carries cut generations on; None where that is not asked for.
        self.resume: ResumeServices | None = None
        #: Free for middlewares to leave each other things that last longer than a request.
        self.state = SimpleNamespace()
        #: The argparse Namespace of the framework that embeds us, or one with the names such frameworks use.
        self.args = args if args is not None else namespace_of(config)
        #: What middlewares show under `statistics` in `GET /router/info`: a name and a function that gives JSON.
        self.statistics: dict[str, Callable[[], Mapping[str, object]]] = {}
        #: By the same name, where that has some: declared numbers.
        self.published: dict[str, Statistics] = {}
        #: What `GET /metrics` shows of them.
        self.collectors: list[Collector] = []
        #: Where layers that hold trajectories and the layer that captures a kind of rows find each other.
        self.rows = {kind: RowChannel(kind) for kind in KINDS}
        #: Who holds episodes that the dashboard shows, by their kind.
        self.episodes: dict[str, EpisodeSource] = {}
        #: Called with the key of each session that is over.
        self.on_session_end: list[Callable[[str], None]] = []
        #: What is told of generations that are recorded, and of samples that are read.
        self.run = RunSeries(lambda: fleet.pool.weight_version)
        fleet.gate.when_waited = self.run.wait
        self._forwarder = forwarder

    def publish(self, name: str, statistics: Numbers, **facts: Callable[[], object]) -> Numbers:
        """Show a middleware's numbers at `GET /metrics` and, with `facts` beside them, under `statistics` and this name
        in `GET /router/info`. Gives them back.

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
        """A request of a middleware's own to a worker, chosen, leased and retried like a client's; while the worker at
        the URL `preferred` takes requests, it is that one.

            async with router.forward("POST", "/generate", headers=[(b"content-type", b"application/json")],
                                      body=orjson.dumps(payload), key=session_id) as forwarded:
                status, text = forwarded.reply.status, await forwarded.reply.read_all(limit)

        `path` is sent as it is spelled, query included. Leaving the block early tells the worker to stop generating.
        One that generates waits at the gate while that is closed; an abort of the request with this `flight`, which is
        the one it is made for, ends that.

        Raises:
            BadRequest: the path is ambiguous.
            NoWorkerAvailable, UpstreamError, FleetPaused: as for a client's request.
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
        """The session whose requests have this key is over: what it holds on its worker weighs no more on who takes the
        next ones. Harmless for one that nobody knows."""
        self.fleet.end_session(key)
        for listener in self.on_session_end:
            listener(key)

    def base_url(self, scope: Scope) -> str:
        """The router's address as the client of this request knows it, without a slash at its end.

        Raises:
            BadRequest: there is no `--public-url`, and the request's `Host` is no clean authority.
        """
        return base_url(scope, self.config.public_url)

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's `config.json`, of `--hf-checkpoint`; empty where that has none, or is not set.

        Raises:
            ConfigError: it cannot be read.
        """
        return load_model_config(self.config)

    @functools.cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's `generation_config.json`, of `--hf-checkpoint`; empty where that has none, or is not set.

        Raises:
            ConfigError: it cannot be read.
        """
        return load_generation_config(self.config)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `--hf-checkpoint` (transformers), loaded at the first use.

        Raises:
            ConfigError: no checkpoint is set, the extra `tito` is not installed, or it cannot be loaded.
        """
        return load_tokenizer(self.config)
