"""The sessions' numbers, for `GET /metrics` and `GET /router/info`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from middleware_hub.openai_session.continuing.continuation import Continuation
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.turns.recording import Recorder

PREFIX = "miles_router_sessions"


def statistics(store: SessionStore, recorder: Recorder, continuation: Continuation) -> Mapping[str, object]:
    """For `GET /router/info`."""
    return {
        "sessions": len(store),
        "bytes": store.nbytes,
        "turns": recorder.turns,
        "sampled_tokens": recorder.sampled_tokens,
        "given_tokens": recorder.given_tokens,
        "reused_tokens": recorder.reused_tokens,
        "untraced": recorder.untraced,
        "expired": store.expired,
        "continuation": continuation.proof.describe(),
    }


class SessionCollector(Collector):
    """For `GET /metrics`."""

    def __init__(self, store: SessionStore, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """One family for each number."""
        store, recorder = self._store, self._recorder
        yield GaugeMetricFamily(PREFIX, "Sessions held.", value=len(store))
        yield GaugeMetricFamily(f"{PREFIX}_bytes", "Bytes of messages and arrays held.", value=store.nbytes)
        yield CounterMetricFamily(f"{PREFIX}_created", "Sessions made.", value=store.created)
        yield CounterMetricFamily(
            f"{PREFIX}_expired", "Sessions forgotten since nobody used them.", value=store.expired
        )
        yield CounterMetricFamily(f"{PREFIX}_turns", "Turns recorded.", value=recorder.turns)
        yield CounterMetricFamily(f"{PREFIX}_untraced", "Requests not recorded.", value=recorder.untraced)
        tokens = CounterMetricFamily(f"{PREFIX}_tokens", "Tokens of recorded turns, by origin.", labels=["origin"])
        tokens.add_metric(["sampled"], recorder.sampled_tokens)
        tokens.add_metric(["given"], recorder.given_tokens)
        tokens.add_metric(["reused"], recorder.reused_tokens)
        yield tokens
