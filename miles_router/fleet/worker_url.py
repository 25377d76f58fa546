"""The address of a worker, parsed and brought into one normal form, so that a worker has exactly one name. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import SplitResult, urlsplit

from miles_router.errors import BadRequest

MAX_URL_LENGTH = 2048
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class WorkerUrl:
    """An address in normal form. `prefix` is the path before every request path, without a trailing slash."""

    url: str
    host: str
    port: int
    tls: bool
    prefix: bytes
    authority: bytes

    @cached_property
    def id(self) -> str:
        """A short name for use in paths, the same in every router."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:12]


def parse_worker_url(text: object) -> WorkerUrl:
    """Parse `http[s]://host[:port][/prefix]`; lower-case scheme and host, drop a default port and the trailing slash.

    Raises:
        BadRequest: the text is not such a URL, or contains credentials, a query or a fragment: the router sends none.
    """
    if not isinstance(text, str) or not text.strip():
        raise BadRequest("url must be a non-empty string such as http://10.0.0.7:30000")
    text = text.strip()
    if len(text) > MAX_URL_LENGTH or not text.isascii() or any(c <= " " or c in '"<>\\^`{|}\x7f' for c in text):
        raise BadRequest("url must be printable ASCII without spaces, at most 2048 characters")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"url {text!r} is malformed: {error}") from None
    return _normal_form(text, parts, port)


def _normal_form(text: str, parts: SplitResult, port: int | None) -> WorkerUrl:
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise BadRequest(f"url {text!r} must start with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise BadRequest("url must not carry credentials, a query or a fragment")
    if port == 0:
        raise BadRequest(f"url {text!r} has port 0")
    host = parts.hostname
    if ":" not in host and not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise BadRequest(f"url {text!r} has an invalid host name")
    shown_host = f"[{host}]" if ":" in host else host
    default = DEFAULT_PORTS[parts.scheme]
    authority = shown_host if port in (None, default) else f"{shown_host}:{port}"
    prefix = parts.path.rstrip("/")
    return WorkerUrl(
        url=f"{parts.scheme}://{authority}{prefix}",
        host=host,
        port=port or default,
        tls=parts.scheme == "https",
        prefix=prefix.encode(),
        authority=authority.encode(),
    )
