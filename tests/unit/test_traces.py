"""Traces without sockets: which spans there are, read from OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags, get_current_span

from middleware_hub.traces import episodes as module
from middleware_hub.traces.episodes import EpisodeIds, Episodes
from middleware_hub.traces.parts import parts_of
from miles_router.asgi.flight import Flight
from miles_router.middlewares.generation import Mark

WORKER = {"worker": "http://a:1", "weight_version": "3"}


class Scene:
    """Episodes, and the spans of theirs that have ended."""

    def __init__(self) -> None:
        ids, self._ended = EpisodeIds(), InMemorySpanExporter()
        provider = TracerProvider(id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self.episodes = Episodes(provider.get_tracer("test"), ids)

    def enter(self, session: str) -> SpanContext:
        return get_current_span(self.episodes.enter(session, 1)).get_span_context()

    def ended(self) -> Iterator[dict[str, object]]:
        return (dict(span.attributes or {}) for span in self._ended.get_finished_spans())


def test_a_session_has_the_same_ids_in_every_process_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = Scene().enter("s"), Scene().enter("s"), Scene().enter("t")
    assert (again.trace_id, again.span_id) == (first.trace_id, first.span_id)
    assert len({first.trace_id, other.trace_id}) == len({first.span_id, other.span_id}) == 2
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "run=8")
    assert Scene().enter("s").trace_id != first.trace_id


def test_the_oldest_sessions_and_texts_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EPISODES", 2)
    monkeypatch.setattr(module, "MAX_TEXTS", 2)
    scene = Scene()
    for session in ("a", "b", "a", "c"):
        scene.enter(session)
    assert [*scene.ended()] == [{"session.id": "b", "miles_router.turns": 1}]
    scene.episodes.end("a")
    scene.episodes.end("a")
    scene.episodes.end()
    assert [each["session.id"] for each in scene.ended()] == ["b", "a", "c"]
    for name in ("x", "y", "z"):
        scene.episodes.generated(name, SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)))
    assert [scene.episodes.first_turn(name) is None for name in ("x", "y", "z")] == [True, False, False]


def test_marks_of_generations_side_by_side_are_told_apart() -> None:
    marks = [
        Mark("gate", 2.0, 1, {"seconds": 1.5}),
        Mark("worker_chosen", 2.0, 1, WORKER),
        Mark("worker_chosen", 3.0, 2, WORKER),
        Mark("first_byte", 4.0, 2, WORKER),
        Mark("first_byte", 5.0, 1, WORKER),
        Mark("reply_ended", 6.0, 1, {}),
        Mark("reply_ended", 7.0, 1, {}),
    ]
    assert [(part.name, part.began_at, part.ended_at) for part in parts_of(marks, 9.0)] == [
        ("gate", 0.5, 2.0),
        ("first_byte", 3.0, 4.0),
        ("first_byte", 2.0, 5.0),
        ("generation", 5.0, 6.0),
        ("generation", 4.0, 9.0),
    ]


def test_a_worker_that_was_not_asked_has_no_part() -> None:
    marks = [Mark("worker_chosen", 1.0, 1, WORKER), Mark("not_admitted", 2.0, 1, {})]
    assert [*parts_of(marks, 9.0)] == []
    lost = [Mark("worker_chosen", 1.0, 1, {}), Mark("worker_lost", 2.0, 1, {}), Mark("worker_chosen", 3.0, 1, WORKER)]
    assert [*parts_of(lost, 9.0)] == [("first_byte", 1.0, 9.0, WORKER)]


def test_a_flight_keeps_marks_where_a_list_is_put() -> None:
    flight = Flight()
    flight.mark("gate", seconds=1.0)
    flight.marks = []
    flight.mark("answer", tokens=3)
    ((name, _, request, facts),) = flight.marks
    assert (name, request, facts) == ("answer", flight.number, {"tokens": 3})
