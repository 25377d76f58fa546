"""The sub-API for episodes, which the dashboard and `GET /router/run` show. A middleware with episodes registers them:

    router.episodes["session"] = source      an `EpisodeSource`

The router reads pages of episodes, newest first, and single episodes by id. The router decides whether texts and ids
are shown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from miles_router.fleet.worker_url import parse_worker_url
from miles_router.metrics.run import INTERVALS, RunSeries
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.pieces import Mask
from miles_router.trajectory.sample import ShapedRows, Status

__all__ = [
    "ENDED",
    "IDLE",
    "INTERVALS",
    "OTHER_REASON",
    "RUNNING",
    "STATES",
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
    "parse_worker_url",
    "version_spans",
]

#: The sort key of an episode: its start in Unix seconds, and its id.
EpisodePlace = tuple[float, str]
RUNNING, WAITING, IDLE, ENDED = STATES = ("running", "waiting", "idle", "ended")
#: Replaces free-text reasons, whose number is unbounded.
OTHER_REASON = "other"
#: The most places in one block of a shelf.
BLOCK = 512
Held = TypeVar("Held")


class Facets(NamedTuple):
    """The fields of an episode that list filters read. They must be cheap to compute."""

    state: str
    group: str | None
    reasons: Collection[str]
    workers: Collection[str]


@dataclass(frozen=True)
class TokenCounts:
    """The token counts of an episode.

    Attributes:
        all: tokens that were given or sampled; shared tokens count once.
        sampled: tokens that were sampled.
        trained: sampled tokens in the loss of the trainer's samples; None if the loss mask is decided per token.
    """

    all: int
    sampled: int
    trained: int | None


@dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """An episode's row in a list. docs/http-api.md describes each field; times are Unix seconds."""

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
    """One generation of an episode. docs/http-api.md describes each field."""

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
    parsed: str | Sequence[str] | None = None
    cached_tokens: int | None = None
    worker: str | None = None
    rid: str | None = None
    request_id: str | None = None
    turn_id: str | None = None
    asked_at: float | None = None
    first_token_at: float | None = None
    answered_at: float | None = None
    waited_s: float = 0.0
    rewards: Sequence[Mapping[str, Any]] = ()


def version_spans(pieces: Iterable[Piece], start: int, worker: str | None) -> list[dict[str, Any]]:
    """Return `TurnRow.spans`: the tokens sampled from position `start` on, one span per run of equal weight version."""
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
    """The n tokens from the first prompt to the end of a turn.

    Attributes:
        leaf: the number of the turn.
        trajectory: the trajectory of these tokens.
        loss_mask: returns uint8 [n], 1 = in the loss of this turn's sample. The call may be slow.
        turns: the turns on this path; `turn`, `start` and `end` locate the sampled tokens, other fields are shown.
        response_length: the number of tokens after the first prompt.
        status: the status of the sample.
        experts: returns rows `[start, stop)` of routed experts, integers [stop - start, layers, top_k]; None if there
            are no rows.
        about: further fields to show.
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
    """An episode in a list, in its present state."""

    @property
    def place(self) -> EpisodePlace:
        """The episode's sort key."""
        ...

    def facets(self) -> Facets: ...

    def row(self) -> EpisodeRow: ...


class EpisodeView(ListedEpisode, Protocol):
    """An episode with its turns and tokens, in its present state."""

    def about(self) -> Mapping[str, Any]:
        """Return the fields shown next to the turns: `metadata`, `contract`, `untraced`."""
        ...

    def turns(self) -> Iterable[TurnRow]:
        """Return the turns, oldest first, so that each turn follows its parent."""
        ...

    def line(self, leaf: int | None) -> EpisodeLine:
        """Return the tokens up to a turn, by default the last leaf.

        Raises:
            BadRequest: there is no such turn.
        """
        ...


class EpisodeSource(Protocol):
    """The episodes of one middleware. `reasons` are the fixed codes that its turns may have, without free texts."""

    @property
    def reasons(self) -> Collection[str]: ...

    async def newest(self, before: EpisodePlace | None, most: int) -> Sequence[ListedEpisode]:
        """Return at most `most` episodes before a place (None: the end), newest first.

        The list is shorter than `most` only if no more episodes exist.
        """
        ...

    async def find(self, episode_id: str) -> EpisodeView | None:
        """Return the episode with this id, in memory or on disk; None if it is unknown."""
        ...


class EpisodeShelf(Generic[Held]):
    """A collection sorted by start time. Adding or removing an item costs work for one block, not for the whole."""

    def __init__(self) -> None:
        self._blocks: list[list[EpisodePlace]] = []
        self._held: dict[EpisodePlace, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, place: EpisodePlace, held: Held) -> None:
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
        """Remove the item at a place; do nothing if there is no item."""
        if self._held.pop(place, None) is not None:
            at = self._block_of(place)
            block = self._blocks[at]
            del block[bisect_left(block, place)]
            if not block:
                del self._blocks[at]

    def newest(self, before: EpisodePlace | None, most: int) -> list[Held]:
        """Return at most `most` items before a place (None: the end), newest first."""
        found: list[EpisodePlace] = []
        at = len(self._blocks) - 1 if before is None else self._block_of(before)
        while at >= 0 and len(found) < most:
            block = self._blocks[at]
            cut = len(block) if before is None else bisect_left(block, before)
            found += block[max(cut - (most - len(found)), 0) : cut][::-1]
            at -= 1
        return [self._held[place] for place in found]

    def oldest(self) -> EpisodePlace:
        """Return the first place.

        Raises:
            IndexError: the shelf is empty.
        """
        return self._blocks[0][0]

    def _block_of(self, place: EpisodePlace) -> int:
        """Return the index of the last block that begins at or before a place; -1 if no block does."""
        return bisect_right(self._blocks, place, key=lambda block: block[0]) - 1
