"""The router's keys: who may enter a part of it, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from miles_router.asgi.headers import RawHeaders
from miles_router.errors import Unauthorized

#: Where clients put keys: OpenAI's and SGLang's way, and Anthropic's.
BEARER, X_API_KEY = b"authorization", b"x-api-key"
#: Begins headers by which SGLang 0.5.23 is told what its own gateway decides: ids, ranks, priority, other hosts.
OVERRIDE = b"x-override-"


class Key:
    """The keys that open one part of the router, each of them alone; without any, everybody may enter."""

    __slots__ = ("_accepted", "_name", "required")

    def __init__(self, *accepted: str, name: str = "api key") -> None:
        self.required = bool(accepted)
        self._name = name
        self._accepted = [each.encode("ascii") for each in accepted]

    def opens(self, headers: RawHeaders) -> bool:
        """Whether one of them comes with these headers."""
        return any(self.fits(*pair) for pair in headers)

    def check(self, headers: RawHeaders) -> None:
        """Let pass who may enter.

        Raises:
            Unauthorized: a key is required and none that fits came.
        """
        if self.required and not self.opens(headers):
            raise Unauthorized(f"a valid {self._name} is required: Authorization: Bearer KEY")

    def fits(self, name: bytes, value: bytes) -> bool:
        """Whether a header is one of them."""
        if name == BEARER:
            scheme, _, value = value.partition(b" ")
            value = value.strip() if scheme.lower() == b"bearer" else b""
        elif name != X_API_KEY:
            return False
        matches = [hmac.compare_digest(value, each) for each in self._accepted]  # all, whichever it is
        return True in matches


class Keys:
    """All keys of one router: those of clients, and those of administration, which are the clients' where it has none
    of its own. Administration is never more open than the data plane."""

    def __init__(self, data: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        own = tuple(admin)
        self.data = Key(*data)
        self.admin = Key(*own, name="admin key") if own else self.data
        self.everybody = Key()

    def passed_on(self, headers: RawHeaders) -> RawHeaders:
        """What layers and workers see of a request's headers: none of the router's keys, and nothing that begins with
        `OVERRIDE` unless a key of administration came."""
        administers = self.admin.required and self.admin.opens(headers)
        if self.admin.required:
            headers = [pair for pair in headers if not (self.data.fits(*pair) or self.admin.fits(*pair))]
        if administers or not [name for name, _ in headers if name.startswith(OVERRIDE)]:  # faster than `any`
            return headers
        return [pair for pair in headers if not pair[0].startswith(OVERRIDE)]
