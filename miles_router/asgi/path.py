"""A request's path, decoded once. Everybody decides on this form; a worker gets the path as it was spelled. Pure.

What two readers could understand in two ways is refused: an engine (Starlette's routes), a proxy that joins `//` or
walks `..`, and we would otherwise each see another path (RFC 3986 sections 3.3 and 6.2.2).
"""

from __future__ import annotations

import re
import string
from urllib.parse import unquote_to_bytes

from miles_router.errors import BadRequest

#: What stands for itself in a path (RFC 3986 `pchar` and `/`).
PLAIN = (string.ascii_letters + string.digits + "-._~!$&'()*+,;=:@/").encode()
#: What follows these is one name, which may have a slash: a worker's URL, a model of some hub.
BEFORE_NAMES = re.compile(rb"/workers|(/sessions/[^/]+)?/v1/models")
BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def decoded(raw: bytes) -> str:
    """The path that `raw` spells.

    Raises:
        BadRequest: a control character, a slash or backslash in disguise, a dot-segment, an empty segment, or an escape
            that is none or not UTF-8.
    """
    if raw.translate(None, PLAIN) or b"/." in raw or b"//" in raw or raw[:1] != b"/":
        return _decoded_with_care(raw)
    return raw.decode("ascii")


def _decoded_with_care(raw: bytes) -> str:
    if raw == b"*":  # `OPTIONS *`, the server as a whole
        return "*"
    spelled = raw.partition(b"?")[0]  # a query without a character stands with the path
    if not spelled.startswith(b"/") or b"//" in spelled:
        raise BadRequest("the path must begin with one slash and have no empty segment")
    if not spelled.isascii() or BROKEN_ESCAPE.search(spelled):
        raise BadRequest("the path has a % that begins no escape, or a character that must be escaped")
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
