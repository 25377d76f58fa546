"""One request's expert ids: from what was asked and what was extracted to rows that are held."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from middleware_hub.routed_experts.asking import Asked
from middleware_hub.routed_experts.decoding import Decoder
from middleware_hub.routed_experts.errors import ExpertsMissing
from middleware_hub.routed_experts.model import Model
from middleware_hub.routed_experts.store import ExpertStore
from miles_router import Exchange
from miles_router.middlewares.experts import Handover, Held
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.experts import Blocks, ExpertRows, Rows

logger = logging.getLogger(__name__)

FIELD = "routed_experts"
ABORT = "abort"
#: Characters of base64 for each id.
WIRE_BYTES = 16 / 3


@dataclass
class Holding:
    """Where the rows of one request's answers are put. `keep`: by the store, since no layer has their trajectories."""

    store: ExpertStore
    model: Model
    start: int  # the row that was asked for first
    keep: bool
    _sibling: ExpertRows | None = None  # of the last answer that was not like the one before

    def rows(self, decoder: Decoder, held: Held | None, tokens: int, rid: str | None) -> ExpertRows:
        """The rows of an answer of `tokens` tokens, of whose prompt some are `held`.

        Raises:
            InvalidTrajectory: they do not fit; the invariant names how.
        """
        statistics, start = self.store.statistics, self.start
        try:
            own = self.model.rows(decoder.finish(), decoder.largest, start, tokens - 1 - start)
            node = self._hold(own, held, tokens, rid)
        except InvalidTrajectory as error:
            statistics.missing[error.invariant] += 1
            raise
        statistics.answers += 1
        statistics.transferred_rows += len(own)
        if held is not None:
            statistics.reused_rows += start
            statistics.saved_bytes += int(start * own.width * WIRE_BYTES)
        return node

    def _hold(self, own: Blocks, held: Held | None, tokens: int, rid: str | None) -> ExpertRows:
        """`own` are the rows that came. Those held already are not held twice, nor those that came with another answer
        to the same prompt."""
        start, parent = self.start, None
        fresh: Rows | Blocks = own
        if held is not None:
            if held.count < start:
                reason = f"rows {held.count} to {start - 1}: the client asked for those from {start} on"
                raise InvalidTrajectory("experts_without_gap", reason)
            # Of a prompt that is held to its end, and that nothing was sampled behind, one row more is held.
            count = min(held.count, max(tokens - 1, 0))
            fresh = _compact(own[held.count - start :]) if held.count > start else own
            parent, start = held.rows, count
        alike = self._alike(fresh, start, parent)
        if alike:
            parent, fresh, start = self._sibling, _compact(fresh[alike:]), start + alike
        node = self.store.add(fresh, start=start, parent=parent, rid=rid, keep=self.keep)
        if not alike:
            self._sibling = node
        return node

    def _alike(self, own: Rows | Blocks, start: int, parent: ExpertRows | None) -> int:
        """How many rows are those of the answer before, if it went on from the same: answers come prompt by prompt."""
        other = self._sibling
        if other is None or not other.held or other.parent is not parent or other.start != start:
            return 0
        return other.alike(own)


@dataclass(frozen=True)
class _Captured:
    """The ids of one answer. It knows nothing of the handover that it lies in: nothing that nobody takes stays."""

    holding: Holding
    decoder: Decoder
    held: Held | None

    def rows(self, tokens: int, rid: str | None) -> ExpertRows:
        return self.holding.rows(self.decoder, self.held, tokens, rid)


class Capture:
    """What comes with the answers of one request. Without a `handover` no other layer holds them: they are kept here,
    under the ids of their generations."""

    def __init__(
        self,
        store: ExpertStore,
        model: Model,
        exchange: Exchange,
        asked: Asked,
        handover: Handover | None,
        *,
        required: bool,
    ) -> None:
        self.exchange = exchange
        self.asked = asked
        self._store = store
        self._holding = Holding(store, model, asked.start, keep=handover is None)
        self._handover = handover
        if handover is not None:
            handover.captured.clear()  # of a first try, which a pause cut
        self._required = required

    def decoder(self) -> Decoder:
        """For the next string of ids."""
        return Decoder(self._store.max_bytes)

    def take(self, answer: int, decoder: Decoder, meta: Mapping[str, Any]) -> None:
        """An answer's ids: handed to the layer that holds its trajectory, or kept."""
        self._unname(meta)
        if self._handover is not None:
            held = self._handover.held_for(answer)
            self._handover.captured[answer] = _Captured(self._holding, decoder, held)
            return
        try:
            tokens = meta["prompt_tokens"] + meta["completion_tokens"]
            self._holding.rows(decoder, None, tokens, str(meta["id"]))
        except (InvalidTrajectory, KeyError, TypeError) as error:
            fields = {"request_id": self.exchange.request_id, "reason": str(error)}
            logger.warning("routed_experts_not_kept", extra={"fields": fields})

    def _unname(self, meta: Mapping[str, Any]) -> None:
        if isinstance(rid := meta.get("id"), str):
            self._store.unname(rid)

    def missing(self, meta: Mapping[str, Any], *, aborted: bool) -> None:
        """An answer has come without; `meta` is what it says of itself.

        Raises:
            ExpertsMissing: they are required, and the generation was not merely aborted before it began.
        """
        self._unname(meta)
        self._store.statistics.missing["aborted" if aborted else "worker"] += 1
        error = ExpertsMissing(self.exchange.flight.worker_url)
        if self._handover is not None:
            self._handover.missing = "the generation was aborted" if aborted else str(error)
        if self._required and not aborted:
            raise error


def _compact(own: Rows) -> Rows:
    """Rows that keep no more memory alive than their own."""
    return own if own.base is None else own.copy()
