"""What HTTP's parts say and may not say: paths, headers, framing, keys, bodies, addresses."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.asgi.exchange import MAX_REQUEST_ID_LENGTH, Exchange, Message, request_id
from miles_router.asgi.wire import (
    CHUNKED,
    MAX_EXCESS,
    ChunkOverhead,
    InvalidFraming,
    RawHeaders,
    decode_path,
    header_texts,
    raw_headers,
    reply_body,
    reply_head,
    request_body,
    request_head,
)
from miles_router.engines.json_bytes import MAX_BRACKETS, MAX_COMMAS, MAX_DEPTH
from miles_router.errors import BadRequest, BodyTooLarge
from miles_router.fleet.worker_url import MAX_URL_LENGTH, WorkerUrl, parse_worker_url

SAID: list[tuple[bytes, str]] = [
    (b"/", "/"),
    (b"*", "*"),
    (b"/generate", "/generate"),
    (b"/%67enerat%65", "/generate"),
    (b"/a..b/...", "/a..b/..."),
    (b"/%20/%25", "/ /%"),
    (b"/%2570ause", "/%70ause"),
    (b"/caf%C3%A9/%E6%97%A5", "/café/日"),
    (b"/workers/http%3A%2F%2F10.0.0.7%3A30000", "/workers/http://10.0.0.7:30000"),
    (b"/v1/models/Qwen%2FQwen3-4B", "/v1/models/Qwen/Qwen3-4B"),
]
AMBIGUOUS = {
    "no path": [b"", b"**", b"*?", b"generate", b"?", b"http://host/x"],
    "a control character": [b"/a%0a", b"/a%0D", b"/%00a", b"/a%1f", b"/a%7F", b"/a\n", b"/a%c2%85", b"/a%e2%80%a8"],
    "a direction of text": [b"/a%e2%80%ae"],
    "a slash in disguise": [b"/a%2fb", b"/%2Fa", b"/a%2F", b"/a\\b", b"/a%5cb", b"/%5C", b"/sessions/s%2Fv1/x"],
    "a dot-segment": [b"/.", b"/..", b"/a/..", b"/a/../b", b"/./a", b"/%2e%2e/a", b"/.%2E/a", b"/a/%2e", b"/..;x/a"],
    "an empty segment": [b"//", b"//a", b"/a//", b"/a//b"],
    "no escape": [b"/%", b"/a%2", b"/%zz", b"/%u002f", b"/%%32f"],
    "no UTF-8": [b"/%ff", b"/%c0%af", b"/%e0%80%af", b"/a\xc3\xa9", b"/%ed%a0%80"],
    "a dot-segment in a name": [b"/workers/a%2F..", b"/v1/models/..%2f..%2fflush_cache", b"/v1/models/%2e%2e%2fx"],
    "a slash behind a name": [b"/workers/a%2Fb/c", b"/v1/models/a%2Fb/", b"/x/v1/models/a%2fb", b"/workers%2Fa"],
}


@pytest.mark.parametrize(("raw", "path"), SAID)
def test_a_path_that_says_one_thing_is_decoded(raw: bytes, path: str) -> None:
    assert decode_path(raw) == (path or raw.decode())


@pytest.mark.parametrize("raw", [raw for several in AMBIGUOUS.values() for raw in several])
def test_a_path_that_could_say_two_things_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="path"):
        decode_path(raw)


@given(st.binary(max_size=20).map(lambda tail: b"/" + tail))
def test_whatever_is_decoded_says_one_thing(raw: bytes) -> None:
    try:
        path = decode_path(raw)
    except BadRequest:
        return
    assert path.isprintable()
    assert not {"", ".", ".."} & {*path[1:].split("/")[:-1]}
    assert path.count("/") == raw.partition(b"?")[0].count(b"/")


def test_headers_become_text_and_headers_again_byte_for_byte() -> None:
    pairs = [(b"x-all", bytes(range(256))), (b"x-all", b"")]
    texts = header_texts(pairs)
    assert raw_headers(texts) == pairs
    assert raw_headers(json.loads(json.dumps(texts))) == pairs
    assert raw_headers([("X-Mine", "1")]) == [(b"x-mine", b"1")], "names are lower-cased, as servers give them"


BAD_HEADERS = {
    "a line end": (b"x-a", b"a\r\nx-b: c"),
    "a bare line feed": (b"x-a", b"a\nb"),
    "a zero": (b"x-a", b"a\0b"),
    "a colon in a name": (b"x-a: b", b"c"),
    "no name": (b"", b"c"),
}
bad_headers = pytest.mark.parametrize("header", [*BAD_HEADERS.values()], ids=[*BAD_HEADERS])


def head(headers: RawHeaders, *, status: int = 200) -> tuple[bytes, int, bool]:
    return reply_head(status, headers, method="GET", http_1_0=False, keep_alive=True)


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


def test_chunks_count_before_a_length() -> None:
    """RFC 9112 section 6.3: Transfer-Encoding overrides Content-Length."""
    both = [(b"content-length", b"1"), (b"transfer-encoding", b"Chunked")]
    assert request_body(both) == request_body(both[::-1]) == reply_body(200, both, to_head=False) == CHUNKED


def test_how_bytes_travel_is_not_for_the_app_to_say() -> None:
    data, body, keep_alive = head([(b"Transfer-Encoding", b"gzip"), (b"Connection", b"upgrade"), (b"x-a", b"1")])
    assert data == b"HTTP/1.1 200 OK\r\nx-a: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (body, keep_alive) == (CHUNKED, True)
    assert head([(b"connection", b"Close")])[2] is False


def test_what_is_sent_around_a_body_is_bounded_however_long_the_body_was() -> None:
    excess = ChunkOverhead()
    excess.count_body(10**9)
    excess.count_received(10**9)
    excess.count_received(MAX_EXCESS)
    with pytest.raises(InvalidFraming):
        excess.count_received(1)


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


async def test_a_body_over_the_limit_is_refused_at_the_byte_that_is_too_much() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"12345"}

    with pytest.raises(BodyTooLarge, match="larger than 4 bytes"):
        await Exchange("id", max_body_bytes=4).read(receive)
    assert await Exchange("id", max_body_bytes=5).read(receive) == b"12345"


@pytest.mark.parametrize("given", [b"", b"x" * (MAX_REQUEST_ID_LENGTH + 1), b"caf\xc3\xa9", b"tab\there", b"\x00"])
def test_an_id_that_cannot_be_logged_is_replaced(given: bytes) -> None:
    made = request_id(scope((b"x-request-id", given)))
    assert made.isascii()
    assert made.isprintable()
    assert made.encode() != given


def test_a_parsed_object_can_be_dumped_again_and_not_be_changed() -> None:
    parsed = Exchange("r").loads(b'{"a": {"b": [1]}}')
    assert orjson.dumps(parsed) == b'{"a":{"b":[1]}}'
    for change in (
        lambda: parsed.update(a=1),
        lambda: parsed.pop("a"),
        lambda: parsed.__setitem__("c", 1),
        parsed.clear,
    ):
        with pytest.raises(TypeError):
            change()
    assert parsed == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    ("opens", "inner", "closes"), [(b"[", b"", b"]"), (b'{"a":', b"[]", b"}"), (b'{"a":[', b"1", b"]}")]
)
def test_json_that_could_not_be_written_again_is_refused(opens: bytes, inner: bytes, closes: bytes) -> None:
    levels = opens.count(b"[") + opens.count(b"{")
    fits = (MAX_DEPTH - inner.count(b"[")) // levels
    parsed = Exchange("id").loads(opens * fits + inner + closes * fits)
    orjson.dumps({"as": {"an": {"answer": [{"puts": [parsed]}]}}})
    for deeper in (fits + 1, 254, 10_000):
        with pytest.raises(BadRequest, match=r"nested deeper than 200 levels|not valid JSON"):
            Exchange("id").loads(opens * deeper + inner + closes * deeper)


@pytest.mark.parametrize("one", [b"[]", b"{}", b'"[{"'])
def test_json_with_millions_of_objects_is_refused_before_it_is_parsed(one: bytes) -> None:
    whole = b"[%b0]" % ((one + b",") * (MAX_BRACKETS + 1))
    with pytest.raises(BadRequest, match="2097152 brackets"):
        Exchange("id").loads(whole)


def test_json_with_very_many_values_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadRequest, match="16777216 commas"):
        Exchange("id").loads(b"[%b7]" % (b"7," * (MAX_COMMAS + 1)))


@pytest.mark.parametrize(
    ("text", "url", "host", "port", "authority", "prefix"),
    [
        ("https://a:443", "https://a", "a", 443, b"a", b""),
        ("http://a:1/p/q//", "http://a:1/p/q", "a", 1, b"a:1", b"/p/q"),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]", "2001:db8::1", 80, b"[2001:db8::1]", b""),
        ("http://a:", "http://a", "a", 80, b"a", b""),
    ],
)
def test_the_normal_form_has_one_spelling(
    text: str, url: str, host: str, port: int, authority: bytes, prefix: bytes
) -> None:
    parsed = parse_worker_url(text)
    assert (parsed.url, parsed.host, parsed.port) == (url, host, port)
    assert (parsed.authority, parsed.prefix, parsed.tls) == (authority, prefix, url.startswith("https"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "non-empty string"),
        ("", "non-empty string"),
        ("a:1", "http:// or https://"),
        ("ftp://a", "http:// or https://"),
        ("http://", "name a host"),
        ("http://a:x", "malformed"),
        ("http://a:65536", "malformed"),
        ("http://a:0", "port 0"),
        ("http://[::1", "malformed"),
        ("http://user@a", "credentials"),
        ("http://a?x", "query"),
        ("http://a#f", "fragment"),
        ("http://a b", "printable ASCII"),
        ("http://a\nHost: b", "printable ASCII"),
        ("http://caf\xe9", "printable ASCII"),
        ('http://a"b', "printable ASCII"),
        ("http://" + "a" * MAX_URL_LENGTH, "at most"),
        ("http://a..b", "invalid host name"),
        ("http://" + "a" * 64, "invalid host name"),
    ],
)
def test_what_is_no_address_is_refused_with_a_reason(text: object, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_worker_url(text)


@given(st.text(max_size=60) | st.text("aZ9.:/[]@?#%-_ \n", max_size=30))
def test_any_text_is_either_an_address_or_a_bad_request(text: str) -> None:
    for candidate in (text, "http://" + text):
        try:
            parsed = parse_worker_url(candidate)
        except BadRequest:
            continue
        assert isinstance(parsed, WorkerUrl)
        assert 0 < parsed.port < 65536
        assert parsed.host.encode("idna")
        assert not set(parsed.authority + parsed.prefix) & set(b" \r\n")
