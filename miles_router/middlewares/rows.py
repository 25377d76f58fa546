"""The sub-API for rows: pass rows aligned with tokens between middlewares, such as the expert ids of a
mixture-of-experts engine. For middlewares that hold trajectories or capture rows.

One middleware captures a kind of rows: it asks the engine for them and removes them from replies. Middlewares around it
hold trajectories, and keep a trajectory's rows for as long as they keep the trajectory:

    outer          RowDeliveries.captured(router.rows, ...).left_on(exchange)
                                                    ──►  the engine is asked for the rows that are not held yet
    outer          deliveries.take(answer, tokens)   ◄──  rows of each kind, checked against the tokens of that answer
    outer          router.rows[kind].sources[...]   ◄──  a request for the rows of a trajectory of that middleware

`written_rows` and `read_rows` convert rows to bytes and back, for trajectories that outlive the process
(`--state-rows`). The bytes contain a generation's own rows, which follow those of the generation that it continues. The
header (`state.blobs`) contains start, width, type and parent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from miles_router.asgi.exchange import Exchange, Scope
from miles_router.state.blobs import header_of, with_header
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import KINDS, AlignedRows, RowArray, RowKind, RowShape

__all__ = [
    "NOT_WRITTEN",
    "NO_ROWS",
    "RowChannel",
    "RowDeliveries",
    "RowDelivery",
    "RowMatch",
    "RowPrefix",
    "RowSource",
    "RowsByKind",
    "TrajectoryRows",
    "are_kept",
    "can_be_written",
    "first_prefix",
    "generation_of_rows",
    "number_of_rows",
    "parent_of",
    "read_rows",
    "written_rows",
]

NOTE = "miles_router.middlewares.rows"


@dataclass(frozen=True)
class RowPrefix:
    """The rows that are held for the beginning of a prompt: the first `count` of `rows`, for its first tokens."""

    rows: AlignedRows
    count: int

    @classmethod
    def of(cls, rows: AlignedRows | None, tokens: int) -> RowPrefix | None:
        """Return the prefix that `rows` give a prompt beginning with `tokens` tokens of their generation, or None."""
        if rows is None:
            return None
        count = min(len(rows), tokens)
        # Refer to the generation that owns the rows. Otherwise unrelated rollouts of one prompt would keep each other
        # alive.
        while rows.parent is not None and count <= rows.start:
            rows = rows.parent
        return cls(rows, count) if count and rows.complete(count) else None


def first_prefix(line: Iterable[tuple[TrajectoryRows | None, int]]) -> RowPrefix | None:
    """Return the first usable prefix among the trajectory and those it continues, or None.

    Each comes with the number of the prompt's first tokens that it contains.
    """
    prefixes = (RowPrefix.of(each.rows, tokens) for each, tokens in line if each is not None)
    return next((prefix for prefix in prefixes if prefix is not None), None)


class UncheckedRows(Protocol):
    """Rows that arrived with an answer and are not yet checked against its tokens."""

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        """Check the rows against `tokens` tokens of prompt and output, and return them.

        The rows are freed when the last reference to them is gone.

        Raises:
            InvalidTrajectory: the rows do not fit; its invariant names the mismatch.
        """
        ...


class TrajectoryRows(NamedTuple):
    """The rows of a trajectory, or the reason why they are missing."""

    rows: AlignedRows | None
    reason: str | None = None


#: The rows of a trajectory by kind, without the kinds that no middleware captures.
RowsByKind = Mapping[RowKind, TrajectoryRows]
NO_ROWS: RowsByKind = MappingProxyType({})


@dataclass
class RowDelivery:
    """The rows of one request, passed from the middleware that captures them to the one that holds the trajectory."""

    kind: RowKind
    prefixes: Sequence[RowPrefix | None] = ()  # by prompt
    per_prompt: int = 1  # answers to each prompt
    unchecked: dict[int, UncheckedRows] = field(default_factory=dict)  # by answer
    missing: str | None = None  # why an answer that is not in `unchecked` has no rows

    @contextmanager
    def left_on(self, exchange: Exchange) -> Iterator[RowDelivery]:
        """Attach this delivery to the exchange within this context, in which the inner app runs and rows are taken."""
        note = _note(self.kind)
        exchange.notes[note] = self
        try:
            yield self
        finally:
            del exchange.notes[note]
            self.prefixes = ()
            self.unchecked.clear()

    @classmethod
    def of(cls, exchange: Exchange, kind: RowKind) -> RowDelivery | None:
        """Return the delivery of this kind that an outer middleware attached to the exchange, or None."""
        delivery: RowDelivery | None = exchange.notes.get(_note(kind))
        return delivery

    def prefix_for(self, answer: int) -> RowPrefix | None:
        """Return the rows that are held for the prompt of an answer, or None."""
        prompt = self.prompt_of(answer)
        return self.prefixes[prompt] if prompt < len(self.prefixes) else None

    def prompt_of(self, answer: int) -> int:
        """Return the index of an answer's prompt; answers are prompt-major."""
        return answer // self.per_prompt

    def take(self, answer: int, tokens: int, rid: str | None = None) -> TrajectoryRows:
        """Check and return the rows of an answer of `tokens` tokens, prompt included. Each answer is taken once."""
        unchecked = self.unchecked.pop(answer, None)
        if unchecked is None:
            return TrajectoryRows(None, self.missing or "the worker sent none with this answer")
        try:
            return TrajectoryRows(unchecked.align(tokens, rid))
        except InvalidTrajectory as error:
            return TrajectoryRows(None, str(error))


class RowDeliveries(dict[RowKind, RowDelivery]):
    """The deliveries of one request, for each kind that is captured."""

    @classmethod
    def captured(
        cls,
        channels: Mapping[RowKind, RowChannel],
        prefixes: Callable[[RowKind], Sequence[RowPrefix | None]],
        *,
        per_prompt: int = 1,
        missing: str | None = None,
    ) -> RowDeliveries:
        """Build a delivery for each kind that a middleware captures.

        Args:
            prefixes: returns the rows that are held of each prompt, for a kind.
            per_prompt: the number of answers to each prompt.
            missing: the reason to give for an answer that comes without rows.
        """
        kinds = [kind for kind, channel in channels.items() if channel.captures]
        return cls({kind: RowDelivery(kind, prefixes(kind), per_prompt=per_prompt, missing=missing) for kind in kinds})

    @contextmanager
    def left_on(self, exchange: Exchange) -> Iterator[None]:
        with ExitStack() as stack:
            for delivery in self.values():
                stack.enter_context(delivery.left_on(exchange))
            yield

    def take(self, answer: int, tokens: int, rid: str | None = None) -> RowsByKind:
        if not self:
            return NO_ROWS
        return {kind: delivery.take(answer, tokens, rid) for kind, delivery in self.items()}


def _note(kind: RowKind) -> str:
    return f"{NOTE}.{kind.name}"


@dataclass(frozen=True)
class RowMatch:
    """A trajectory that a request for rows refers to."""

    rows: TrajectoryRows
    tokens: int
    rid: str | None = None


@dataclass(frozen=True)
class RowSource:
    """A finder of the trajectory that a request for rows refers to by a field, a string.

    Attributes:
        find: returns the trajectory for the request's fields; raises NotFound or BadRequest.
        fields: further fields that `find` reads.
        require: in a router of several processes, raises Elsewhere if another process owns the string's trajectory.
            If None, all processes are asked.
        bring: awaited after `require` with the string, to load the trajectory from disk.
    """

    find: Callable[[Mapping[str, Any]], RowMatch]
    fields: tuple[str, ...] = ()
    require: Callable[[Scope, str], Awaitable[None]] | None = None
    bring: Callable[[str], Awaitable[None]] | None = None


class RowChannel:
    """`router.rows[kind]`: what the middlewares of one stack share about one kind of rows."""

    def __init__(self, kind: RowKind) -> None:
        self.kind = kind
        #: The model's row shape, if the capturing middleware knows it, and that middleware's option for the shape.
        self.shape: RowShape | None = None
        self.shape_option = ""
        #: Whether a middleware captures this kind.
        self.captures = False
        #: The most bytes of rows that the capturing middleware keeps.
        self.max_bytes = 0
        #: Set by the capturing middleware: keeps rows that were restored from disk. Arguments: the generation's own
        #: rows, the position of the first, the rows before them, and the generation's id.
        self.hold: Callable[[RowArray, int, AlignedRows | None, str | None], AlignedRows] | None = None
        #: Called with rows that the capturing middleware evicts for lack of space.
        self.when_evicted: Callable[[AlignedRows], None] = lambda rows: None
        #: Awaited with the id of a generation unknown to the capturing middleware, to load its rows from disk.
        self.bring_rid: Callable[[str], Awaitable[None]] | None = None
        #: The finders by the field that names a trajectory in a request ("text", "session_id").
        self.sources: dict[str, RowSource] = {}

    def array(self, rows: AlignedRows, start: int, stop: int) -> RowArray:
        """Return rows `[start, stop)` as an array of the smallest type that holds their values.

        Its shape is [stop - start, layers, top_k], or [stop - start, layers * top_k] if the model's shape is unknown.

        Raises:
            InvalidTrajectory: some rows are missing or evicted.
        """
        flat = rows.array(start, stop)
        return flat if self.shape is None else self.shape.reshape(flat)

    def describe(self) -> dict[str, int | None] | None:
        """Return the model's shape as `layers`, `top_k` and the number of distinct ids, or None if it is unknown."""
        if self.shape is None:
            return None
        return {"layers": self.shape.layers, "top_k": self.shape.top_k, self.kind.ids: self.shape.choices}


# Rows as bytes

#: The reason why a restored trajectory has no rows if they were not written.
NOT_WRITTEN = "the router was restarted since, and --state-rows was off"
#: The low bits of a blob's number, which contain the index of the kind in `KINDS`.
KIND_BITS = 4


def number_of_rows(kind: RowKind, number: int) -> int:
    """Return the number of the large blob for the rows of the generation with this number."""
    return number << KIND_BITS | KINDS.index(kind)


def generation_of_rows(number: int) -> tuple[RowKind, int]:
    """Return the arguments that `number_of_rows` made this number of. Raise IndexError for an unknown kind."""
    return KINDS[number & (1 << KIND_BITS) - 1], number >> KIND_BITS


def can_be_written(rows: AlignedRows, parent: int | None) -> bool:
    """Return True if all rows that `written_rows` would write are still held."""
    return rows.complete() if _whole(rows, parent) else rows.held or len(rows) == rows.start


def written_rows(rows: AlignedRows, parent: int | None) -> bytes:
    """Return rows as bytes: those after the rows of the generation with the number `parent`, or all without a parent.

    Raises:
        InvalidTrajectory: rows are no longer held.
    """
    start = 0 if _whole(rows, parent) else rows.start
    own = rows.array(start)
    own = own.astype(own.dtype.newbyteorder("<"), copy=False)
    header = {"start": start, "width": own.shape[1], "type": own.dtype.str, "parent": parent}
    return with_header(header, [own.tobytes()])


def _whole(rows: AlignedRows, parent: int | None) -> bool:
    """Return True if the inherited rows must be written too, because their generation is not written."""
    return parent is None and rows.parent is not None


def parent_of(data: bytes) -> int | None:
    """Return the number of the generation that the written rows continue, or None.

    Raises:
        KeyError, ValueError: `data` does not contain rows.
    """
    parent: int | None = header_of(data)[0]["parent"]
    return parent


def are_kept(channels: Mapping[RowKind, RowChannel]) -> bool:
    """Return True if a middleware can keep rows that are restored from disk."""
    return any(channel.hold is not None for channel in channels.values())


def read_rows(
    data: bytes | None,
    kind: RowKind,
    before: Callable[[int], TrajectoryRows],
    channels: Mapping[RowKind, RowChannel],
    rid: str | None = None,
) -> TrajectoryRows:
    """Restore rows from the bytes of `written_rows`, and keep them in the middleware that captures the kind.

    Args:
        before: returns the rows of the generation with a number; parents must be restored first.
        rid: the generation's id.

    Raises:
        KeyError, IndexError, ValueError: the bytes are missing or do not contain rows.
    """
    hold = channels[kind].hold if kind in channels else None
    if hold is None:
        return TrajectoryRows(None, "no layer keeps them any more")
    if data is None:
        raise ValueError("rows that were written are missing")
    header, begin = header_of(data)
    own = np.frombuffer(data, np.dtype(header["type"]), offset=begin).reshape(-1, header["width"])
    parent = None if header["parent"] is None else before(header["parent"])
    if parent is not None and parent.rows is None:
        return parent
    try:
        return TrajectoryRows(hold(own.copy(), header["start"], None if parent is None else parent.rows, rid))
    except InvalidTrajectory as error:
        return TrajectoryRows(None, str(error))
