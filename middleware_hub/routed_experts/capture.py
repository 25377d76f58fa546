"""One request's rows: from what was asked for and what was taken out of its answers to rows that are held."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from middleware_hub.routed_experts.decoding import Decoder
from middleware_hub.routed_experts.errors import MISSING
from middleware_hub.routed_experts.shapes import RowWidth, RowWidths, ShapeCheck
from middleware_hub.routed_experts.store import RowStore
from miles_router.engines.facts import Facts
from miles_router.engines.generate import MAX_GENERATIONS
from miles_router.engines.rows import RowFields
from miles_router.errors import UpstreamInvalidResponse
from miles_router.middlewares import Exchange
from miles_router.middlewares.rows import RowDelivery, RowPrefix
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import AlignedRows, Blocks, RowArray

logger = logging.getLogger(__name__)

#: Characters of base64 for each id.
WIRE_BYTES = 16 / 3
#: Strings of ids in one reply: one for each answer, and more where its generation was cut.
MAX_STRINGS = 4 * MAX_GENERATIONS


class Aligner:
    """Holds the rows of one request's answers against their tokens and against what is held already.

    Args:
        start: the row that was asked for first.
        keep: by the store, since no layer has these trajectories.
    """

    def __init__(self, store: RowStore, check: ShapeCheck, *, start: int, keep: bool) -> None:
        #: What the worker that answers has shown of its rows; matters only where nobody has said the model's shape.
        self.width = RowWidth()
        self._store = store
        self._check = check
        self._start = start
        self._keep = keep
        self._sibling: AlignedRows | None = None  # of the last answer that was not like the one before

    def align(self, decoder: Decoder, prefix: RowPrefix | None, tokens: int, rid: str | None) -> AlignedRows:
        """The rows of an answer of `tokens` tokens, of whose prompt `prefix` is held.

        Raises:
            InvalidTrajectory: they do not fit; the invariant names how.
        """
        statistics, start = self._store.statistics, self._start
        try:
            own = self._check.rows(decoder.finish(), decoder.largest, start, tokens - 1 - start, self.width)
            node = self._hold(own, prefix, tokens, rid)
        except InvalidTrajectory as error:
            statistics.missing[error.invariant] += 1
            raise
        statistics.answers += 1
        statistics.transferred_rows += len(own)
        if prefix is not None:
            statistics.reused_rows += start
            statistics.saved_bytes += int(start * own.width * WIRE_BYTES)
        return node

    def _hold(self, own: Blocks, prefix: RowPrefix | None, tokens: int, rid: str | None) -> AlignedRows:
        """`own` are the rows that came. Those held already are not held twice, nor those that came with another answer
        to the same prompt."""
        start, parent = self._start, None
        fresh: RowArray | Blocks = own
        if prefix is not None:
            if prefix.count < start:
                reason = f"rows {prefix.count} to {start - 1}: the client asked for those from {start} on"
                raise self._store.kind.invalid("without_gap", reason)
            # Of a prompt that is held to its end, and that nothing was sampled behind, one row more is held.
            count = min(prefix.count, max(tokens - 1, 0))
            fresh = _compact(own[prefix.count - start :]) if prefix.count > start else own
            parent, start = prefix.rows, count
        alike = self._alike(fresh, start, parent)
        if alike:
            parent, fresh, start = self._sibling, _compact(fresh[alike:]), start + alike
        node = self._store.add(fresh, start=start, parent=parent, rid=rid, keep=self._keep)
        if not alike:
            self._sibling = node
        return node

    def _alike(self, own: RowArray | Blocks, start: int, parent: AlignedRows | None) -> int:
        """How many rows are those of the answer before, if it went on from the same: answers come prompt by prompt."""
        other = self._sibling
        if other is None or not other.held or other.parent is not parent or other.start != start:
            return 0
        return other.count_equal(own)


@dataclass(frozen=True)
class _AnswerRows:
    """The ids of one answer. It knows nothing of the delivery that it lies in: nothing that nobody takes stays."""

    aligner: Aligner
    decoder: Decoder
    prefix: RowPrefix | None

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        return self.aligner.align(self.decoder, self.prefix, tokens, rid)


@dataclass(frozen=True)
class CaptureContext:
    """What the captures of all requests have in common."""

    fields: RowFields
    store: RowStore
    check: ShapeCheck
    #: What is known of the engine at a URL (`Fleet.facts`).
    facts: Callable[[str], Awaitable[Facts]]
    #: Whether an answer without rows is an error.
    required: bool


class Capture:
    """What comes with the answers of one request. Without a `delivery` no other layer holds them: they are kept here,
    under the ids of their generations."""

    def __init__(
        self, context: CaptureContext, exchange: Exchange, delivery: RowDelivery | None, *, start: int
    ) -> None:
        self.fields = context.fields
        self.exchange = exchange
        self._context = context
        self._store = context.store
        self._aligner = Aligner(context.store, context.check, start=start, keep=delivery is None)
        self._delivery = delivery
        self._room = exchange.max_answer_bytes
        self._strings = 0
        self._decoder: Decoder | None = None  # the last one
        if delivery is not None:
            delivery.unchecked.clear()  # of a first try, which a pause cut

    async def begin(self) -> None:
        """The head of a reply has come, and its connection holds the process that gives it: what has been learned of
        the rows of just this one counts."""
        url = self.exchange.flight.worker_url
        if self._context.check.learns and url is not None:
            facts = await self._context.facts(url)
            self._aligner.width = facts.learned(RowWidths)[self.fields.kind]

    def decoder(self) -> Decoder:
        """For the next string of ids. All of one reply's have room for its bound together.

        Raises:
            UpstreamInvalidResponse: the reply has more of them than answers can be asked for.
        """
        if self._decoder is not None:
            self._room -= self._decoder.nbytes
        if self._strings == MAX_STRINGS:
            raise UpstreamInvalidResponse(
                f"the worker's answer has over {MAX_STRINGS} strings of {self.fields.kind.ids}"
            )
        self._strings += 1
        self._decoder = Decoder(self.fields.kind, max(0, min(self._store.max_bytes, self._room)))
        return self._decoder

    def take(self, answer: int, decoder: Decoder, meta: Mapping[str, Any]) -> None:
        """An answer's ids: handed to the layer that holds its trajectory, or kept."""
        self._unname(meta)
        if self._delivery is not None:
            prefix = self._delivery.prefix_for(answer)
            self._delivery.unchecked[answer] = _AnswerRows(self._aligner, decoder, prefix)
            return
        try:
            tokens = meta["prompt_tokens"] + meta["completion_tokens"]
            self._aligner.align(decoder, None, tokens, str(meta["id"]))
        except (InvalidTrajectory, KeyError, TypeError) as error:
            fields = {"request_id": self.exchange.request_id, "reason": str(error)}
            logger.warning(f"{self.fields.kind.name}_not_kept", extra={"fields": fields})

    def missing(self, meta: Mapping[str, Any], *, aborted: bool) -> None:
        """An answer has come without; `meta` is what it says of itself.

        Raises:
            RowsMissing: they are required, and the generation was not merely aborted before it began.
        """
        self._unname(meta)
        if aborted:
            self._lack("aborted", "the generation was aborted")
        else:
            self._refuse("worker", self.fields.remedy)

    def unread(self, encoding: str) -> None:
        """A reply has come that cannot be read, since it is compressed.

        Raises:
            RowsMissing: rows are required.
        """
        self._refuse("unread", f"let it answer without Content-Encoding ({encoding}), which it was not asked for")

    def _refuse(self, reason: str, remedy: str) -> None:
        error = MISSING[self.fields.kind](self.fields.kind, self.exchange.flight.worker_url, remedy)
        self._lack(reason, str(error))
        if self._context.required:
            raise error

    def _lack(self, reason: str, message: str) -> None:
        self._store.statistics.missing[reason] += 1
        if self._delivery is not None:
            self._delivery.missing = message

    def _unname(self, meta: Mapping[str, Any]) -> None:
        if isinstance(rid := meta.get("id"), str):
            self._store.unname(rid)


def _compact(own: RowArray) -> RowArray:
    """Rows that keep no more memory alive than their own."""
    return own if own.base is None else own.copy()
