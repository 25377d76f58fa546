"""The sub-API for rows aligned with tokens, such as the expert ids of a mixture-of-experts engine, for middlewares that
hold trajectories or capture rows.

One middleware captures a kind of rows: it requests them from the engine and takes them out of answers. Middlewares
around it hold trajectories, and keep a trajectory's rows as long as the trajectory:

    outer middleware   RowDeliveries.captured(router.rows, ...).attached_to(exchange)
                                                         ──►  the engine is asked for the rows that are not held yet
    outer middleware   deliveries.take(answer, tokens)   ◄──  rows of each kind, checked against the answer's tokens
    outer middleware   router.rows[kind].sources[...]    ◄──  a request for the rows of one of its trajectories

`written_rows` and `read_rows` convert rows to bytes and back, for trajectories that outlive the process
(`--state-rows`). The bytes contain one generation's own rows. The header (`state.blobs`) has start, width, type and the
number of the parent, the generation that this one continues.
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
    """The rows held for a prompt: the first `count` rows of `rows` belong to the first tokens of the prompt."""

    rows: AlignedRows
    count: int

    @classmethod
    def of(cls, rows: AlignedRows | None, tokens: int) -> RowPrefix | None:
        """Return the prefix for a prompt that shares `tokens` tokens with the generation of `rows`, or None."""
        if rows is None:
            return None
        count = min(len(rows), tokens)
        # Refer to the ancestor that owns the rows: otherwise unrelated rollouts of one prompt keep each other alive.
        while rows.parent is not None and count <= rows.start:
            rows = rows.parent
        return cls(rows, count) if count and rows.complete(count) else None


def first_prefix(line: Iterable[tuple[TrajectoryRows | None, int]]) -> RowPrefix | None:
    """Return the first usable prefix among a trajectory's rows and its ancestors' rows.

    Args:
        line: the trajectory's rows, then the rows of its ancestors, each with the number of prompt tokens it covers.
    """
    prefixes = (RowPrefix.of(each.rows, tokens) for each, tokens in line if each is not None)
    return next((prefix for prefix in prefixes if prefix is not None), None)


class UncheckedRows(Protocol):
    """Rows from an answer that are not yet checked against its tokens."""

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        """Return all rows of an answer whose prompt and output have `tokens` tokens together.

        The rows live as long as the caller keeps a reference to them.

        Raises:
            InvalidTrajectory: the rows do not fit the tokens; the error names the broken invariant.
        """
        ...


class TrajectoryRows(NamedTuple):
    """The rows of a trajectory, or the reason why it has no rows."""

    rows: AlignedRows | None
    reason: str | None = None


#: The rows of a trajectory by kind, without the kinds that no middleware captures.
RowsByKind = Mapping[RowKind, TrajectoryRows]
NO_ROWS: RowsByKind = MappingProxyType({})


@dataclass
class RowDelivery:
    """The transfer of one request's rows of one kind, from the capturing middleware to the holder of the trajectory."""

    kind: RowKind
    prefixes: Sequence[RowPrefix | None] = ()  # one per prompt
    per_prompt: int = 1  # answers to each prompt
    unchecked: dict[int, UncheckedRows] = field(default_factory=dict)  # by the answer's index
    missing: str | None = None  # the reason for an answer without an entry in `unchecked`

    @contextmanager
    def attached_to(self, exchange: Exchange) -> Iterator[RowDelivery]:
        """Attach this delivery to the exchange while the inner app is called and its answers are taken.

        Leaving the block detaches the delivery and drops its prefixes and unchecked rows.
        """
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
        """Return the delivery that an outer middleware attached for this kind, or None."""
        delivery: RowDelivery | None = exchange.notes.get(_note(kind))
        return delivery

    def prefix_for(self, answer: int) -> RowPrefix | None:
        """Return the rows held for the prompt of an answer."""
        prompt = self.prompt_of(answer)
        return self.prefixes[prompt] if prompt < len(self.prefixes) else None

    def prompt_of(self, answer: int) -> int:
        """Return the index of an answer's prompt; answers to one prompt are adjacent."""
        return answer // self.per_prompt

    def take(self, answer: int, tokens: int, rid: str | None = None) -> TrajectoryRows:
        """Remove and check the rows of an answer of `tokens` tokens, prompt included; return them or a reason."""
        unchecked = self.unchecked.pop(answer, None)
        if unchecked is None:
            return TrajectoryRows(None, self.missing or "the worker sent no rows with this answer")
        try:
            return TrajectoryRows(unchecked.align(tokens, rid))
        except InvalidTrajectory as error:
            return TrajectoryRows(None, str(error))


class RowDeliveries(dict[RowKind, RowDelivery]):
    """The deliveries of one request, by captured kind."""

    @classmethod
    def captured(
        cls,
        channels: Mapping[RowKind, RowChannel],
        prefixes: Callable[[RowKind], Sequence[RowPrefix | None]],
        *,
        per_prompt: int = 1,
        missing: str | None = None,
    ) -> RowDeliveries:
        """Create a delivery for each kind that a middleware captures.

        Args:
            prefixes: returns the rows held for each prompt.
            per_prompt: the number of answers to each prompt.
            missing: the reason to give for answers that come without rows.
        """
        kinds = [kind for kind, channel in channels.items() if channel.captures]
        return cls({kind: RowDelivery(kind, prefixes(kind), per_prompt=per_prompt, missing=missing) for kind in kinds})

    @contextmanager
    def attached_to(self, exchange: Exchange) -> Iterator[None]:
        """Attach all deliveries to the exchange inside the block."""
        with ExitStack() as stack:
            for delivery in self.values():
                stack.enter_context(delivery.attached_to(exchange))
            yield

    def take(self, answer: int, tokens: int, rid: str | None = None) -> RowsByKind:
        """Remove and return the rows of an answer, by kind."""
        if not self:
            return NO_ROWS
        return {kind: delivery.take(answer, tokens, rid) for kind, delivery in self.items()}


def _note(kind: RowKind) -> str:
    return f"{NOTE}.{kind.name}"


@dataclass(frozen=True)
class RowMatch:
    """The trajectory that a request for rows names: its rows, number of tokens and generation id."""

    rows: TrajectoryRows
    tokens: int
    rid: str | None = None


@dataclass(frozen=True)
class RowSource:
    """A lookup of the trajectory that a request for rows names. The naming field of the request contains a string.

    Attributes:
        find: returns the trajectory for the request's fields; raises NotFound or BadRequest.
        fields: further request fields that `find` reads.
        require: raises Elsewhere if another process owns the name. Without it, all processes must be asked.
        bring: loads the named trajectory into memory; awaited after `require`.
    """

    find: Callable[[Mapping[str, Any]], RowMatch]
    fields: tuple[str, ...] = ()
    require: Callable[[Scope, str], Awaitable[None]] | None = None
    bring: Callable[[str], Awaitable[None]] | None = None


class RowChannel:
    """The connection between the middlewares that capture and use one kind of rows: `router.rows[kind]`."""

    def __init__(self, kind: RowKind) -> None:
        self.kind = kind
        #: The shape of the model's rows, if the capturing middleware knows it, and its option that sets the shape.
        self.shape: RowShape | None = None
        self.shape_option = ""
        #: Whether a middleware captures this kind.
        self.captures = False
        #: The limit of the rows that the capturing middleware keeps in memory, in bytes.
        self.max_bytes = 0
        #: Restores rows into the capturing middleware: own rows, index of the first one, parent's rows, generation id.
        self.hold: Callable[[RowArray, int, AlignedRows | None, str | None], AlignedRows] | None = None
        #: Called with rows that the capturing middleware evicted to make room.
        self.when_evicted: Callable[[AlignedRows], None] = lambda rows: None
        #: Awaited with the id of an unknown generation, to load its rows from outside of memory.
        self.bring_rid: Callable[[str], Awaitable[None]] | None = None
        #: Sources by the request field that names a trajectory ("text", "session_id").
        self.sources: dict[str, RowSource] = {}

    def array(self, rows: AlignedRows, start: int, stop: int) -> RowArray:
        """Return rows `[start, stop)` as [stop - start, layers, top_k] in the smallest type that holds them.

        If the model's shape is unknown, the array is [stop - start, layers * top_k].

        Raises:
            InvalidTrajectory: some rows are missing or evicted.
        """
        flat = rows.array(start, stop)
        return flat if self.shape is None else self.shape.reshape(flat)

    def describe(self) -> dict[str, int | None] | None:
        """Return the model's shape as `layers`, `top_k` and the number of possible ids; None if it is unknown."""
        if self.shape is None:
            return None
        return {"layers": self.shape.layers, "top_k": self.shape.top_k, self.kind.ids: self.shape.choices}


# Rows as bytes

#: The reason given for a restored trajectory whose rows were not written.
NOT_WRITTEN = "the router was restarted since, and --state-rows was off"
#: The number of low bits of a blob's number that contain the kind, as its index in `KINDS`.
KIND_BITS = 4


def number_of_rows(kind: RowKind, number: int) -> int:
    """Return the number of the large blob for the rows of the generation with this number."""
    return number << KIND_BITS | KINDS.index(kind)


def generation_of_rows(number: int) -> tuple[RowKind, int]:
    """Return the kind and the generation's number for the number of a blob.

    Raises:
        IndexError: the number encodes no known kind.
    """
    return KINDS[number & (1 << KIND_BITS) - 1], number >> KIND_BITS


def can_be_written(rows: AlignedRows, parent: int | None) -> bool:
    """Return whether all rows that `written_rows` needs are in memory."""
    return rows.complete() if _whole(rows, parent) else rows.held or len(rows) == rows.start


def written_rows(rows: AlignedRows, parent: int | None) -> bytes:
    """Convert a generation's own rows to bytes; `parent` is the number of the generation that it continues.

    With `parent` None, the bytes include the rows of all ancestors.

    Raises:
        InvalidTrajectory: the rows were evicted.
    """
    start = 0 if _whole(rows, parent) else rows.start
    own = rows.array(start)
    own = own.astype(own.dtype.newbyteorder("<"), copy=False)
    header = {"start": start, "width": own.shape[1], "type": own.dtype.str, "parent": parent}
    return with_header(header, [own.tobytes()])


def _whole(rows: AlignedRows, parent: int | None) -> bool:
    """Return whether the bytes must include the ancestors' rows, because no parent is written."""
    return parent is None and rows.parent is not None


def parent_of(data: bytes) -> int | None:
    """Return the number of the parent generation from the bytes of rows, or None.

    Raises:
        KeyError, ValueError: the bytes do not contain rows.
    """
    parent: int | None = header_of(data)[0]["parent"]
    return parent


def are_kept(channels: Mapping[RowKind, RowChannel]) -> bool:
    """Return whether a middleware can restore rows that were written."""
    return any(channel.hold is not None for channel in channels.values())


def read_rows(
    data: bytes | None,
    kind: RowKind,
    before: Callable[[int], TrajectoryRows],
    channels: Mapping[RowKind, RowChannel],
    rid: str | None = None,
) -> TrajectoryRows:
    """Restore rows from the bytes of `written_rows` into the middleware that captures this kind now.

    The result has a reason instead of rows if no middleware keeps this kind or the parent has no rows.

    Args:
        data: the bytes; None if they are missing.
        before: returns the rows of the parent generation, which must be read first, by its number.
        rid: the id of the generation.

    Raises:
        KeyError, IndexError, ValueError: the bytes are missing or do not contain rows.
    """
    hold = channels[kind].hold if kind in channels else None
    if hold is None:
        return TrajectoryRows(None, "no middleware keeps rows of this kind any more")
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
