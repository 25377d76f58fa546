"""Traces without sockets: what spans say on the wire, and a queue that nobody waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from miles_router.traces import episodes, queue
from miles_router.traces.context import TraceContext, new_traces
from miles_router.traces.encoding import (
    MAX_VALUE,
    SpanEnvelope,
    attribute,
    span,
    varint,
)
from miles_router.traces.episodes import EpisodeTraces
from miles_router.traces.plain import PlainTurn, written
from miles_router.traces.queue import QueueBounds, Sender, SpanQueue
from miles_router.traces.turn import TurnDetails, TurnEnd, TurnTrace, begin_turn

CONTEXT = TraceContext(b"t" * 16, b"s" * 8, True)
VALUES = st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False)
IDS = st.binary(min_size=8, max_size=8)


def read_all(data: bytes) -> list[Span]:
    """Spans as the protocol's own messages read them."""
    message = ExportTraceServiceRequest.FromString(SpanEnvelope({"service.name": "me"}, "n", "1").around([data]))
    (scope,) = message.resource_spans[0].scope_spans
    assert (scope.scope.name, scope.scope.version) == ("n", "1")
    return list(scope.spans)


def read(data: bytes) -> Span:
    """The same of one span."""
    (only,) = read_all(data)
    return only


@given(st.dictionaries(st.text(max_size=200), VALUES | st.lists(st.text(), max_size=5), max_size=8))
def test_attributes_are_read_as_they_were_given(attributes: dict[str, str | int | bool | float | list[str]]) -> None:
    rest = b"".join(attribute(key, value) for key, value in attributes.items())
    found = read(span(CONTEXT, None, b"turn", 1, 2, rest))
    for pair, (key, value) in zip(found.attributes, attributes.items(), strict=True):
        kind = str(pair.value.WhichOneof("value"))
        if isinstance(value, list):
            assert [each.string_value for each in pair.value.array_value.values] == [each[:MAX_VALUE] for each in value]
        else:
            wanted = value[:MAX_VALUE] if isinstance(value, str) else value
            assert (pair.key, type(wanted), getattr(pair.value, kind)) == (key, type(value), wanted)


@given(st.none() | IDS, st.integers(0, 2**63), st.integers(0, 2**63), st.booleans())
def test_a_span_is_read_as_it_was_given(parent: bytes | None, start: int, end: int, remote: bool) -> None:
    found = read(span(CONTEXT, parent, b"first_byte", start, end, kind=2, remote=remote))
    assert (found.trace_id, found.span_id, found.parent_span_id) == (b"t" * 16, b"s" * 8, parent or b"")
    assert (found.name, found.kind, found.flags) == ("first_byte", 2, 0x301 if remote else 0x101)
    assert (found.start_time_unix_nano, found.end_time_unix_nano) == (start, end)


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=600)
MOMENTS = st.floats(0, 1e6)
CONTEXTS = st.builds(TraceContext, st.binary(min_size=16, max_size=16), IDS, st.just(True))
PLAIN_TURNS = st.builds(
    lambda context, *rest: (context.value(), *rest),
    *(CONTEXTS, st.just("/generate"), st.none() | NAMES, st.none() | NAMES, st.sampled_from([0, 200, 404, 503]), NAMES),
    *(MOMENTS, MOMENTS, MOMENTS),
)


@given(st.lists(PLAIN_TURNS, min_size=1, max_size=4))
def test_plain_turns_are_written_as_others_are(turns: list[PlainTurn]) -> None:
    for turn, found in zip(turns, read_all(written(turns)), strict=True):
        context = TraceContext.read(turn[0])
        if context is None:
            continue  # zeros name nothing, and are never given
        path, worker, version, status, request_id, *moments = turn[1:]
        details = TurnDetails()
        end = TurnEnd(request_id, path, status, 0.0, 0.0, 0.0, 0.0, 10**15, worker, version)
        wanted = read(b"".join(details.spans(context, end)))
        began, first, ended = (int(moment * 1e9) for moment in moments)
        zero = found.start_time_unix_nano - began
        assert found.end_time_unix_nano - zero == ended
        assert found.events[0].time_unix_nano - zero == first
        wanted.start_time_unix_nano = found.start_time_unix_nano
        wanted.end_time_unix_nano = found.end_time_unix_nano
        wanted.events[0].time_unix_nano = found.events[0].time_unix_nano
        assert found == wanted


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_as_short_as_protobuf_has_them(number: int) -> None:
    assert len(varint(number)) == max(1, -(-number.bit_length() // 7))


@given(IDS, st.binary(min_size=16, max_size=16), st.booleans())
def test_a_span_is_read_from_the_header_that_names_it(span_id: bytes, trace_id: bytes, sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, sampled)
    zeros = not any(trace_id) or not any(span_id)
    assert TraceContext.read(context.value()) == (None if zeros else context)


@pytest.mark.parametrize("begins", [None, lambda trace_id: trace_id[0] < 128], ids=["all", "a half"])
def test_new_traces_are_kept_as_their_sampler_says_and_have_names_of_their_own(
    begins: Callable[[bytes], bool] | None,
) -> None:
    made = list(islice(new_traces(begins), 100))
    contexts = [TraceContext.read(value) for value in made]
    assert [None if context is None else context.value() for context in contexts] == made
    kept = [context for context in contexts if context is not None]
    assert {context.sampled for context in kept} == ({True} if begins is None else {True, False})
    assert all(context.sampled == (begins is None or begins(context.trace_id)) for context in kept)
    assert len({part for context in kept for part in (context.trace_id, context.span_id)}) == 200


def test_failing_sampler_is_asked_once_and_ends_only_its_trace() -> None:
    asked: list[bytes] = []

    def begins(trace_id: bytes) -> bool:
        asked.append(trace_id)
        if len(asked) == 2:
            raise OSError
        return False

    traces = new_traces(begins)
    assert next(traces).split(b"-")[1:] == [asked[0].hex().encode(), ANY, b"00"]
    with pytest.raises(OSError, match=r"^$"):
        next(traces)
    third = next(traces)
    assert third.split(b"-")[1:] == [asked[2].hex().encode(), ANY, b"00"]
    assert len(asked) == 3


def test_a_later_version_is_read_as_the_first() -> None:
    assert TraceContext.read(b"01" + CONTEXT.value()[2:] + b"-more") == CONTEXT


def queue_of(send: Sender, waiting: int, batch: int, seconds: float = 3600.0) -> SpanQueue[tuple[str]]:
    """One whose turns are a letter each."""

    def write(turns: Sequence[tuple[str]]) -> bytes:
        return "".join(letter for (letter,) in turns).encode()

    return SpanQueue(write, send, QueueBounds(waiting, batch, seconds))


def put_turns(spans: SpanQueue[tuple[str]], letters: str) -> None:
    for letter in letters:
        spans.turns.append((letter,))
        if len(spans.turns) >= spans.in_a_row:
            spans.write()


def test_the_end_does_not_wait_for_a_collector_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "LAST_SECONDS", 0.01)
    silent, asked = threading.Event(), threading.Event()

    def send(spans: Sequence[bytes]) -> None:
        asked.set()
        silent.wait()

    spans = queue_of(send, 10, 1)
    spans.start()
    spans.put(b"")
    assert asked.wait(120)
    spans.close()
    silent.set()


@pytest.mark.parametrize("kind", ["written", "turns"])
def test_batches_are_no_larger_than_they_may_be(kind: str) -> None:
    sizes: list[int] = []
    spans = queue_of(lambda batch: sizes.append(len(b"".join(batch))), 10, 4)
    for _ in range(11):
        spans.put(b"a") if kind == "written" else put_turns(spans, "a")
    spans.start()
    spans.close()
    assert (sizes, dict(spans.statistics.records)) == ([4, 4, 2], {"sent": 10, "failed": 0, "dropped": 1})


def test_turns_are_written_in_a_row_and_the_last_ones_when_they_are_sent() -> None:
    sent: list[Sequence[bytes]] = []
    spans = queue_of(sent.append, 10_000, 500)
    put_turns(spans, "a" * 64 + "b" * 64 + "c")
    spans.put(b"d")
    spans.start()
    spans.close()
    assert sent == [[b"a" * 64, b"b" * 64, b"d", b"c"]]


@given(
    waiting=st.integers(1, 300),
    batch=st.integers(1, 300),
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=6),
)
def test_what_waits_is_never_more_than_may_and_hardly_less(
    waiting: int, batch: int, runs: list[tuple[bool, int]]
) -> None:
    spans = queue_of(lambda _: None, waiting, min(batch, waiting))
    dropped = 0
    for are_turns, count in runs:
        for _ in range(count):
            put_turns(spans, "a") if are_turns else spans.put(b"a")
        now = spans.statistics.records["dropped"]
        assert spans.waiting <= waiting
        assert now == dropped or spans.waiting >= waiting - waiting // 64
        dropped = now
    assert spans.waiting + dropped == sum(count for _, count in runs)


def test_what_comes_while_the_last_ones_are_sent_waits_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def send(batch: Sequence[bytes]) -> None:
        seen.append(f"sent {len(batch)}")
        spans.put(b"meanwhile")

    class Passing(threading.Event):
        """Time is always up, until it has been three times."""

        def wait(self, timeout: float | None = None) -> bool:
            seen.append("waited")
            if len(seen) > 4:
                raise TimeoutError
            return False

    monkeypatch.setattr(threading, "Event", Passing)
    spans = queue_of(send, 10, 4)
    spans.put(b"")
    with pytest.raises(TimeoutError):
        spans._run()
    assert seen == ["waited", "sent 1", "waited", "sent 1", "waited"]


def test_what_is_being_sent_takes_room_once() -> None:
    def send(batch: Sequence[bytes]) -> None:
        if not spans.statistics.records["sent"]:
            put_turns(spans, "mmmmm")
            assert spans.statistics.records["dropped"] == 1

    spans = queue_of(send, 10, 6)
    put_turns(spans, "aaaaaa")
    spans.start()
    spans.close()
    assert dict(spans.statistics.records) == {"sent": 10, "failed": 0, "dropped": 1}


def test_no_turn_is_lost_or_sent_twice_while_both_threads_write() -> None:
    letters = "".join(chr(ord("a") + number % 26) for number in range(20_000))
    sent: list[bytes] = []

    def send(batch: Sequence[bytes]) -> None:
        assert batch
        sent.extend(batch)

    spans = queue_of(send, len(letters), 3, 1e-6)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        spans.start()
        put_turns(spans, letters)
        spans.close()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(b"".join(sent).decode()) == sorted(letters)
    assert spans.statistics.records["sent"] == len(letters)


class Everything:
    """Keeps all traces."""

    all_begin = True

    def begins(self, trace_id: bytes) -> bool:
        return True

    def follows(self, parent: TraceContext) -> bool:
        return True


def turn_in(traces: EpisodeTraces, session: str | None) -> TurnTrace:
    turn = begin_turn()
    traces.place(turn, key=session)
    return turn


def leave(traces: EpisodeTraces, turn: TurnTrace) -> None:
    assert turn.details is not None
    assert turn.details.episode is not None
    traces.leave(turn.details.episode, 1.0)


def test_an_episode_that_ends_while_a_turn_runs_is_told_behind_it() -> None:
    told: list[Span] = []
    traces = EpisodeTraces(Everything(), lambda written: told.append(read(written)))
    turn = turn_in(traces, "s")
    traces.end("s")
    assert told == []
    leave(traces, turn)
    traces.end("s")
    (episode,) = told
    assert turn.details is not None
    assert episode.span_id == turn.details.parent_id
    assert {each.key: each.value.int_value for each in episode.attributes}["miles_router.turns"] == 1


def test_the_oldest_sessions_and_texts_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MAX_EPISODES", 2)
    monkeypatch.setattr(episodes, "MAX_TEXTS", 2)
    told: list[Span] = []
    traces = EpisodeTraces(Everything(), lambda written: told.append(read(written)))
    for session in ("a", "b", "a", "c"):
        leave(traces, turn_in(traces, session))
    assert [each.attributes[0].value.string_value for each in told] == ["b"]
    for name in ("x", "y", "z"):
        traces.generated(turn_in(traces, None), name)
    assert [traces.first_turn(name) is None for name in ("x", "y", "z")] == [True, False, False]
