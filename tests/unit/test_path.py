"""A path is decoded once, and what could be understood in two ways is refused."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.asgi.path import decode_path
from miles_router.errors import BadRequest

SAID: list[tuple[bytes, str]] = [
    (b"/", "/"),
    (b"*", "*"),
    (b"/generate", "/generate"),
    (b"/generate?", "/generate"),
    (b"/%67enerat%65", "/generate"),
    (b"/trailing/", "/trailing/"),
    (b"/v1.5/.well-known/x", "/v1.5/.well-known/x"),
    (b"/a..b/...", "/a..b/..."),
    (b"/%20/%25", "/ /%"),
    (b"/%2570ause", "/%70ause"),
    (b"/caf%C3%A9/%E6%97%A5", "/café/日"),
    (b"/semi;a=1;b=2/comma,colon:at@dollar$and&plus+star*bang!tilde~paren()quote'", ""),
    (b"/workers/http%3A%2F%2F10.0.0.7%3A30000", "/workers/http://10.0.0.7:30000"),
    (b"/v1/models/Qwen%2FQwen3-4B", "/v1/models/Qwen/Qwen3-4B"),
    (b"/sessions/s/v1/models/Qwen%2fQwen3-4B", "/sessions/s/v1/models/Qwen/Qwen3-4B"),
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


@given(st.lists(st.text("abz%.~ é日;:@?#[]", min_size=1, max_size=6).filter(lambda s: s.strip(".")), max_size=4))
def test_a_path_that_was_spelled_out_is_itself_again(segments: list[str]) -> None:
    path = "/" + "/".join(segment for segment in segments if segment.partition(";")[0] not in (".", ".."))
    assert decode_path(quote(path).encode()) == path
    everything = "".join("/" if each == "/" else "".join(f"%{byte:02x}" for byte in each.encode()) for each in path)
    assert decode_path(everything.encode()) == path


@given(st.binary(max_size=20).map(lambda tail: b"/" + tail))
def test_whatever_is_decoded_says_one_thing(raw: bytes) -> None:
    try:
        path = decode_path(raw)
    except BadRequest:
        return
    assert path.isprintable()
    assert not {"", ".", ".."} & {*path[1:].split("/")[:-1]}
    assert path.count("/") == raw.partition(b"?")[0].count(b"/")
