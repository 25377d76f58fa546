"""Readers for the answer of the prefill half of a pair. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import FINISH_REASON, MALFORMED, VERSION_NAMED, UnreadableAnswer, is_abort
from miles_router.engines.events import Event, EventReader
from miles_router.engines.json_bytes import Field, Incomplete
from miles_router.engines.pairs.held_rows import RowStrings

ABORTED = b"Aborted by AbortReq"
COMPLETION_TOKENS = Field("completion_tokens")
Outcome = Literal["handed_over", "aborted", "partly_aborted", "failed"]


@dataclass(frozen=True)
class PrefillAnswer:
    """The answer of the prefill half.

    Attributes:
        outcome: `handed_over`: the decode half has what it needs; `aborted`: all generations were aborted;
            `partly_aborted`: some were; `failed`: the answer contains an error.
        version: the weight version that sampled the first tokens; None if the answer has none, or several.
        several_versions: whether the first tokens have different weight versions.
    """

    body: bytes
    rows: RowStrings
    outcome: Outcome
    version: str | None = None
    several_versions: bool = False
    streamed: bool = False

    @classmethod
    def read(cls, path: str, body: bytes, rows: RowStrings, *, streamed: bool) -> PrefillAnswer:
        """Read an answer with status 200 without parsing all of it.

        Args:
            rows: the rows that were taken out of `body`.

        Raises:
            UnreadableAnswer: the JSON is incomplete, or a generation has more than one token.
        """
        try:
            finishes = [finish for finish in FINISH_REASON.values(body) if finish is not None]
            versions = {str(version) for version in VERSION_NAMED.values(body) if version is not None}
            if path in (paths.GENERATE, paths.CHAT) and any(count > 1 for count in _counts(body)):
                raise UnreadableAnswer("token_counts_disagree", "more than one token: the worker is not a prefill half")
        except Incomplete as error:
            raise UnreadableAnswer("incomplete", str(error)) from error
        version = versions.pop() if len(versions) == 1 else None
        return cls(body, rows, _outcome(finishes, body, streamed=streamed), version, bool(versions), streamed)

    def metas(self) -> dict[int, Mapping[str, Any]]:
        """Return the `meta_info` of each generation, by its index.

        Raises:
            UnreadableAnswer: the answer does not have the engine's form.
        """
        if not self.streamed:
            return dict(enumerate(metas_of(parse_answer(self.body))))
        reader = EventReader()
        events = [Event.read(raw).parse() for raw in reader.feed(self.body)]
        return {index_of(event): meta_of(event) for event in events if event is not None}


def _outcome(finishes: Sequence[object], body: bytes, *, streamed: bool) -> Outcome:
    aborted = sum(map(is_abort, finishes))
    if any(map(_is_engine_failure, finishes)) or (streamed and _has_error_event(body)):
        return "failed"
    if not aborted:
        return "handed_over"
    return "aborted" if aborted == len(finishes) else "partly_aborted"


def has_error(event: bytes) -> bool:
    """Return True if the beginning of a stream contains an error of the engine."""
    try:
        return any(map(_is_engine_failure, FINISH_REASON.values(event))) or _has_error_event(event)
    except Incomplete:
        return False


def reports_abort(refusal: bytes) -> bool:
    """Return True if an error says that the transfer between the halves was aborted (SGLang, `KVTransferError`)."""
    return ABORTED in refusal


def _counts(body: bytes) -> Iterator[int]:
    return (count for count in COMPLETION_TOKENS.values(body) if isinstance(count, int))


def _is_engine_failure(finish: object) -> bool:
    """Return True for an abort with a status code: the engine failed, and no client aborted the generation."""
    return isinstance(finish, Mapping) and finish.get("status_code") is not None


def _has_error_event(body: bytes) -> bool:
    return any(Event.read(raw).is_error for raw in EventReader().feed(body))


def metas_of(parsed: Any) -> Sequence[dict[str, Any]]:
    """Return the `meta_info` of each answer, or of each choice that has one.

    Raises:
        UnreadableAnswer: the answer does not have the engine's form.
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
    """Return the `meta_info` of a parsed event.

    Raises:
        UnreadableAnswer: the event has no `meta_info`.
    """
    try:
        meta: dict[str, Any] = event["meta_info"]
    except MALFORMED as error:
        raise UnreadableAnswer("incomplete", repr(error)) from error
    return meta


def index_of(event: Any) -> int:
    """Return the index of the generation that a parsed event belongs to."""
    index: int = event.get("index", 0)
    return index


def parse_answer(body: bytes) -> Any:
    """Parse an answer.

    Raises:
        UnreadableAnswer: the body is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnreadableAnswer("incomplete", str(error)) from error
