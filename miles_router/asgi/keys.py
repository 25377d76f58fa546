"""Who may do what: one key for the data plane, one for administration, compared in constant time."""

from __future__ import annotations

import hmac

from miles_router.asgi.exchange import Scope
from miles_router.errors import Unauthorized

#: Where clients put keys: OpenAI's and SGLang's way, and Anthropic's.
BEARER, X_API_KEY = b"authorization", b"x-api-key"


class Key:
    """One key to a part of the router; without a value everybody may enter."""

    __slots__ = ("_expected", "required")

    def __init__(self, value: str | None) -> None:
        self.required = value is not None
        self._expected = (value or "").encode("ascii")

    def check(self, scope: Scope) -> Scope:
        """The scope without the credential that opened this door: a worker has no business with the router's key.

        Raises:
            Unauthorized: a key is required and none that fits came.
        """
        if not self.required:
            return scope
        kept = [pair for pair in scope["headers"] if not self._fits(*pair)]
        if len(kept) == len(scope["headers"]):
            raise Unauthorized("a valid api key is required: Authorization: Bearer KEY")
        scope["headers"] = kept
        return scope

    def _fits(self, name: bytes, value: bytes) -> bool:
        if name == BEARER:
            scheme, _, credential = value.partition(b" ")
            return scheme.lower() == b"bearer" and hmac.compare_digest(credential.strip(), self._expected)
        return name == X_API_KEY and hmac.compare_digest(value, self._expected)
