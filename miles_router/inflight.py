"""The requests that are being answered now, so that an abort finds the one it means. Pure.

Bodies are not parsed on their way: an abort looks for its `rid` among the bodies in flight, and pays for that itself.
"""

from __future__ import annotations

import orjson

from miles_router.errors import BadRequest
from miles_router.exchange import Exchange


class InFlight:
    """Exchanges by identity, each for as long as some layer holds it."""

    def __init__(self) -> None:
        self._bodies: dict[Exchange, bytes] = {}
        self._holders: dict[Exchange, int] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def enter(self, exchange: Exchange, body: bytes) -> None:
        """A layer begins to answer a request; the body is the one it sends, for those who look for an id in it."""
        self._bodies[exchange] = body
        self._holders[exchange] = self._holders.get(exchange, 0) + 1

    def leave(self, exchange: Exchange) -> None:
        """It is done with it."""
        self._holders[exchange] -= 1
        if not self._holders[exchange]:
            del self._holders[exchange], self._bodies[exchange]

    def abort(self, rid: str | None) -> list[Exchange]:
        """Mark the requests that an abort means (all for None), so that nothing carries them on; give them.

        SGLang aborts every request whose id begins with `rid`, on workers where a request has exactly this id, and so
        does this.
        """
        found = list(self._bodies) if rid is None else self._meant(rid)
        for exchange in found:
            exchange.aborted = True
        return found

    def _meant(self, rid: str) -> list[Exchange]:
        ids = {exchange: _ids(exchange, body, rid) for exchange, body in self._bodies.items()}
        where = {exchange.worker_url for exchange, own in ids.items() if rid in own}
        return [
            exchange
            for exchange, own in ids.items()
            if exchange.worker_url in where and any(each.startswith(rid) for each in own)
        ]


def _ids(exchange: Exchange, body: bytes, rid: str) -> set[str]:
    """The ids of a request's generations; those in its body only if `rid` could be one of them."""
    if orjson.dumps(rid)[:-1] not in body:
        return exchange.rids
    try:
        own = exchange.loads(body).get("rid")
    except (AttributeError, BadRequest):
        return exchange.rids
    return exchange.rids | {each for each in (own if isinstance(own, list) else [own]) if isinstance(each, str)}
