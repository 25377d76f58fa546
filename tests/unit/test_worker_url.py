"""A worker's address in one normal form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.errors import BadRequest
from miles_router.fleet.worker_url import MAX_URL_LENGTH, WorkerUrl, parse_worker_url


@pytest.mark.parametrize(
    ("text", "url", "host", "port", "authority", "prefix"),
    [
        ("http://a:1", "http://a:1", "a", 1, b"a:1", b""),
        ("http://a", "http://a", "a", 80, b"a", b""),
        ("http://a:80/", "http://a", "a", 80, b"a", b""),
        ("https://a", "https://a", "a", 443, b"a", b""),
        ("https://a:443", "https://a", "a", 443, b"a", b""),
        ("https://a:80", "https://a:80", "a", 80, b"a:80", b""),
        ("HTTP://A.Example:8000", "http://a.example:8000", "a.example", 8000, b"a.example:8000", b""),
        ("http://a:1/p/q//", "http://a:1/p/q", "a", 1, b"a:1", b"/p/q"),
        ("http://a:1/P%2fq", "http://a:1/P%2fq", "a", 1, b"a:1", b"/P%2fq"),
        ("http://10.0.0.7:65535", "http://10.0.0.7:65535", "10.0.0.7", 65535, b"10.0.0.7:65535", b""),
        ("http://[::1]:1", "http://[::1]:1", "::1", 1, b"[::1]:1", b""),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]", "2001:db8::1", 80, b"[2001:db8::1]", b""),
        ("\thttp://a:1\n", "http://a:1", "a", 1, b"a:1", b""),
        ("http://a:", "http://a", "a", 80, b"a", b""),
        ("http://a.:1", "http://a.:1", "a.", 1, b"a.:1", b""),
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
        (7, "non-empty string"),
        (["http://a"], "non-empty string"),
        ("", "non-empty string"),
        ("  ", "non-empty string"),
        ("a:1", "http:// or https://"),
        ("//a:1", "http:// or https://"),
        ("ftp://a", "http:// or https://"),
        ("grpc://a:1", "http:// or https://"),
        ("http://", "name a host"),
        ("http:///path", "name a host"),
        ("http://:1", "name a host"),
        ("http://a:x", "malformed"),
        ("http://a:-1", "malformed"),
        ("http://a:65536", "malformed"),
        ("http://a:0", "port 0"),
        ("http://[::1", "malformed"),
        ("http://user@a", "credentials"),
        ("http://:pass@a", "credentials"),
        ("http://a?x", "query"),
        ("http://a/p?x=1", "query"),
        ("http://a#f", "fragment"),
        ("http://a b", "printable ASCII"),
        ("http://a\nHost: b", "printable ASCII"),
        ("http://a\x7f", "printable ASCII"),
        ("http://caf\xe9", "printable ASCII"),
        ('http://a"b', "printable ASCII"),
        ("http://a\\b", "printable ASCII"),
        ("http://" + "a" * MAX_URL_LENGTH, "at most"),
        ("http://a..b", "invalid host name"),
        ("http://.a", "invalid host name"),
        ("http://" + "a" * 64, "invalid host name"),
    ],
)
def test_what_is_no_address_is_refused_with_a_reason(text: object, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_worker_url(text)


def test_a_label_of_63_characters_is_a_host() -> None:
    assert parse_worker_url("http://" + "a" * 63).host == "a" * 63


def test_the_id_is_short_stable_and_differs_between_workers() -> None:
    one, again, two = (parse_worker_url(url) for url in ("http://a:1", "HTTP://A:1/", "http://a:2"))
    assert one.id == again.id != two.id
    assert len(one.id) == 12
    assert one.id.isalnum()


HOSTS = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?(\.[A-Za-z0-9]{1,10}){0,3}", fullmatch=True)
URLS = st.builds(
    lambda scheme, host, port, path, slashes: f"{scheme}://{host}{port}{path}{slashes}",
    st.sampled_from(["http", "https", "HTTP", "Https"]),
    HOSTS,
    st.one_of(st.just(""), st.integers(1, 65535).map(lambda port: f":{port}")),
    st.from_regex(r"(/[a-z0-9._~%-]{1,8}){0,3}", fullmatch=True),
    st.sampled_from(["", "/", "//"]),
)


@given(URLS)
def test_parsing_the_normal_form_changes_nothing(text: str) -> None:
    once = parse_worker_url(text)
    assert parse_worker_url(once.url) == once


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
