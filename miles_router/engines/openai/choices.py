"""What an engine's OpenAI endpoints sampled: choices of whole answers, and choices that grow with a stream's chunks, in
one form for all endpoints. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson

from miles_router.engines.answers import MALFORMED, Unreadable, UnreadableAnswer, check_runs, in_words, token_count
from miles_router.engines.client_json import is_too_deep
from miles_router.engines.events import Event
from miles_router.engines.facts import Facts
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import VersionRun


class StreamShortfall(UnreadableAnswer):
    """A stream that ended in order did not tell something, and no other stream of the same engine would."""

    def __init__(self, detail: str, reason: Unreadable = "incomplete") -> None:
        super().__init__(reason, detail)


@dataclass
class Choice:
    """One choice of an answer.

    Attributes:
        message: the assistant's message.
        finish: `stop`, `length`, `tool_calls` or `abort`.
        matched: the token or string that stopped it, where the engine says.
        ids: every id that was sampled; `logprobs` has one for each.
        versions: runs over the ids; empty where no version is known.
        prompt: the ids that it was given, where the engine was asked to tell them.
        facts: what a record of the turn shows beside this; `rid` is the engine's name of the generation.
    """

    index: int
    message: Mapping[str, Any]
    finish: str
    matched: int | str | None
    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[VersionRun]
    prompt: Sequence[int] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def pieces(self) -> tuple[Piece, ...]:
        """The sampled tokens, one piece for each run of a weight version.

        Raises:
            InvalidTrajectory: ids or logprobs are none, or do not fit each other.
            UnreadableAnswer: the versions do not cover the ids.
        """
        whole = Piece.sampled(self.ids, self.logprobs, None)
        if not self.versions:
            return (whole,) if len(whole) else ()
        check_runs(self.versions, len(whole))
        return tuple(
            Piece(part.tokens, part.logprobs, run.version)
            for run in self.versions
            if len(part := whole.cut(run.start, run.end))
        )


class VersionTrack:
    """Which weight versions sampled the tokens of one choice, as the router sees it while they come: a stream's chunks
    do not say it. Where an update falls into a stream, the boundary is the one that the router saw."""

    def __init__(self) -> None:
        #: None at all if the version of the first tokens was not known.
        self.runs: list[VersionRun] = []
        self._reached = 0

    def reach(self, end: int, version: str | None) -> None:
        """The choice has `end` tokens now. None where the router knows no version, as of a worker just removed."""
        begin, self._reached = self._reached, end
        if end == begin or (begin and not self.runs):
            return
        last = self.runs[-1] if self.runs else None
        if last is not None and version in (None, last.version):
            self.runs[-1] = VersionRun(last.version, last.start, end)
        elif version is not None:
            self.runs.append(VersionRun(version, begin, end))


class GrowingChoice(ABC):
    """One choice as it grows."""

    def __init__(self, rid: str | None) -> None:
        self.rid = rid
        self.tokens = 0
        self.logprobs: list[Any] = []  # as the engine tells them; `Choice.pieces` checks them
        self.finish: str | None = None
        self.matched: int | str | None = None
        self.versions = VersionTrack()

    def add(self, choice: Mapping[str, Any], version: Callable[[], str | None]) -> bool:
        """Take what a chunk says of it, and return whether it brings tokens. Raises one of `MALFORMED`."""
        new = self._add(choice)
        if new:
            self.tokens += new
            self.versions.reach(self.tokens, version())
        if choice.get("finish_reason") is not None:
            self.finish, self.matched = choice["finish_reason"], choice.get("matched_stop")
        return new > 0

    def told_logprobs(self, choice: Mapping[str, Any], name: str) -> list[Any]:
        """Return the list of this name among a choice's logprobs; empty where it tells none.

        Raises:
            UnreadableAnswer: what it tells is no list.
        """
        told = choice.get("logprobs")
        entries = told.get(name) if isinstance(told, Mapping) else told
        if entries is not None and not isinstance(entries, list):
            position = len(self.logprobs)
            raise UnreadableAnswer("invalid_tokens", f"position {position}: the logprobs from there on are no list")
        return entries or []

    @abstractmethod
    def _add(self, choice: Mapping[str, Any]) -> int:
        """How many tokens it brings."""


Growing = TypeVar("Growing", bound=GrowingChoice)


class GrowingChoices(ABC, Generic[Growing]):
    """The choices of a streamed answer, put together from its chunks."""

    def __init__(self) -> None:
        #: The choices that have come, by their indices.
        self.growing: dict[int, Growing] = {}
        self._keeps_chunks = False  # beside what they say of choices
        #: The fields that every chunk has, where choices may be carried on.
        self.envelope: dict[str, Any] = {}
        #: Tokens of all prompts that the engine says it read; None where it does not say.
        self.prompt_tokens: int | None = None

    def add(self, chunk: Mapping[str, Any], version: Callable[[], str | None]) -> bool:
        """Take a chunk, and return whether it brings tokens.

        Args:
            version: tells the weight version that the worker has now.

        Raises:
            UnreadableAnswer: it is no chunk of this endpoint.
        """
        try:
            tokens = False
            for choice in chunk["choices"]:
                growing = self.growing.get(choice["index"])
                if growing is None:  # the last chunks of several choices all have the id of one of them
                    growing = self.growing[choice["index"]] = self._begin(chunk.get("id"))
                tokens = growing.add(choice, version) or tokens
            if self._keeps_chunks or "sglext" in chunk:
                self._add(chunk)
            if chunk.get("usage"):
                self.prompt_tokens = token_count(chunk["usage"])
            return tokens
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", f"a chunk that is none: {in_words(error)}") from error

    @property
    def versions(self) -> set[str]:
        """The weight versions that the router saw."""
        return {str(run.version) for growing in self.growing.values() for run in growing.versions.runs}

    @property
    def tokens(self) -> int:
        """Tokens of all choices that have come."""
        return sum(growing.tokens for growing in self.growing.values())

    @property
    def ended(self) -> set[int]:
        """The choices that have a finish reason, by their indices."""
        return {index for index, growing in self.growing.items() if growing.finish is not None}

    def choices(self) -> list[Choice]:
        """What was sampled, in the order of the choices; their versions are those that the router saw.

        Raises:
            UnreadableAnswer: the stream did not tell it all.
        """
        try:
            return self._choices()
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error

    @abstractmethod
    def _begin(self, rid: str | None) -> Growing: ...

    def _add(self, chunk: Mapping[str, Any]) -> None:
        """What a chunk says beside its choices."""

    @abstractmethod
    def _choices(self) -> list[Choice]: ...


def read_chunk(event: Event) -> dict[str, Any]:
    """Return the JSON object of a stream's event.

    Raises:
        UnreadableAnswer: it is none; `incomplete` where the event may pass unread.
    """
    chunk = event.parse()
    if chunk is None and _is_no_json(event.data):
        raise UnreadableAnswer("not_json", "a chunk that is none: it is no JSON, or has a number that JSON has not")
    if not isinstance(chunk, dict):
        raise UnreadableAnswer("incomplete", "a chunk that is none")
    if is_too_deep(event.data, chunk):
        raise UnreadableAnswer("incomplete", "a chunk is nested too deep")
    return chunk


def _is_no_json(data: bytes) -> bool:
    """Return False for JSON that is nested too deep to read: such a chunk passes unrecorded, as others do."""
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return not error.msg.startswith("depth limit exceeded")
    return False


#: `(answer, fields)`: a whole answer and the request's fields to chunks.
Chunks = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[dict[str, Any]]]


class OpenAIEndpoint(Protocol):
    """One endpoint of the engine: how it is asked so that its answers can be recorded, and how they are read."""

    path: str
    #: Whether a prompt's ids take the place of what a client asked; else they are what it asked.
    takes_ids: bool
    #: Why a whole answer of several choices does not tell the rows of each; None where it does.
    rows_missing: str | None
    #: Where a request says how many tokens its answer may have; what stands first counts.
    length_fields: tuple[str, ...]
    #: Tokens of an answer to a request that does not say; None: as many as fit.
    tokens_by_default: int | None
    #: The names of events that are chunks.
    chunk_events: frozenset[bytes]

    def request(self, fields: Mapping[str, Any], *, stream: bool, ids: Sequence[bytes] | None = None) -> bytes:
        """The request for the engine: a client's, with what recording needs. `ids`, a list in JSON in pieces, take
        the place of its messages."""
        ...

    def choices(self, answer: Mapping[str, Any]) -> list[Choice]:
        """What a whole answer says was sampled.

        Raises:
            UnreadableAnswer: it lacks something, or contradicts itself.
        """
        ...

    def growing(self, *, may_be_cut: bool = False) -> GrowingChoices[Any]:
        """Return what takes a stream's chunks.

        Args:
            may_be_cut: whether a choice may be carried on; only chat's may.
        """
        ...

    def as_asked(self, answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer whose choices were read, with what its client asked for itself."""
        ...

    def chunk_as_asked(self, chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """A chunk that was added, with what its client asked for itself; None if it says nothing else."""
        ...

    def shortfall(self, facts: Facts) -> str | None:
        """What streams of an engine with these facts do not tell that recording needs; None where they tell all, or
        where only a stream will show it."""
        ...

    @property
    def chunks(self) -> Chunks | None:
        """Gives a whole answer as the chunks of a stream, for engines whose streams fall short; None where none do."""
        ...
