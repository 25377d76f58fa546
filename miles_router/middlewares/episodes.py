"""The sub-API for episodes, which the dashboard and `GET /router/run` show. A middleware that holds episodes registers:

    router.episodes["session"] = source      an `EpisodeSource`

The router asks for pages of episodes, newest first, and for one episode by its id. The router decides whether texts and
token ids are shown.
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

#: The sort key of an episode: when it began (Unix seconds), and its id.
EpisodePlace = tuple[float, str]
RUNNING, WAITING, IDLE, ENDED = STATES = ("running", "waiting", "idle", "ended")
#: Stands for reasons in free text, since their number is unbounded.
OTHER_REASON = "other"
#: Entries in one block of a shelf.
BLOCK = 512
Held = TypeVar("Held")


class Facets(NamedTuple):
    """The properties of an episode that filters use, cheap to compute."""

    state: str
    group: str | None
    reasons: Collection[str]
    workers: Collection[str]


@dataclass(frozen=True)
class TokenCounts:
    """The token counts of an episode.

    Attributes:
        all: given and sampled tokens; tokens that branches share count once.
        sampled: sampled tokens.
        trained: sampled tokens in the loss of the samples for the trainer; None if that is decided token by token.
    """

    all: int
    sampled: int
    trained: int | None


@dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """The row of an episode in a list. docs/http-api.md explains the fields; times are Unix seconds."""

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
    """One generation of an episode. docs/http-api.md explains the fields."""

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
    """Return the spans of a turn (`TurnRow.spans`): its sampled tokens by weight version, from position `start` on."""
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
    """The branch of an episode that ends with a turn; its n tokens from the first prompt on.

    Attributes:
        leaf: the turn.
        trajectory: the branch's trajectory.
        loss_mask: returns uint8 [n], 1 = in the loss of this branch's sample. The call may be slow.
        turns: the turns of the branch, with `turn`, `start` and `end` of the sampled tokens, and more to show.
        response_length: the number of tokens after the first prompt.
        status: the sample's status.
        experts: returns rows `[start, stop)` of routed experts, integers [stop - start, layers, top_k], or None.
        about: further facts to show.
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
    """The present state of one episode in a list."""

    @property
    def place(self) -> EpisodePlace: ...

    def facets(self) -> Facets: ...

    def row(self) -> EpisodeRow: ...


class EpisodeView(ListedEpisode, Protocol):
    """The present state of one episode, with its turns."""

    def about(self) -> Mapping[str, Any]:
        """Return the facts besides the turns: `metadata`, `contract`, `untraced`."""
        ...

    def turns(self) -> Iterable[TurnRow]:
        """Return the turns, oldest first: parents come before their children."""
        ...

    def line(self, leaf: int | None) -> EpisodeLine:
        """Return the branch that ends with a turn, by default with the last leaf.

        Raises:
            BadRequest: there is no such turn.
        """
        ...


class EpisodeSource(Protocol):
    """The episodes of a middleware. `reasons`: the reasons that its turns may have, without those in free text."""

    @property
    def reasons(self) -> Collection[str]: ...

    async def newest(self, before: EpisodePlace | None, most: int) -> Sequence[ListedEpisode]:
        """Return the `most` newest episodes before a place (None: of all), newest first; fewer only at the end."""
        ...

    async def find(self, episode_id: str) -> EpisodeView | None:
        """Return the episode with this id, in memory or on disk, or None."""
        ...


class EpisodeShelf(Generic[Held]):
    """A middleware's episodes sorted by place. Adding and removing costs the time of one block, however many exist."""

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
        """Remove the episode at a place, if there is one."""
        if self._held.pop(place, None) is not None:
            at = self._block_of(place)
            block = self._blocks[at]
            del block[bisect_left(block, place)]
            if not block:
                del self._blocks[at]

    def newest(self, before: EpisodePlace | None, most: int) -> list[Held]:
        """Return the `most` newest episodes before a place (None: of all), newest first."""
        found: list[EpisodePlace] = []
        at = len(self._blocks) - 1 if before is None else self._block_of(before)
        while at >= 0 and len(found) < most:
            block = self._blocks[at]
            cut = len(block) if before is None else bisect_left(block, before)
            found += block[max(cut - (most - len(found)), 0) : cut][::-1]
            at -= 1
        return [self._held[place] for place in found]

    def oldest(self) -> EpisodePlace:
        """Return the first place. The shelf must not be empty."""
        return self._blocks[0][0]

    def _block_of(self, place: EpisodePlace) -> int:
        """Return the index of the last block that begins at or before a place, or -1."""
        return bisect_right(self._blocks, place, key=lambda block: block[0]) - 1
