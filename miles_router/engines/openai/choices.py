"""Choices of whole and streamed answers, in one form for all OpenAI endpoints of an engine. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson

from miles_router.engines.answers import MALFORMED, Unreadable, UnreadableAnswer, check_runs, in_words, token_count
from miles_router.engines.events import Event
from miles_router.engines.facts import Facts
from miles_router.engines.json_bytes import is_too_deep
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import VersionRun
from miles_router.trajectory.sampling_mask import SamplingMask


class StreamShortfall(UnreadableAnswer):
    """A complete stream lacks data that a record needs, as every stream of the same engine process does."""

    def __init__(self, detail: str, reason: Unreadable = "incomplete") -> None:
        super().__init__(reason, detail)


@dataclass
class Choice:
    """One choice of an answer.

    Attributes:
        message: the assistant's message.
        finish: `stop`, `length`, `tool_calls` or `abort`.
        matched: the token or string that stopped the choice, if the engine reports it.
        ids: every sampled id; `logprobs` has one element for each.
        versions: runs of weight versions over the ids; empty if no version is known.
        prompt: the ids of the prompt, if the request asked for them.
        sampling_mask: the sampling mask of the ids; None if the engine did not tell.
        facts: further fields for the record of the turn; `rid` is the engine's name of the generation.
        text: the text of the ids, once it is known.
    """

    index: int
    message: Mapping[str, Any]
    finish: str
    matched: int | str | None
    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[VersionRun]
    prompt: Sequence[int] | None = None
    sampling_mask: SamplingMask | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    text: str | None = None

    def pieces(self) -> tuple[Piece, ...]:
        """Return the sampled tokens, one piece for each run of a weight version.

        Raises:
            InvalidTrajectory: ids or logprobs have an invalid type, or their counts differ.
            UnreadableAnswer: the versions do not cover the ids.
        """
        whole = Piece.sampled(self.ids, self.logprobs, None)
        if self.sampling_mask is not None:
            whole = whole.masked(self.sampling_mask)
        if not self.versions:
            return (whole,) if len(whole) else ()
        check_runs(self.versions, len(whole))
        return tuple(
            part.of_version(run.version) for run in self.versions if len(part := whole.cut(run.start, run.end))
        )


class VersionTrack:
    """The weight versions that sampled the tokens of one choice, as the router observes them while chunks arrive.

    Chunks contain no versions. If the weights change during a stream, the boundary is where the router saw the change.
    """

    def __init__(self) -> None:
        #: Empty if the version of the first tokens was unknown.
        self.runs: list[VersionRun] = []
        self._reached = 0

    def record(self, end: int, version: str | None) -> None:
        """Record that `version` sampled the tokens up to `end`. It is None if unknown, as for a removed worker."""
        begin, self._reached = self._reached, end
        if end == begin or (begin and not self.runs):
            return
        last = self.runs[-1] if self.runs else None
        if last is not None and version in (None, last.version):
            self.runs[-1] = VersionRun(last.version, last.start, end)
        elif version is not None:
            self.runs.append(VersionRun(version, begin, end))


class GrowingChoice(ABC):
    """One choice of an answer, put together from chunks. A whole choice counts as one chunk."""

    def __init__(self, rid: str | None) -> None:
        self.rid = rid
        self.tokens = 0
        self.logprobs: list[Any] = []  # unchecked: `Choice.pieces` checks them
        self.finish: str | None = None
        self.matched: int | str | None = None
        self.versions = VersionTrack()

    def add(self, choice: Mapping[str, Any], version: Callable[[], str | None]) -> bool:
        """Append the choice of a chunk. Return True if it contains tokens. Raises one of `MALFORMED`."""
        new = self._add(choice)
        if new:
            self.tokens += new
            self.versions.record(self.tokens, version())
        if choice.get("finish_reason") is not None:
            self.finish, self.matched = choice["finish_reason"], choice.get("matched_stop")
        return new > 0

    def logprob_list(self, choice: Mapping[str, Any], name: str) -> list[Any]:
        """Return the list `name` in a choice's logprobs; empty if there are none.

        Raises:
            UnreadableAnswer: the value is not a list.
        """
        found = choice.get("logprobs")
        entries = found.get(name) if isinstance(found, Mapping) else found
        if entries is not None and not isinstance(entries, list):
            position = len(self.logprobs)
            raise UnreadableAnswer("invalid_tokens", f"position {position}: the logprobs from there on are not a list")
        return entries or []

    @abstractmethod
    def _add(self, choice: Mapping[str, Any]) -> int:
        """Append a chunk's choice. Return the number of its tokens."""


Growing = TypeVar("Growing", bound=GrowingChoice)


class GrowingChoices(ABC, Generic[Growing]):
    """The choices of a streamed answer, put together from its chunks."""

    def __init__(self) -> None:
        #: The choices so far, by their indices.
        self.growing: dict[int, Growing] = {}
        self._keeps_chunks = False  # whether `_add` gets every chunk
        #: The fields that every chunk has; empty if choices cannot be continued.
        self.envelope: dict[str, Any] = {}
        #: The number of prompt tokens that the engine reports; None if it reports none.
        self.prompt_tokens: int | None = None

    def add(self, chunk: Mapping[str, Any], version: Callable[[], str | None]) -> bool:
        """Append a chunk. Return True if it contains tokens.

        Args:
            version: returns the current weight version of the worker; None if unknown.

        Raises:
            UnreadableAnswer: the chunk does not have the form of this endpoint.
        """
        try:
            tokens = False
            for choice in chunk["choices"]:
                growing = self.growing.get(choice["index"])
                if growing is None:  # its first chunk: the last chunks of all choices share one id
                    growing = self.growing[choice["index"]] = self._begin(chunk.get("id"))
                tokens = growing.add(choice, version) or tokens
            if self._keeps_chunks or "sglext" in chunk:
                self._add(chunk)
            if chunk.get("usage"):
                self.prompt_tokens = token_count(chunk["usage"])
            return tokens
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", f"a malformed chunk: {in_words(error)}") from error

    @property
    def versions(self) -> set[str]:
        """The weight versions that the router observed."""
        return {str(run.version) for growing in self.growing.values() for run in growing.versions.runs}

    @property
    def tokens(self) -> int:
        """The number of tokens of all choices so far."""
        return sum(growing.tokens for growing in self.growing.values())

    @property
    def ended(self) -> set[int]:
        """The indices of the choices with a finish reason."""
        return {index for index, growing in self.growing.items() if growing.finish is not None}

    def choices(self) -> list[Choice]:
        """Return the choices in the order of their indices, with the weight versions that the router observed.

        Raises:
            UnreadableAnswer: the stream is incomplete or contradicts itself.
        """
        try:
            return self._choices()
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error

    @abstractmethod
    def _begin(self, rid: str | None) -> Growing: ...

    def _add(self, chunk: Mapping[str, Any]) -> None:
        """Record fields of a chunk other than its choices. Do nothing by default."""

    @abstractmethod
    def _choices(self) -> list[Choice]: ...


def read_chunk(event: Event) -> dict[str, Any]:
    """Return the JSON object of a stream's event.

    Raises:
        UnreadableAnswer: the event is not a JSON object. With reason `incomplete` the event may pass unrecorded.
    """
    chunk = event.parse()
    if chunk is None and _is_no_json(event.data):
        raise UnreadableAnswer("not_json", "a malformed chunk: it is not JSON, or has a number that is not JSON")
    if not isinstance(chunk, dict):
        raise UnreadableAnswer("incomplete", "a malformed chunk: it is not a JSON object")
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


#: Converts a whole answer to chunks. Arguments: the answer, and the fields of the request.
Chunks = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[dict[str, Any]]]


class OpenAIEndpoint(Protocol):
    """One OpenAI endpoint of the engine: writes requests whose answers can be recorded, and reads the answers."""

    path: str
    #: Whether a request may have prompt ids in place of its messages. If not, the client's own prompt is sent.
    takes_ids: bool
    #: The reason why a whole answer of several choices lacks the rows of each choice; None if it has them.
    rows_missing: str | None
    #: The request fields that limit the tokens of an answer, the one with precedence first.
    length_fields: tuple[str, ...]
    #: The token limit of a request without such a field; None: as many as fit.
    tokens_by_default: int | None
    #: The SSE event names of chunks.
    chunk_events: frozenset[bytes]
    #: Request fields that the engine refuses in a stream: such a turn is sampled as a whole answer.
    whole_only: frozenset[str]

    def request(self, fields: Mapping[str, Any], *, stream: bool, ids: Sequence[bytes] | None = None) -> bytes:
        """Return the request for the engine: the client's fields, and the fields that a record needs.

        Args:
            ids: the prompt ids in place of the messages, as pieces of a JSON list.
        """
        ...

    def choices(self, answer: Mapping[str, Any]) -> list[Choice]:
        """Return the choices of a whole answer.

        Raises:
            UnreadableAnswer: a field is missing, or fields contradict each other.
        """
        ...

    def growing(self, *, may_be_cut: bool = False) -> GrowingChoices[Any]:
        """Return an empty answer, to which the chunks of a stream are added.

        Args:
            may_be_cut: whether a choice may be continued after a cut; only chat supports that.
        """
        ...

    def for_client(self, answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole answer with only the fields that the client asked for."""
        ...

    def chunk_for_client(self, chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a chunk with only the fields that the client asked for, or None. May change `chunk` in place."""
        ...

    def shortfall(self, facts: Facts) -> str | None:
        """Return the reason why streams of this engine cannot be recorded; None if they can, or if that is not known
        yet."""
        ...

    @property
    def chunks(self) -> Chunks | None:
        """The conversion of a whole answer to chunks, for engines with a shortfall; None if there are none."""
        ...
