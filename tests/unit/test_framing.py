"""What may not be sent, what cannot be understood, and what a peer may send around a body."""

from __future__ import annotations

import pytest

from miles_router.asgi.headers import RawHeaders
from miles_router.forwarding import framing
from miles_router.forwarding.framing import (
    CHUNKED,
    MAX_EXCESS,
    NO_BODY,
    UNTIL_CLOSE,
    ChunkOverhead,
    InvalidFraming,
    reply_body,
    reply_head,
    request_body,
    request_head,
)

BAD_HEADERS = {
    "a line end": (b"x-a", b"a\r\nx-b: c"),
    "a bare line feed": (b"x-a", b"a\nb"),
    "a bare carriage return": (b"x-a", b"a\rb"),
    "a zero": (b"x-a", b"a\0b"),
    "a colon in a name": (b"x-a: b", b"c"),
    "a space in a name": (b"x a", b"c"),
    "a line end in a name": (b"x-a\r\n", b"c"),
    "no name": (b"", b"c"),
}
bad_headers = pytest.mark.parametrize("header", [*BAD_HEADERS.values()], ids=[*BAD_HEADERS])


def head(headers: RawHeaders, *, status: int = 200, method: str = "GET", old: bool = False) -> tuple[bytes, int, bool]:
    return reply_head(status, headers, method=method, http_1_0=old, keep_alive=True)


@bad_headers
def test_a_header_that_would_end_its_line_is_never_written(header: tuple[bytes, bytes]) -> None:
    for _ in range(2):  # what was refused once is not remembered as good
        with pytest.raises(InvalidFraming):
            head([header])
        with pytest.raises(InvalidFraming):
            request_head("GET", b"/", b"worker", [header], 0)


@pytest.mark.parametrize("target", [b"/ HTTP/1.1\r\nx-a: b", b"/\n"])
def test_a_target_that_would_end_its_line_is_never_written(target: bytes) -> None:
    with pytest.raises(InvalidFraming):
        request_head("GET", target, b"worker", [], 0)


@pytest.mark.parametrize("status", [0, 100, 199, 600, 1000])
def test_a_reply_has_a_final_status(status: int) -> None:
    with pytest.raises(InvalidFraming):
        head([], status=status)


@pytest.mark.parametrize("length", [b"", b"-1", b"+1", b"1_0", b"0x1", b"two", b"1, 1", b"1" * 19, "\u0661".encode()])
def test_a_length_is_digits(length: bytes) -> None:
    for name in (b"content-length", b"Content-Length"):
        with pytest.raises(InvalidFraming):
            head([(name, length)])
    with pytest.raises(InvalidFraming):
        request_body([(b"content-length", length)])


def test_a_reply_has_one_length() -> None:
    with pytest.raises(InvalidFraming):
        head([(b"content-length", b"1"), (b"Content-Length", b"1")])


@pytest.mark.parametrize("encoding", [b"gzip", b"gzip, chunked", b"chunked, gzip", b"identity", b""])
def test_only_chunks_are_understood(encoding: bytes) -> None:
    with pytest.raises(InvalidFraming):
        request_body([(b"transfer-encoding", encoding)])
    with pytest.raises(InvalidFraming):
        reply_body(200, [(b"transfer-encoding", encoding)], to_head=False)


def test_chunks_count_before_a_length() -> None:
    """RFC 9112 section 6.3: Transfer-Encoding overrides Content-Length."""
    both = [(b"content-length", b"1"), (b"transfer-encoding", b"Chunked")]
    assert request_body(both) == request_body(both[::-1]) == reply_body(200, both, to_head=False) == CHUNKED


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"5")], [(b"transfer-encoding", b"chunked")]])
@pytest.mark.parametrize(("status", "method"), [(200, "HEAD"), (204, "GET"), (304, "GET")])
def test_replies_without_a_body_announce_what_they_like(status: int, method: str, headers: RawHeaders) -> None:
    assert reply_body(status, headers, to_head=method == "HEAD") == NO_BODY
    data, body, keep_alive = head(headers, status=status, method=method)
    assert (body, keep_alive) == (NO_BODY, True)
    assert b"transfer-encoding" not in data
    assert (b"content-length: 5" in data) == ((b"content-length", b"5") in headers and status != 204)


def test_body_without_length_is_chunked_or_ends_with_an_old_clients_connection() -> None:
    assert head([])[1:] == (CHUNKED, True)
    assert head([], old=True)[1:] == (UNTIL_CLOSE, False)
    assert head([(b"content-length", b"7")], old=True)[1:] == (7, False)


def test_how_bytes_travel_is_not_for_the_app_to_say() -> None:
    data, body, keep_alive = head([(b"Transfer-Encoding", b"gzip"), (b"Connection", b"upgrade"), (b"x-a", b"1")])
    assert data == b"HTTP/1.1 200 OK\r\nx-a: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (body, keep_alive) == (CHUNKED, True)
    assert head([(b"connection", b"Close")])[2] is False


def test_the_memory_of_names_has_a_bound() -> None:
    for number in range(framing._NAMES_REMEMBERED + 10):
        head([(b"x-%d" % number, b"")])
    assert len(framing._LINE_STARTS) <= framing._NAMES_REMEMBERED


def test_chunks_of_one_byte_are_no_excess() -> None:
    excess = ChunkOverhead()
    for _ in range(MAX_EXCESS):
        excess.count_body(1)
        excess.count_received(len(b"1\r\nx\r\n"))


def test_what_is_sent_around_a_body_is_bounded_however_long_the_body_was() -> None:
    excess = ChunkOverhead()
    excess.count_body(10**9)
    excess.count_received(10**9)
    excess.count_received(MAX_EXCESS)
    with pytest.raises(InvalidFraming):
        excess.count_received(1)
