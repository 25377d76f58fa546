"""The router's address as clients see it, and a check for requests from web pages of other origins. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from miles_router.asgi.headers import first_header
from miles_router.errors import BadRequest, ForeignOrigin

#: `host[:port]` (RFC 9110 section 7.2), without user information and escapes.
AUTHORITY = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,253})|\[[0-9A-Fa-f:.]{2,45}\])(:([0-9]{1,5}))?")
MAX_PORT = 65535
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: Values of `Sec-Fetch-Site` for requests from pages of other origins (W3C Fetch Metadata).
FROM_ELSEWHERE = frozenset({b"cross-site", b"same-site"})


def base_url(scope: Mapping[str, Any], public_url: str | None) -> str:
    """Return the router's address for this client, without a trailing slash.

    It is `public_url` if set, else built from the `Host` header, else from the connection.

    Raises:
        BadRequest: `Host` is not `host[:port]`. A wrong address would send the agent to another server.
    """
    if public_url is not None:
        return public_url.rstrip("/")
    host = first_header(scope["headers"], b"host")
    if host:
        authority = host.decode("latin-1")
        if not _is_authority(authority):
            raise BadRequest("the Host header must be a host and an optional port; or set --public-url")
        return f"{scope['scheme']}://{authority}"
    address, port = scope["server"]
    return f"{scope['scheme']}://{f'[{address}]' if ':' in address else address}:{port}"


def check_origin(scope: Mapping[str, Any], allowed: Collection[str], public_url: str | None) -> None:
    """Restrict web pages of other origins to the `allowed` methods. Call it where no key is required.

    A browser sends the requests of any page, also to a local router, and only marks their origin in headers.

    Raises:
        ForeignOrigin: a page of another origin uses another method.
    """
    if scope["method"] in allowed:
        return
    origin_headers = [pair for pair in scope["headers"] if pair[0] == b"origin" or pair[0] == b"sec-fetch-site"]
    if not origin_headers:
        return
    ours = {_authority(f"http://{value.decode('latin-1')}") for name, value in scope["headers"] if name == b"host"}
    if public_url is not None:
        ours.add(_authority(public_url))
    for name, value in origin_headers:
        foreign = _authority(value.decode("latin-1")) not in ours if name == b"origin" else value in FROM_ELSEWHERE
        if foreign:
            raise ForeignOrigin("a web page of another origin may not do this while the router has no API key")


def _is_authority(text: str) -> bool:
    match = AUTHORITY.fullmatch(text)
    return match is not None and (match[4] is None or 0 < int(match[4]) <= MAX_PORT)


def _authority(url: str) -> str:
    """Return host and port of a URL; the scheme's default port is left out."""
    scheme, _, rest = url.lower().partition("://")
    return rest.partition("/")[0].removesuffix(DEFAULT_PORTS.get(scheme, ":"))
