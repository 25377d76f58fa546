"""Collect the rows (routed experts and the like) of a choice that is sampled in several attempts.

Each attempt asks the engine only for the rows that are still missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.rows import ROW_FIELDS, decode_rows
from miles_router.errors import RouterError
from miles_router.middlewares import Exchange
from miles_router.middlewares.generation import CannotResume, EngineQuestions
from miles_router.middlewares.rows import RowChannel, RowDeliveries, RowDelivery, RowPrefix, RowsByKind
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import AlignedRows, RowArray, RowKind


@dataclass(frozen=True)
class _HeldRows:
    """Rows that were checked attempt by attempt, in the form that `RowDelivery.unchecked` needs."""

    rows: AlignedRows

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        """Return the rows of the first `tokens` tokens but the last, which has none."""
        held, count = self.rows, tokens - 1
        if len(held) == count:
            return held
        return AlignedRows(held.array(count, count), held.kind, start=count, parent=held)


class CarriedRows:
    """The rows of one choice.

    Args:
        deliveries: the deliveries of the whole turn; they have the rows of the first attempt, and get all rows.
        tokens: the number of tokens of the prompt and the first attempt.
        rid: the engine's name for the choice.
    """

    def __init__(self, deliveries: RowDeliveries, index: int, tokens: int, rid: str | None) -> None:
        self._deliveries = deliveries
        self._index = index
        self._rid = rid
        self._held: dict[RowKind, AlignedRows] = {}
        self._attempts = RowDeliveries({kind: RowDelivery(kind) for kind in deliveries})
        self._note(deliveries.take(index, tokens, rid))

    def attached_to(self, exchange: Exchange) -> AbstractContextManager[None]:
        """Attach the row deliveries of the resumed attempts to this exchange, inside the returned context."""
        return self._attempts.attached_to(exchange)

    def renew(self) -> None:
        """Set the prefix of the next attempt to the rows received so far, some of which may have been dropped since."""
        for kind, delivery in self._attempts.items():
            delivery.prefixes = [self._prefix(kind)]

    def take(self, tokens: int) -> None:
        """Take the rows of an attempt.

        Args:
            tokens: the number of tokens after the attempt, including the prompt.
        """
        self._note(self._attempts.take(0, tokens, self._rid))

    async def ask(self, questions: EngineQuestions, channels: Mapping[RowKind, RowChannel], ids: Sequence[int]) -> None:
        """Ask an engine to compute the missing rows of these ids, such as rows that a lost worker did not return."""
        for kind, delivery in self._attempts.items():
            prefix, hold = self._prefix(kind), channels[kind].hold
            start = 0 if prefix is None else prefix.count
            if hold is None or start >= len(ids) - 1:
                continue
            try:
                encoded = await questions.rows(ROW_FIELDS[kind], ids, start, questions.exchange.adapter)
                own = _read(encoded, kind, len(ids) - 1 - start)
                self._held[kind] = hold(own, start, None if prefix is None else prefix.rows, self._rid)
            except (CannotResume, UnreadableAnswer, InvalidTrajectory, RouterError) as error:
                delivery.missing = str(error)

    def deliver(self, tokens: int) -> None:
        """Put the rows of the choice into the turn's deliveries, or the reason why some are missing.

        Args:
            tokens: the number of tokens of the choice, including the prompt.
        """
        for kind, delivery in self._deliveries.items():
            held = self._held.get(kind)
            if held is not None and len(held) >= tokens - 1:
                delivery.unchecked[self._index] = _HeldRows(held)
            else:
                delivery.missing = self._attempts[kind].missing or delivery.missing

    def _note(self, rows: RowsByKind) -> None:
        self._held |= {kind: found.rows for kind, found in rows.items() if found.rows is not None}

    def _prefix(self, kind: RowKind) -> RowPrefix | None:
        held = self._held.get(kind)
        if held is not None and (prefix := RowPrefix.of(held, len(held))) is not None:
            return prefix
        return self._deliveries[kind].prefix_for(self._index)


def _read(encoded: str, kind: RowKind, count: int) -> RowArray:
    """Decode `count` rows from base64 into the smallest type of the kind that holds their values.

    Raises:
        UnreadableAnswer: the data is not `count` rows of valid ids.
    """
    raw = decode_rows(encoded)
    data = np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")
    if (
        len(raw) % 4
        or not len(data)
        or len(data) % count
        or data.min() < kind.least
        or data.max() > np.iinfo(kind.types[-1]).max
    ):
        raise UnreadableAnswer("incomplete", f"{len(data)} ids do not make {count} valid rows")
    fits = next(each for each in kind.types if data.max() <= np.iinfo(each).max)
    return data.reshape(count, -1).astype(fits)
