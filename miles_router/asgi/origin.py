"""Under which address clients reach the router, and whether a request comes from a web page of somebody else. Pure."""

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
#: What browsers say of a request that another site's page makes (W3C Fetch Metadata).
FROM_ELSEWHERE = frozenset({b"cross-site", b"same-site"})


def base_url(scope: Mapping[str, Any], public_url: str | None) -> str:
    """The router's address as this client knows it, without a slash at its end: the public one if there is one, else
    that of the `Host` header, else that of the connection.

    Raises:
        BadRequest: `Host` is no clean authority. An agent that is given a wrong address would talk to somebody else.
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


def refuse_foreign(scope: Mapping[str, Any], allowed: Collection[str], public_url: str | None) -> None:
    """Keep web pages of other origins to the `allowed` methods where no key keeps them out: a browser sends what any
    page wants sent, and says only whose wish it was.

    Raises:
        ForeignOrigin: one of them wants something else.
    """
    if scope["method"] in allowed:
        return
    wishes = [pair for pair in scope["headers"] if pair[0] == b"origin" or pair[0] == b"sec-fetch-site"]
    if not wishes:
        return
    ours = {_authority(f"http://{value.decode('latin-1')}") for name, value in scope["headers"] if name == b"host"}
    if public_url is not None:
        ours.add(_authority(public_url))
    for name, value in wishes:
        foreign = _authority(value.decode("latin-1")) not in ours if name == b"origin" else value in FROM_ELSEWHERE
        if foreign:
            raise ForeignOrigin("a web page of another origin may not do this where no key is set")


def _is_authority(text: str) -> bool:
    match = AUTHORITY.fullmatch(text)
    return match is not None and (match[4] is None or 0 < int(match[4]) <= MAX_PORT)


def _authority(url: str) -> str:
    """The host and port of an origin, without the port that its scheme has anyway."""
    scheme, _, rest = url.lower().partition("://")
    return rest.partition("/")[0].removesuffix(DEFAULT_PORTS.get(scheme, ":"))
