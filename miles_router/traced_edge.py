"""The outermost app where turns are traced. Nothing of it is loaded without `--otel`."""

from __future__ import annotations

import time
from typing import Any

from miles_router.asgi.exchange import Exchange, Scope
from miles_router.edge import RouterApp
from miles_router.errors import RouterError
from miles_router.traces.context import SAMPLED
from miles_router.traces.traces import Traces

_finished = RouterApp._finished


class TracedRouterApp(RouterApp):
    """The outermost app, with a trace of each turn."""

    def __init__(self, traces: Traces, **parts: Any) -> None:
        super().__init__(**parts)
        self._traces = traces
        self._plain_turns, self._in_a_row = traces.queue.turns, traces.queue.in_a_row

    def _report(self, error: RouterError, exchange: Exchange, scope: Scope, *, began: bool) -> None:
        super()._report(error, exchange, scope, began=began)
        if exchange.flight.trace is not None:
            exchange.flight.trace.detailed().error = error.type

    def _finished(self, scope: Scope, exchange: Exchange, status: int, started_at: float) -> None:
        _finished(self, scope, exchange, status, started_at)  # `super` would look it up anew each time
        flight = exchange.flight
        turn = flight.trace
        if turn is None:
            return
        request, workers, traceparent, head_at = turn.request, turn.workers, turn.traceparent, flight.first_byte_at
        if (turn.details is not None or traceparent is None or head_at is None) or (
            workers is None or request is None or request.tried
        ):
            self._traces.finish(exchange, turn, scope["path"], status, started_at)
        elif traceparent.endswith(SAMPLED):  # here, since a call more costs each small request some thousandths
            path, worker, turns = scope["path"], flight.worker_url, self._plain_turns
            version, own, ended_at = workers.version_of(worker), exchange.request_id, time.perf_counter()
            turns.append((traceparent, path, worker, version, status, own, started_at, head_at, ended_at))
            if len(turns) >= self._in_a_row:
                self._traces.queue.write()
