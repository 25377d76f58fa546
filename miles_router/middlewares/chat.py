"""How a layer that records chat turns says that a turn is one: what a pause or the loss of a worker cuts is then
carried on inside, and the layer sees a single answer.

    outer layer    ChatTurn(parsers).left_on(exchange)   ──►  the engine is asked as often as it takes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from miles_router.asgi.exchange import Exchange
from miles_router.engines.parsers import Parsers
from miles_router.trajectory.pieces import VersionRun

NOTE = "miles_router.middlewares.chat"


class KnownVersions(NamedTuple):
    """The weight versions that sampled a choice. `by_engine`: all of them are the engines' own word."""

    runs: Sequence[VersionRun]
    by_engine: bool


@dataclass
class ChatTurn:
    """One request of `/v1/chat/completions` that asks for all that recording it needs: logprobs, and `return_meta_info`
    or, of a stream, its ids.

    Attributes:
        parsers: what makes a message of an answer that came in parts.
        ids: gives the ids of tokens that spell some bytes each, or None where that is not certain: a stream tells its
            ids at its end, and one whose worker is lost has none.
        carried: the choices of a stream that are carried on from here on, by their indices: their chunks are no
            engine's any more, and show no call that was not sampled.
        versions: of each of them, at the end: chunks do not tell them.
    """

    parsers: Parsers = field(default_factory=Parsers)
    ids: Callable[[Sequence[bytes]], Awaitable[list[int] | None]] | None = None
    carried: set[int] = field(default_factory=set)
    versions: dict[int, KnownVersions] = field(default_factory=dict)

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
