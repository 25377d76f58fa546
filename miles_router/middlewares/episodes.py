"""The sub-API for episodes: what the dashboard and `GET /router/run` show. A layer that holds some tells the router:

    router.episodes["session"] = source      an `EpisodeSource`

The router asks for pages of them, newest first, and for one by its id; whether texts and ids are shown is its affair.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from miles_router.metrics.run import RunSeries
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.pieces import Mask
from miles_router.trajectory.sample import ShapedRows, Status

__all__ = [
    "ENDED",
    "IDLE",
    "RUNNING",
    "WAITING",
    "EpisodeLine",
    "EpisodePlace",
    "EpisodeRow",
    "EpisodeShelf",
    "EpisodeSource",
    "EpisodeView",
    "Facets",
    "ListedEpisode",
    "RunSeries",
    "TokenCounts",
    "TurnRow",
    "version_spans",
]

#: Where an episode stands in a list of all: when it began, and its id.
EpisodePlace = tuple[float, str]
RUNNING, WAITING, IDLE, ENDED = STATES = ("running", "waiting", "idle", "ended")
#: In place of a reason in words, of which there may be any number.
OTHER_REASON = "other"
#: Places in one block of a shelf.
BLOCK = 512
Held = TypeVar("Held")


class Facets(NamedTuple):
    """What filters look at: cheap to tell."""

    state: str
    group: str | None
    reasons: Collection[str]
    workers: Collection[str]


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of an episode: `all` that were given or sampled, shared ones once; those `sampled`; of these, those in the
    loss of the samples that a trainer gets, or None where that is decided token by token."""

    all: int
    sampled: int
    trained: int | None


@dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """Its row in a list. docs/http-api.md says what each field is; times are Unix seconds."""

    id: str
    state: str
    group: str | None
    label: str | None
    model: str | None
    turns: int
    under_way: int
    segments: int
    leaves: int
    reasons: Mapping[str, int]
    tokens: TokenCounts
    finish_reason: str | None
    end_reason: str | None
    weight_versions: Sequence[str]
    workers: Sequence[str]
    started_at: float
    last_used_at: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class TurnRow:
    """One generation of an episode. docs/http-api.md says what each field is."""

    turn: int
    parent: int | None
    reason: str | None = None
    edit: Mapping[str, Any] | None = None
    side_call: bool = False
    choice: int = 0
    prompt_tokens: int
    given_tokens: int
    dropped_tokens: int
    start: int
    end: int
    spans: Sequence[Mapping[str, Any]]
    finish_reason: str | None
    cached_tokens: int | None = None
    worker: str | None = None
    rid: str | None = None
    request_id: str | None = None
    turn_id: str | None = None
    asked_at: float | None = None
    first_token_at: float | None = None
    answered_at: float | None = None
    waited_s: float = 0.0


def version_spans(pieces: Iterable[Piece], start: int, worker: str | None) -> list[dict[str, Any]]:
    """What a turn sampled from a position on, by the weights that did: `TurnRow.spans`."""
    spans: list[dict[str, Any]] = []
    for piece in pieces:
        begin, start = start, start + len(piece)
        if spans and spans[-1]["version"] == piece.version:
            spans[-1]["end"] = start
        else:
            spans.append({"start": begin, "end": start, "version": piece.version, "worker": worker})
    return spans


@dataclass(frozen=True, kw_only=True)
class EpisodeLine:
    """The tokens up to the end of a turn; n of them.

    Attributes:
        leaf: the turn.
        trajectory: of the line.
        loss_mask: makes uint8 [n], 1 = in the loss of the sample of this leaf. It may take its time.
        turns: of the line, `turn`, `start` and `end` of what each sampled, and more to show.
        response_length: tokens behind the first prompt.
        status: of the sample.
        experts: rows `[start, stop)` of routed experts, integers [stop - start, layers, top_k]; None where there are
            none.
        about: what else there is to say.
    """

    leaf: int
    trajectory: Trajectory
    loss_mask: Callable[[], Mask]
    turns: Sequence[Mapping[str, Any]]
    response_length: int
    status: Status
    experts: Callable[[int, int], ShapedRows | None] = lambda start, stop: None
    about: Mapping[str, Any] = field(default_factory=dict)


class ListedEpisode(Protocol):
    """One episode in a list, as it is now."""

    @property
    def place(self) -> EpisodePlace:
        """Where it stands."""
        ...

    def facets(self) -> Facets:
        """What filters look at."""
        ...

    def row(self) -> EpisodeRow:
        """Its row."""
        ...


class EpisodeView(ListedEpisode, Protocol):
    """One episode, as it is now."""

    def about(self) -> Mapping[str, Any]:
        """What stands beside its turns: `metadata`, `contract`, `untraced`."""
        ...

    def turns(self) -> Iterable[TurnRow]:
        """Its turns, oldest first: parents stand before those that go on from them."""
        ...

    def line(self, leaf: int | None) -> EpisodeLine:
        """The tokens up to a turn, by default the last leaf.

        Raises:
            BadRequest: there is no such turn.
        """
        ...


class EpisodeSource(Protocol):
    """A layer's episodes. `reasons`: those that its turns may have, but for words."""

    @property
    def reasons(self) -> Collection[str]: ...

    async def newest(self, before: EpisodePlace | None, most: int) -> Sequence[ListedEpisode]:
        """At most so many of those before a place, by default the end, the last of them first; fewer only where there
        are no more."""
        ...

    async def find(self, episode_id: str) -> EpisodeView | None:
        """One by its id, wherever it is held."""
        ...


class EpisodeShelf(Generic[Held]):
    """What a layer holds, in the order of beginning. Whoever comes or goes costs a block, however many there are."""

    def __init__(self) -> None:
        self._blocks: list[list[EpisodePlace]] = []
        self._held: dict[EpisodePlace, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, place: EpisodePlace, held: Held) -> None:
        """Something has come."""
        self._held[place] = held
        at = max(self._block_of(place), 0)
        if not self._blocks:
            self._blocks.append([])
        block = self._blocks[at]
        if len(block) >= BLOCK:
            half = BLOCK if place > block[-1] else BLOCK // 2
            self._blocks.insert(at + 1, block[half:])
            del block[half:]
            block = self._blocks[at + (half == BLOCK or place > block[-1])]
        insort(block, place)

    def remove(self, place: EpisodePlace) -> None:
        """It has gone; harmless where it was not there."""
        if self._held.pop(place, None) is not None:
            at = self._block_of(place)
            block = self._blocks[at]
            del block[bisect_left(block, place)]
            if not block:
                del self._blocks[at]

    def newest(self, before: EpisodePlace | None, most: int) -> list[Held]:
        """At most so many of those before a place, by default the end, the last of them first."""
        found: list[EpisodePlace] = []
        at = len(self._blocks) - 1 if before is None else self._block_of(before)
        while at >= 0 and len(found) < most:
            block = self._blocks[at]
            cut = len(block) if before is None else bisect_left(block, before)
            found += block[max(cut - (most - len(found)), 0) : cut][::-1]
            at -= 1
        return [self._held[place] for place in found]

    def oldest(self) -> EpisodePlace:
        """The first place of all; there must be one."""
        return self._blocks[0][0]

    def _block_of(self, place: EpisodePlace) -> int:
        """The last block that begins at or before a place; -1 where none does."""
        return bisect_right(self._blocks, place, key=lambda block: block[0]) - 1
