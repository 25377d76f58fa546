"""How the layers of a stack hand each other routed experts, the expert ids that a mixture-of-experts engine chose.

One layer captures: it asks the engine for rows and takes them out of answers. Layers around it hold trajectories, and
keep a trajectory's rows for as long as they keep the trajectory:

    outer layer    Handover(...).left_on(exchange)   ──►  the engine is asked for the rows that are not held yet
    outer layer    handover.take(answer, tokens)     ◄──  rows, held against the tokens of that answer
    outer layer    router.experts.sources[...]       ◄──  `POST /routed_experts` of a trajectory of that layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from miles_router.asgi.exchange import Exchange
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.experts import ExpertRows, ExpertShape, Rows

NOTE = "miles_router.middlewares.experts"


@dataclass(frozen=True)
class Held:
    """What is held of a prompt: the first `count` rows of `rows` are about its first tokens."""

    rows: ExpertRows
    count: int

    @classmethod
    def of(cls, rows: ExpertRows | None, tokens: int) -> Held | None:
        """What `rows` have of a prompt that begins with `tokens` tokens of their generation."""
        if rows is None:
            return None
        count = min(len(rows), tokens)
        # What shares them has them from their owner: else unrelated rollouts of one prompt would hang on each other.
        while rows.parent is not None and count <= rows.start:
            rows = rows.parent
        return cls(rows, count) if count and rows.complete(count) else None


def first_held(line: Iterable[tuple[Taken | None, int]]) -> Held | None:
    """Of a trajectory and those it continues, each with how many of a prompt's first tokens it has: the rows held."""
    found = (Held.of(taken.rows, tokens) for taken, tokens in line if taken is not None)
    return next((held for held in found if held is not None), None)


class Captured(Protocol):
    """Rows that came with an answer, not yet held against its tokens."""

    def rows(self, tokens: int, rid: str | None) -> ExpertRows:
        """All rows of the answer, whose prompt and output are `tokens`; they live for as long as somebody has them.

        Raises:
            InvalidTrajectory: they do not fit; the invariant names how.
        """
        ...


class Taken(NamedTuple):
    """The rows of a trajectory, or why it has none."""

    rows: ExpertRows | None
    reason: str | None = None


@dataclass
class Handover:
    """One request's, between the layer that holds its trajectory and the layer that captures."""

    held: Sequence[Held | None] = ()  # by prompt
    per_prompt: int = 1  # answers to each prompt
    captured: dict[int, Captured] = field(default_factory=dict)  # by answer
    missing: str | None = None  # why an answer that is not in `captured` has no rows

    @contextmanager
    def left_on(self, exchange: Exchange) -> Iterator[Handover]:
        """While the inner app is called, and its answers are taken. Nothing of it stays on the exchange afterwards."""
        exchange.notes[NOTE] = self
        try:
            yield self
        finally:
            del exchange.notes[NOTE]
            self.held = ()
            self.captured.clear()

    @classmethod
    def of(cls, exchange: Exchange) -> Handover | None:
        """The one that was left, if a layer has left one."""
        handover: Handover | None = exchange.notes.get(NOTE)
        return handover

    def held_for(self, answer: int) -> Held | None:
        """What is held of the prompt of an answer."""
        prompt = self.prompt_of(answer)
        return self.held[prompt] if prompt < len(self.held) else None

    def prompt_of(self, answer: int) -> int:
        """Answers are prompt-major."""
        return answer // self.per_prompt

    def take(self, answer: int, tokens: int, rid: str | None = None) -> Taken:
        """The rows of an answer of `tokens` tokens, prompt included."""
        captured = self.captured.pop(answer, None)
        if captured is None:
            return Taken(None, self.missing or "the worker sent none with this answer")
        try:
            return Taken(captured.rows(tokens, rid))
        except InvalidTrajectory as error:
            return Taken(None, str(error))


@dataclass(frozen=True)
class Found:
    """A trajectory that a source was asked for."""

    taken: Taken
    tokens: int
    rid: str | None = None


@dataclass(frozen=True)
class Source:
    """Finds the trajectory that a request for routed experts names; raises NotFound or BadRequest. `fields` are those
    that it reads besides the one it is named by, which is a string."""

    find: Callable[[Mapping[str, Any]], Found]
    fields: tuple[str, ...] = ()


class Experts:
    """`router.experts`: where the layers of one stack find each other."""

    def __init__(self) -> None:
        #: The model's, where the layer that captures was told it.
        self.shape: ExpertShape | None = None
        #: Whether a layer captures.
        self.captured = False
        #: By the field that names a trajectory in a request ("text", "session_id").
        self.sources: dict[str, Source] = {}

    def array(self, rows: ExpertRows, start: int, stop: int) -> Rows:
        """Rows `[start, stop)`, [stop - start, layers, top_k], of the smallest type that holds them; where the shape is
        not known, [stop - start, layers * top_k].

        Raises:
            InvalidTrajectory: some are missing or evicted.
        """
        flat = rows.array(start, stop)
        return flat if self.shape is None else self.shape.shaped(flat)
