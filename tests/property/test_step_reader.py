"""A reader that stops behind each request, beside the one that reads on: the same requests, and no byte too many."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_router.serving.client_request import ClientRequest
from miles_router.serving.leaving import with_body
from miles_router.serving.request_reader import BadMessage, RequestReader
from miles_router.serving.step_reader import StepReader
from tests.support.http import chunked, request
from tests.support.tiers import examples

Seen = tuple[str, bytes, list[tuple[bytes, bytes]], bytes]

#: Bytes among which are those that framing is made of.
BODY = st.lists(st.sampled_from([b"\r\n", b"\n", b"0\r\n\r\n", b"\r\n\r\n", b"a", b"5;x", b"z" * 5000]), max_size=6)
HEADERS = st.lists(
    st.sampled_from([("X-A", "1"), ("Upgrade", "h2c"), ("Connection", "Upgrade"), ("X-Long", "y" * 5000)]),
    max_size=3,
    unique=True,
)


def message(kind: str, headers: list[tuple[str, str]], parts: list[bytes], target: str) -> bytes:
    """A request as bytes."""
    if kind == "none":
        return request("GET", target, headers)
    if kind == "length":
        return request("POST", target, headers, b"".join(parts))
    framed = chunked(*(part for part in parts if part))
    if kind == "trailers":
        framed = b"1;ext=2\r\nq\r\n00;last=1\r\nX-Trailer: 0\r\n\r\n"
    return b"\r\n" + request("POST", target, [*headers, ("Transfer-Encoding", "chunked")], framed)


MESSAGES = st.lists(
    st.builds(
        message,
        st.sampled_from(["none", "length", "chunked", "trailers"]),
        HEADERS,
        BODY,
        st.sampled_from(["/a", "/a?b=c", "http://other/x"]),
    ),
    min_size=1,
    max_size=5,
)


class Reading:
    """Whoever is given the requests."""

    def __init__(self, kind: type[RequestReader]) -> None:
        self.seen: list[Seen] = []
        self.reader = kind({}, self._begin, self._end)

    def _begin(self, scope: Any, keep_alive: bool, awaits_continue: bool) -> ClientRequest:
        line: Any = self
        made = ClientRequest(line, scope["method"], http_1_0=False, keep_alive=True, awaits_continue=False)
        made.keep_body(chunked=any(name == b"transfer-encoding" for name, _ in scope["headers"]))
        self._scope = scope
        return made

    def _end(self, request: ClientRequest) -> None:
        scope = self._scope
        self.seen.append((scope["method"], scope["raw_path"], scope["headers"], request.whole_body()))
        self.last = request
        self.reader.full = isinstance(self.reader, StepReader)

    def pause_reading(self) -> None:
        pass


@settings(max_examples=examples(600))
@given(MESSAGES, st.lists(st.integers(0, 30_000), max_size=12), st.booleans())
def test_requests_are_the_same_and_nothing_behind_one_is_read_with_it(
    messages: list[bytes], cuts: list[int], bytewise: bool
) -> None:
    stream = b"".join(messages)
    plain = Reading(RequestReader)
    plain.reader.feed(stream)
    assert len(plain.seen) == len(messages)

    stepping = Reading(StepReader)
    reader = stepping.reader
    assert isinstance(reader, StepReader)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    if bytewise and len(stream) < 3000:
        places = list(range(len(stream) + 1))
    ends = [sum(map(len, messages[: number + 1])) for number in range(len(messages))]
    for start, stop in itertools.pairwise(places):
        reader.feed(stream[start:stop])
        while reader.full:
            end = ends[len(stepping.seen) - 1]
            assert bytes(reader.unread) == stream[end:stop]
            again = Reading(RequestReader)
            for part in with_body(reader.head, stepping.last.whole_body(), chunked=stepping.last.chunked):
                again.reader.feed(part)
            assert again.seen == stepping.seen[-1:]
            reader.full = False
            reader.go_on()
    assert stepping.seen == plain.seen


@settings(max_examples=examples(300))
@given(MESSAGES, st.integers(0, 1 << 20), st.integers(0, 255))
def test_what_one_refuses_the_other_does(messages: list[bytes], place: int, value: int) -> None:
    """A byte is another one: either both read the same, or both refuse what comes from there on."""
    stream = bytearray(b"".join(messages))
    stream[place % len(stream)] = value
    plain, stepping = Reading(RequestReader), Reading(StepReader)
    refused = [_refuses(each, bytes(stream)) for each in (plain, stepping)]
    assert refused[0] == refused[1]
    assert plain.seen == stepping.seen


def _refuses(reading: Reading, stream: bytes) -> bool:
    try:
        reading.reader.feed(stream)
        while reading.reader.full:
            reading.reader.full = False
            reading.reader.go_on()
    except BadMessage:
        return True
    return False
