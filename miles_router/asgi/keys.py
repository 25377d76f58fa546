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

    __slots__ = ("_accepted", "name", "required")

    def __init__(self, *accepted: str, name: str = "api key") -> None:
        self.required = bool(accepted)
        self.name = name
        self._accepted = [each.encode("ascii") for each in accepted]

    def fits(self, credential: bytes) -> bool:
        """Whether it is one of them."""
        return True in [hmac.compare_digest(credential, each) for each in self._accepted]  # all, whichever it is


class Keys:
    """All keys of one router: those of clients, and those of administration, which are the clients' where it has none
    of its own. Administration is never more open than the data plane."""

    def __init__(self, data: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        own = tuple(admin)
        self.data = Key(*data)
        self.admin = Key(*own, name="admin key") if own else self.data
        self.everybody = Key()

    def enter(self, key: Key, headers: RawHeaders, also: Key | None = None) -> RawHeaders:
        """Enter where `key` is required; `also` opens this one path as well. Gives what layers and workers see of the
        headers: none of the router's keys, and nothing that begins with `OVERRIDE` unless a key of administration came.

        Raises:
            Unauthorized: a key is required here and none that fits came.
        """
        administers = False
        if self.admin.required or also is not None:
            entered, ours = not key.required, []
            for pair in [pair for pair in headers if pair[0] == BEARER or pair[0] == X_API_KEY]:
                credential = _credential(*pair)
                by_data, by_admin = self.data.fits(credential), self.admin.fits(credential)
                by_own = also is not None and also.fits(credential)
                if by_data or by_admin or by_own:
                    ours.append(pair)
                administers = administers or by_admin
                entered = entered or by_own or (by_admin if key is self.admin else by_data)
            if not entered:
                raise Unauthorized(f"a valid {key.name} is required: Authorization: Bearer KEY")
            if ours:
                headers = [pair for pair in headers if pair not in ours]
        if administers or not [name for name, _ in headers if name.startswith(OVERRIDE)]:  # faster than `any`
            return headers
        return [pair for pair in headers if not pair[0].startswith(OVERRIDE)]


def _credential(name: bytes, value: bytes) -> bytes:
    """What a header shows in place of a key; nothing where it shows none."""
    if name == X_API_KEY:
        return value
    scheme, _, credential = value.partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""
