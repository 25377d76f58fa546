"""Decoding of request paths. The router decides on the decoded path; workers get the original bytes. No I/O.

Ambiguous paths are refused. The engine (Starlette's routes), a proxy that merges `//` or resolves `..`, and the router
could otherwise read different paths from the same bytes (RFC 3986 sections 3.3 and 6.2.2).
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from miles_router.errors import BadRequest

#: A path that is decoded already: its characters need no escape (RFC 3986 `pchar`), and no segment begins with a dot.
PLAIN = re.compile(rb"/|(?:/[A-Za-z0-9_~!$&'()*+,;=:@-][A-Za-z0-9._~!$&'()*+,;=:@-]*)+/?")
#: Parents of a last segment that may contain escaped slashes: a worker's URL, or a model name such as `org/model`.
BEFORE_NAMES = re.compile(rb"(/models/[^/]+)?(/workers|(/sessions/[^/]+)?/v1/models)")
BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def decode_path(raw: bytes) -> str:
    """Return the decoded path.

    Raises:
        BadRequest: the path contains a control character, an escaped slash, a backslash, a dot-segment, an empty
            segment, or an escape that is malformed or not UTF-8.
    """
    return raw.decode("ascii") if PLAIN.fullmatch(raw) else _decode_unusual(raw)


def _decode_unusual(raw: bytes) -> str:
    if raw == b"*":  # `OPTIONS *` asks about the whole server
        return "*"
    spelled = raw.partition(b"?")[0]  # an empty query is kept with the path, so a `?` may end it
    if not spelled.startswith(b"/") or b"//" in spelled:
        raise BadRequest("the path must begin with one slash and have no empty segment")
    if not spelled.isascii() or BROKEN_ESCAPE.search(spelled):
        raise BadRequest("the path has a % that does not begin an escape, or a character that must be escaped")
    try:
        path = unquote_to_bytes(spelled).decode()
    except UnicodeDecodeError:
        raise BadRequest("the path's escapes are not UTF-8") from None
    if not path.isprintable() or "\\" in path:
        raise BadRequest("the path has a control character or a backslash")
    parent, _, name = spelled.rpartition(b"/")
    if b"%2f" in (parent if name and BEFORE_NAMES.fullmatch(parent) else spelled).lower():
        raise BadRequest("the path has an escaped slash")
    if any(segment.partition(";")[0] in (".", "..") for segment in path.split("/")):
        raise BadRequest("the path has a dot-segment")
    return path
