"""The capture of one request's rows: from the strings in its answers to checked rows in memory."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from middleware_hub.routed_experts.decoding import Decoder
from middleware_hub.routed_experts.errors import RowsMissing
from middleware_hub.routed_experts.shapes import RowWidth, RowWidths, ShapeCheck
from middleware_hub.routed_experts.store import RowStore
from miles_router.engines.facts import Facts
from miles_router.engines.generate import MAX_GENERATIONS
from miles_router.engines.rows import RowFields
from miles_router.errors import UpstreamError
from miles_router.middlewares import Exchange
from miles_router.middlewares.rows import RowDelivery, RowPrefix
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import AlignedRows, Blocks, RowArray

logger = logging.getLogger(__name__)

#: Bytes of base64 for each id.
WIRE_BYTES = 16 / 3
#: Limit of id strings in one reply: one for each answer, and more where a generation has several attempts.
MAX_STRINGS = 4 * MAX_GENERATIONS


class Aligner:
    """Checks the rows of one request's answers against their tokens, and stores the new rows.

    Args:
        start: the first row that the engine was asked for.
        keep: whether the store keeps the rows alive, since no other layer holds the trajectories.
    """

    def __init__(self, store: RowStore, check: ShapeCheck, *, start: int, keep: bool) -> None:
        #: The row width of the answering engine. Used only where the model's shape is not configured.
        self.width = RowWidth()
        self._store = store
        self._check = check
        self._start = start
        self._keep = keep
        self._sibling: AlignedRows | None = None  # the last answer's rows that did not begin like the ones before

    def align(self, decoder: Decoder, prefix: RowPrefix | None, tokens: int, rid: str | None) -> AlignedRows:
        """Return the rows of an answer of `tokens` tokens (prompt included); `prefix` holds the rows of its prompt.

        Raises:
            InvalidTrajectory: the rows do not fit; its invariant names the reason.
        """
        statistics, start = self._store.statistics, self._start
        try:
            own = self._check.rows(decoder.finish(), decoder.largest, start, tokens - 1 - start, self.width)
            node = self._store_rows(own, prefix, tokens, rid)
        except InvalidTrajectory as error:
            statistics.missing[error.invariant] += 1
            raise
        statistics.answers += 1
        statistics.transferred_rows += len(own)
        if prefix is not None:
            statistics.reused_rows += start
            statistics.saved_bytes += int(start * own.width * WIRE_BYTES)
        return node

    def _store_rows(self, own: Blocks, prefix: RowPrefix | None, tokens: int, rid: str | None) -> AlignedRows:
        """Store the rows `own` that the engine sent, without the rows of `prefix` or of a sibling to the same
        prompt."""
        start, parent = self._start, None
        fresh: RowArray | Blocks = own
        if prefix is not None:
            if prefix.count < start:
                reason = f"rows {prefix.count} to {start - 1} are missing: the client asked for rows from {start} on"
                raise self._store.kind.invalid("without_gap", reason)
            # After an answer without tokens, a prompt that is in memory to its end has one row more than needed.
            count = min(prefix.count, max(tokens - 1, 0))
            fresh = _compact(own[prefix.count - start :]) if prefix.count > start else own
            parent, start = prefix.rows, count
        alike = self._equal_to_sibling(fresh, start, parent)
        if alike:
            parent, fresh, start = self._sibling, _compact(fresh[alike:]), start + alike
        node = self._store.add(fresh, start=start, parent=parent, rid=rid, keep=self._keep)
        if not alike:
            self._sibling = node
        return node

    def _equal_to_sibling(self, own: RowArray | Blocks, start: int, parent: AlignedRows | None) -> int:
        """Return how many rows equal the previous answer's rows, if both answers continue the same rows."""
        other = self._sibling
        if other is None or not other.held or other.parent is not parent or other.start != start:
            return 0
        return other.count_equal(own)


@dataclass(frozen=True)
class _AnswerRows:
    """The undecoded rows of one answer. No reference to the delivery: rows that no layer takes must be freed."""

    aligner: Aligner
    decoder: Decoder
    prefix: RowPrefix | None

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        return self.aligner.align(self.decoder, self.prefix, tokens, rid)


@dataclass(frozen=True)
class CaptureContext:
    """The parts that the captures of all requests share."""

    fields: RowFields
    store: RowStore
    check: ShapeCheck
    #: Returns the facts of the engine at a URL (`Fleet.facts`).
    facts: Callable[[str], Awaitable[Facts]]
    #: Whether an answer without rows is an error.
    required: bool


class Capture:
    """The capture of one request's rows.

    Without a `delivery`, no other layer holds the trajectories: the store keeps the rows under the generations' ids.
    """

    def __init__(
        self, context: CaptureContext, exchange: Exchange, delivery: RowDelivery | None, *, start: int
    ) -> None:
        self.fields = context.fields
        self.exchange = exchange
        self._context = context
        self._store = context.store
        self._aligner = Aligner(context.store, context.check, start=start, keep=delivery is None)
        self._delivery = delivery
        self._bytes_left = exchange.max_answer_bytes
        self._strings = 0
        self._decoder: Decoder | None = None  # of the last string
        if delivery is not None:
            delivery.unchecked.clear()  # rows of an attempt that a pause cut

    async def begin(self) -> None:
        """Look up the learned row width of the answering engine process.

        The head of the reply has arrived, and its open connection proves that it is still the same process.
        """
        url = self.exchange.routing.worker_url
        if self._context.check.learns and url is not None:
            facts = await self._context.facts(url)
            self._aligner.width = facts.learned(RowWidths)[self.fields.kind]

    def decoder(self) -> Decoder:
        """Return a decoder for the next string of ids. All strings of a reply share `max_answer_bytes`.

        Raises:
            UpstreamError: the reply has more strings than a request can have answers.
        """
        if self._decoder is not None:
            self._bytes_left -= self._decoder.nbytes
        if self._strings == MAX_STRINGS:
            raise UpstreamError(f"the worker's answer has over {MAX_STRINGS} strings of {self.fields.kind.ids}")
        self._strings += 1
        self._decoder = Decoder(self.fields.kind, max(0, min(self._store.max_bytes, self._bytes_left)))
        return self._decoder

    def take(self, answer: int, decoder: Decoder, meta: Mapping[str, Any]) -> None:
        """Hand an answer's rows to the layer that holds its trajectory, or store them under the generation's id."""
        self._release_id(meta)
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
        """Handle an answer without rows; `meta` is its `meta_info`.

        Raises:
            RowsMissing: rows are required, and the generation was not aborted before it began.
        """
        self._release_id(meta)
        if aborted:
            self._record_missing("aborted", "the generation was aborted")
        else:
            self._refuse("worker", self.fields.remedy)

    def unread(self, encoding: str) -> None:
        """Handle a compressed reply, which cannot be read.

        Raises:
            RowsMissing: rows are required.
        """
        self._refuse("unread", f"turn off its Content-Encoding ({encoding}), which the router did not ask for")

    def _refuse(self, reason: str, remedy: str) -> None:
        error = RowsMissing(self.fields.kind, self.exchange.routing.worker_url, remedy)
        self._record_missing(reason, str(error))
        if self._context.required:
            raise error

    def _record_missing(self, reason: str, message: str) -> None:
        self._store.statistics.missing[reason] += 1
        if self._delivery is not None:
            self._delivery.missing = message

    def _release_id(self, meta: Mapping[str, Any]) -> None:
        if isinstance(rid := meta.get("id"), str):
            self._store.release_id(rid)


def _compact(own: RowArray) -> RowArray:
    """Return rows that do not keep a larger array alive."""
    return own if own.base is None else own.copy()
