"""API keys and admin keys of the router, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from miles_router.asgi.headers import RawHeaders
from miles_router.errors import Unauthorized

#: The headers that contain a key: OpenAI and SGLang use `Authorization`, Anthropic uses `X-Api-Key`.
BEARER, X_API_KEY = b"authorization", b"x-api-key"
#: Prefix of the headers with which SGLang's own gateway overrides ids, ranks, priority and hosts (SGLang 0.5.23).
OVERRIDE = b"x-override-"


class Key:
    """A set of accepted keys for one part of the router. Without any, the part needs no key."""

    __slots__ = ("_accepted", "name", "required")

    def __init__(self, *accepted: str, name: str = "api key") -> None:
        self.required = bool(accepted)
        self.name = name
        self._accepted = [each.encode("ascii") for each in accepted]

    def matches(self, credential: bytes) -> bool:
        """Return True if `credential` is an accepted key."""
        # A list, not `any`: every key is compared, so the time does not show which one matched.
        return True in [hmac.compare_digest(credential, each) for each in self._accepted]


class Keys:
    """The client keys and admin keys of one router.

    Without admin keys, the client keys are also the admin keys. So administration is never more open than the data
    plane.
    """

    def __init__(self, data: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        own = tuple(admin)
        self.data = Key(*data)
        self.admin = Key(*own, name="admin key") if own else self.data
        self.no_key = Key()

    def authorize(self, key: Key, headers: RawHeaders, also: Key | None = None) -> RawHeaders:
        """Check the request's keys against `key`, and return the headers for layers and workers.

        The returned headers contain none of the router's keys. They contain `x-override-*` headers only if the request
        has a valid admin key.

        Args:
            also: further keys that are accepted for this path.

        Raises:
            Unauthorized: a key is required, and the request contains no valid one.
        """
        administers = False
        if self.admin.required or also is not None:
            entered, ours = not key.required, []
            for pair in [pair for pair in headers if pair[0] == BEARER or pair[0] == X_API_KEY]:
                credential = _credential(*pair)
                by_data, by_admin = self.data.matches(credential), self.admin.matches(credential)
                by_own = also is not None and also.matches(credential)
                if by_data or by_admin or by_own:
                    ours.append(pair)
                administers = administers or by_admin
                entered = entered or by_own or (by_admin if key is self.admin else by_data)
            if not entered:
                raise Unauthorized(f"a valid {key.name} is required: Authorization: Bearer KEY")
            if ours:
                headers = [pair for pair in headers if pair not in ours]
        for name, _ in () if administers else headers:
            if name.startswith(OVERRIDE):
                return [pair for pair in headers if not pair[0].startswith(OVERRIDE)]
        return headers


def _credential(name: bytes, value: bytes) -> bytes:
    """Return the credential in a header's value, or b""."""
    if name == X_API_KEY:
        return value
    scheme, _, credential = value.partition(b" ")
    return credential.strip() if scheme.lower() == b"bearer" else b""
