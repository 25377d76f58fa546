"""The sub-API for rows: how the layers of a stack hand each other rows aligned with tokens, such as the expert ids of a
mixture-of-experts engine. For layers that hold trajectories or capture rows.

One layer captures a kind of rows: it asks the engine for them and takes them out of answers. Layers around it hold
trajectories, and keep a trajectory's rows for as long as they keep the trajectory:

    outer layer    RowDeliveries.captured(router.rows, ...).left_on(exchange)
                                                    ──►  the engine is asked for the rows that are not held yet
    outer layer    deliveries.take(answer, tokens)   ◄──  rows of each kind, checked against the tokens of that answer
    outer layer    router.rows[kind].sources[...]   ◄──  a request for the rows of a trajectory of that layer

`written_rows` and `read_rows` make bytes of rows and rows of bytes, for trajectories that outlive the process
(`--state-rows`): the own rows of one generation, behind those of the one that it continues. The header (`state.blobs`)
has start, width, type and parent.
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
    """What is held of a prompt: the first `count` rows of `rows` are about its first tokens."""

    rows: AlignedRows
    count: int

    @classmethod
    def of(cls, rows: AlignedRows | None, tokens: int) -> RowPrefix | None:
        """What `rows` have of a prompt that begins with `tokens` tokens of their generation."""
        if rows is None:
            return None
        count = min(len(rows), tokens)
        # What shares them has them from their owner: else unrelated rollouts of one prompt would hang on each other.
        while rows.parent is not None and count <= rows.start:
            rows = rows.parent
        return cls(rows, count) if count and rows.complete(count) else None


def first_prefix(line: Iterable[tuple[TrajectoryRows | None, int]]) -> RowPrefix | None:
    """Of a trajectory and those it continues, each with how many of a prompt's first tokens it has: the rows held."""
    prefixes = (RowPrefix.of(each.rows, tokens) for each, tokens in line if each is not None)
    return next((prefix for prefix in prefixes if prefix is not None), None)


class UncheckedRows(Protocol):
    """Rows that came with an answer, not yet checked against its tokens."""

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        """All rows of the answer, whose prompt and output are `tokens`; they live for as long as somebody has them.

        Raises:
            InvalidTrajectory: they do not fit; the invariant names how.
        """
        ...


class TrajectoryRows(NamedTuple):
    """The rows of a trajectory, or why it has none."""

    rows: AlignedRows | None
    reason: str | None = None


#: Of a trajectory, by kind; a kind that nobody captures is not in it.
RowsByKind = Mapping[RowKind, TrajectoryRows]
NO_ROWS: RowsByKind = MappingProxyType({})


@dataclass
class RowDelivery:
    """One request's, between the layer that holds its trajectory and the layer that captures a kind of rows."""

    kind: RowKind
    prefixes: Sequence[RowPrefix | None] = ()  # by prompt
    per_prompt: int = 1  # answers to each prompt
    unchecked: dict[int, UncheckedRows] = field(default_factory=dict)  # by answer
    missing: str | None = None  # why an answer that is not in `unchecked` has no rows

    @contextmanager
    def left_on(self, exchange: Exchange) -> Iterator[RowDelivery]:
        """While the inner app is called, and its answers are taken. Nothing of it stays on the exchange afterwards."""
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
        """The one that a layer has left for this kind, if one has."""
        delivery: RowDelivery | None = exchange.notes.get(_note(kind))
        return delivery

    def prefix_for(self, answer: int) -> RowPrefix | None:
        """What is held of the prompt of an answer."""
        prompt = self.prompt_of(answer)
        return self.prefixes[prompt] if prompt < len(self.prefixes) else None

    def prompt_of(self, answer: int) -> int:
        """Answers are prompt-major."""
        return answer // self.per_prompt

    def take(self, answer: int, tokens: int, rid: str | None = None) -> TrajectoryRows:
        """The rows of an answer of `tokens` tokens, prompt included."""
        unchecked = self.unchecked.pop(answer, None)
        if unchecked is None:
            return TrajectoryRows(None, self.missing or "the worker sent none with this answer")
        try:
            return TrajectoryRows(unchecked.align(tokens, rid))
        except InvalidTrajectory as error:
            return TrajectoryRows(None, str(error))


class RowDeliveries(dict[RowKind, RowDelivery]):
    """One request's, of every kind that is captured."""

    @classmethod
    def captured(
        cls,
        channels: Mapping[RowKind, RowChannel],
        prefixes: Callable[[RowKind], Sequence[RowPrefix | None]],
        *,
        per_prompt: int = 1,
        missing: str | None = None,
    ) -> RowDeliveries:
        """Those of the kinds that some layer captures.

        Args:
            prefixes: gives what is held of each prompt.
            missing: why an answer has no rows that come with it.
        """
        kinds = [kind for kind, channel in channels.items() if channel.captures]
        return cls({kind: RowDelivery(kind, prefixes(kind), per_prompt=per_prompt, missing=missing) for kind in kinds})

    @contextmanager
    def left_on(self, exchange: Exchange) -> Iterator[None]:
        """As `RowDelivery.left_on`."""
        with ExitStack() as stack:
            for delivery in self.values():
                stack.enter_context(delivery.left_on(exchange))
            yield

    def take(self, answer: int, tokens: int, rid: str | None = None) -> RowsByKind:
        """As `RowDelivery.take`."""
        if not self:
            return NO_ROWS
        return {kind: delivery.take(answer, tokens, rid) for kind, delivery in self.items()}


def _note(kind: RowKind) -> str:
    return f"{NOTE}.{kind.name}"


@dataclass(frozen=True)
class RowMatch:
    """A trajectory that a request named, with its rows."""

    rows: TrajectoryRows
    tokens: int
    rid: str | None = None


@dataclass(frozen=True)
class RowSource:
    """Finds the trajectory that a request for rows names; raises NotFound or BadRequest. `fields` are those that it
    reads besides the one it is named by, which is a string. Of a router of several processes, `require` raises
    Elsewhere where another has what that string names; without it, all have to be asked. `bring` is awaited behind it,
    with that string: what is held outside of memory can be read."""

    find: Callable[[Mapping[str, Any]], RowMatch]
    fields: tuple[str, ...] = ()
    require: Callable[[Scope, str], Awaitable[None]] | None = None
    bring: Callable[[str], Awaitable[None]] | None = None


class RowChannel:
    """`router.rows[kind]`: where the layers of one stack find each other for one kind of rows."""

    def __init__(self, kind: RowKind) -> None:
        self.kind = kind
        #: The model's, where the layer that captures knows it, and the option of that layer that says it.
        self.shape: RowShape | None = None
        self.shape_option = ""
        #: Whether a layer captures.
        self.captures = False
        #: Bytes that it keeps at most.
        self.max_bytes = 0
        #: Its own way to keep rows that were had before: own rows, the first one's number, those before, and the
        #: generation's id.
        self.hold: Callable[[RowArray, int, AlignedRows | None, str | None], AlignedRows] | None = None
        #: Hears of rows that it let go of for want of room.
        self.when_evicted: Callable[[AlignedRows], None] = lambda rows: None
        #: Is awaited with the id of a generation that it does not know: what is held outside of memory can be read.
        self.bring_rid: Callable[[str], Awaitable[None]] | None = None
        #: By the field that names a trajectory in a request ("text", "session_id").
        self.sources: dict[str, RowSource] = {}

    def array(self, rows: AlignedRows, start: int, stop: int) -> RowArray:
        """Rows `[start, stop)`, [stop - start, layers, top_k], of the smallest type that holds them; where the shape is
        not known, [stop - start, layers * top_k].

        Raises:
            InvalidTrajectory: some are missing or evicted.
        """
        flat = rows.array(start, stop)
        return flat if self.shape is None else self.shape.reshape(flat)

    def describe(self) -> dict[str, int | None] | None:
        """The model's shape as `layers`, `top_k` and the number of its ids to choose from, where it is known."""
        if self.shape is None:
            return None
        return {"layers": self.shape.layers, "top_k": self.shape.top_k, self.kind.ids: self.shape.choices}


# Rows as bytes

#: Why a trajectory that was read back has no rows, where none were written.
NOT_WRITTEN = "the router was restarted since, and --state-rows was off"
#: Of a number, the lower bits that tell the kind by its place in `KINDS`.
KIND_BITS = 4


def number_of_rows(kind: RowKind, number: int) -> int:
    """Return the number of the large blob that has the rows of a generation with this number."""
    return number << KIND_BITS | KINDS.index(kind)


def generation_of_rows(number: int) -> tuple[RowKind, int]:
    """Return what `number_of_rows` was given. Raises IndexError where it was nothing."""
    return KINDS[number & (1 << KIND_BITS) - 1], number >> KIND_BITS


def can_be_written(rows: AlignedRows, parent: int | None) -> bool:
    """Whether rows can be read as far as `written_rows` has to."""
    return rows.complete() if _whole(rows, parent) else rows.held or len(rows) == rows.start


def written_rows(rows: AlignedRows, parent: int | None) -> bytes:
    """Own rows behind those of the generation with the number `parent`; without one, all that it has.

    Raises:
        InvalidTrajectory: they are no longer held.
    """
    start = 0 if _whole(rows, parent) else rows.start
    own = rows.array(start)
    own = own.astype(own.dtype.newbyteorder("<"), copy=False)
    header = {"start": start, "width": own.shape[1], "type": own.dtype.str, "parent": parent}
    return with_header(header, [own.tobytes()])


def _whole(rows: AlignedRows, parent: int | None) -> bool:
    """Whether rows are repeated that are another generation's."""
    return parent is None and rows.parent is not None


def parent_of(data: bytes) -> int | None:
    """The number of the generation whose rows these go on from.

    Raises:
        KeyError, ValueError: they are none.
    """
    parent: int | None = header_of(data)[0]["parent"]
    return parent


def are_kept(channels: Mapping[RowKind, RowChannel]) -> bool:
    """Return whether a layer keeps rows that are read again."""
    return any(channel.hold is not None for channel in channels.values())


def read_rows(
    data: bytes | None,
    kind: RowKind,
    before: Callable[[int], TrajectoryRows],
    channels: Mapping[RowKind, RowChannel],
    rid: str | None = None,
) -> TrajectoryRows:
    """The rows that were written so, kept by the layer that captures them now.

    Args:
        before: gives the rows of the generation with a number, which were read before.
        rid: of the generation.

    Raises:
        KeyError, IndexError, ValueError: they are none, or missing.
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
