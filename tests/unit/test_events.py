"""Events as SGLang writes them, however the bytes are cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.events import LAST_EVENT, Event, EventReader, write_event

ANSWER = {"text": "a\n\nb é", "output_ids": [1], "meta_info": {"id": "r"}}
texts = st.text().map(lambda text: {**ANSWER, "text": text})


@given(st.lists(texts, max_size=5), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_any_cut_of_the_bytes_gives_the_same_events(
    answers: list[dict[str, object]], cuts: list[int], ended: bool
) -> None:
    events = [write_event(answer) for answer in answers] + [LAST_EVENT] * ended
    data = b"".join(events)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader = EventReader()
    parts = [data[begin:end] for begin, end in itertools.pairwise(places)]
    assert [each for part in parts for each in reader.feed(part)] == events
    assert reader.rest == b""
    assert [Event.read(each).parse() for each in events] == [*answers, *[None] * ended]


def test_what_is_no_whole_event_stays_behind() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: {}\n\ndata: {")) == [b"data: {}\n\n"]
    assert reader.rest == b"data: {"
    assert list(reader.feed(b"}\n\n")) == [b"data: {}\n\n"]


@given(texts, texts, st.integers(1, 400), st.lists(st.integers(0, 800), max_size=8))
def test_an_event_that_was_let_go_goes_on_in_pieces_and_the_next_is_whole_again(
    long: dict[str, object], following: dict[str, object], begun: int, cuts: list[int]
) -> None:
    first, second = write_event(long), write_event(following)
    begun = min(begun, len(first) - 1)
    reader = EventReader()
    assert list(reader.feed(first[:begun])) == []
    assert reader.pending == begun
    assert reader.release() == first[:begun]
    assert (reader.in_released_event, reader.rest, reader.pending) == (True, b"", 0)
    data = first[begun:] + second + LAST_EVENT
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    given_on = [piece for a, b in itertools.pairwise(places) for piece in reader.feed(data[a:b])]
    assert b"".join(given_on) == data
    assert given_on[-2:] == [second, LAST_EVENT]
    assert not reader.in_released_event


def test_an_event_that_was_let_go_and_never_ends_is_still_under_way() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: {")) == []
    assert reader.release() == b"data: {"
    assert list(reader.feed(b"}\n")) == [b"}\n"]
    assert reader.in_released_event
    assert list(reader.feed(b"\n")) == [b"\n"]
    assert not reader.in_released_event


def test_what_has_no_json_in_its_data_parses_to_nothing() -> None:
    for other in (b"", b": comment\n\n", b"data: no json\n\n", LAST_EVENT):
        assert Event.read(other).parse() is None
