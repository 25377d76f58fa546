"""What a prefill half says in its answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import FINISH_REASON, MALFORMED, VERSION_NAMED, UnreadableAnswer, is_abort
from miles_router.engines.events import Event, EventReader
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.engines.scan import Field, Incomplete

ABORTED = b"Aborted by AbortReq"
COMPLETION_TOKENS = Field("completion_tokens")
Outcome = Literal["handed_over", "aborted", "partly_aborted", "failed"]


@dataclass(frozen=True)
class PrefillAnswer:
    """What the prefill half says.

    Attributes:
        outcome: `handed_over`: the decode half has what it needs; `aborted`: all of its generations were;
            `partly_aborted`; `failed`: it says why, in place of an answer.
        version: the weights that sampled the first tokens; None where it does not say.
        several_versions: not all were sampled by the same.
    """

    body: bytes
    rows: RowStrings
    outcome: Outcome
    version: str | None = None
    several_versions: bool = False
    streamed: bool = False

    @classmethod
    def read(cls, path: str, body: bytes, rows: RowStrings, *, streamed: bool) -> PrefillAnswer:
        """What an answer with status 200 says, without parsing it; `rows` were taken out of it.

        Raises:
            UnreadableAnswer: it is none, or has more than the first token.
        """
        try:
            finishes = [finish for finish in FINISH_REASON.values(body) if finish is not None]
            versions = {str(version) for version in VERSION_NAMED.values(body) if version is not None}
            if path in (paths.GENERATE, paths.CHAT) and any(count > 1 for count in _counts(body)):
                raise UnreadableAnswer("token_counts_disagree", "more than the first token: it is no prefill half")
        except Incomplete as error:
            raise UnreadableAnswer("incomplete", str(error)) from error
        version = versions.pop() if len(versions) == 1 else None
        return cls(body, rows, _outcome(finishes, body, streamed=streamed), version, bool(versions), streamed)

    def metas(self) -> dict[int, Mapping[str, Any]]:
        """`meta_info` of each of its answers, by its place.

        Raises:
            UnreadableAnswer: it is none of the engine's.
        """
        if not self.streamed:
            return dict(enumerate(metas_of(loads(self.body))))
        reader = EventReader()
        events = [Event.read(raw).parse() for raw in reader.feed(self.body)]
        return {index_of(event): meta_of(event) for event in events if event is not None}


def _outcome(finishes: Sequence[object], body: bytes, *, streamed: bool) -> Outcome:
    aborted = sum(map(is_abort, finishes))
    if any(map(_fails, finishes)) or (streamed and _tells_error(body)):
        return "failed"
    if not aborted:
        return "handed_over"
    return "aborted" if aborted == len(finishes) else "partly_aborted"


def fails(event: bytes) -> bool:
    """Whether the beginning of a stream says that an engine has failed."""
    try:
        return any(map(_fails, FINISH_REASON.values(event))) or _tells_error(event)
    except Incomplete:
        return False


def says_aborted(refusal: bytes) -> bool:
    """Whether a half says that somebody has aborted what it did for the other one (SGLang, `KVTransferError`)."""
    return ABORTED in refusal


def _counts(body: bytes) -> Iterator[int]:
    return (count for count in COMPLETION_TOKENS.values(body) if isinstance(count, int))


def _fails(finish: object) -> bool:
    """Whether an abort is the engine's own failure."""
    return isinstance(finish, Mapping) and finish.get("status_code") is not None


def _tells_error(body: bytes) -> bool:
    return any(Event.read(raw).is_error for raw in EventReader().feed(body))


def metas_of(parsed: Any) -> Sequence[dict[str, Any]]:
    """`meta_info` of each answer, or of each choice that has one.

    Raises:
        UnreadableAnswer: it is none of the engine's.
    """
    try:
        if isinstance(parsed, list):
            return [answer["meta_info"] for answer in parsed]
        if "meta_info" in parsed:
            return [parsed["meta_info"]]
        return [choice["meta_info"] for choice in parsed.get("choices", ()) if choice.get("meta_info") is not None]
    except MALFORMED as error:
        raise UnreadableAnswer("incomplete", repr(error)) from error


def meta_of(event: Any) -> dict[str, Any]:
    """`meta_info` of an event. Raises as `metas_of`."""
    try:
        meta: dict[str, Any] = event["meta_info"]
    except MALFORMED as error:
        raise UnreadableAnswer("incomplete", repr(error)) from error
    return meta


def index_of(event: Any) -> int:
    """Which generation an event is about."""
    index: int = event.get("index", 0)
    return index


def loads(body: bytes) -> Any:
    """An answer, parsed. Raises as `metas_of`."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnreadableAnswer("incomplete", str(error)) from error
