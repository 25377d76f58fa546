"""How a layer that records chat turns says that a turn is one: what a pause or the loss of a worker cuts is then
carried on inside, and the layer sees a single answer.

    outer layer    ChatTurn(parsers).left_on(exchange)   ──►  the engine is asked as often as it takes
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from miles_router.asgi.exchange import Exchange
from miles_router.engines.parsers import Parsers

NOTE = "miles_router.middlewares.chat"


@dataclass(frozen=True)
class ChatTurn:
    """One request of `/v1/chat/completions` that asks for all that recording it needs: logprobs, and `return_meta_info`
    or, of a stream, its ids.

    Attributes:
        parsers: what makes a message of an answer that came in parts.
    """

    parsers: Parsers = field(default_factory=Parsers)

    @contextmanager
    def left_on(self, exchange: Exchange) -> Iterator[None]:
        """While the inner app is called."""
        exchange.notes[NOTE] = self
        try:
            yield
        finally:
            del exchange.notes[NOTE]

    @classmethod
    def of(cls, exchange: Exchange) -> ChatTurn | None:
        """The one that a layer has left, if one has."""
        turn: ChatTurn | None = exchange.notes.get(NOTE)
        return turn
