"""Parsers of `/generate` answers: strict for whole answers, and byte scanners that skip most of the JSON. No I/O.

An answer whose token counts, logprobs and weight versions disagree is refused, never repaired: a sample made of it
would be silently wrong.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from miles_router.engines.json_bytes import Field, Incomplete, value_at
from miles_router.trajectory.pieces import VersionRun, token_array
from miles_router.trajectory.sampling_mask import SamplingMask

LOGPROBS, SAMPLING_MASK = "output_token_logprobs", "output_token_sampling_mask"
SAMPLING_LOGPROBS = "output_token_sampling_logprobs"
LOGPROB_LISTS = (LOGPROBS, "output_top_logprobs", "output_token_ids_logprobs")
#: The request field that asks for sampling masks.
ASKS_FOR_MASK = "return_sampling_mask"
#: Lists in `meta_info` that have one element per sampled token, and the fields with their lengths.
OUTPUT_LISTS = (*LOGPROB_LISTS, SAMPLING_MASK, SAMPLING_LOGPROBS)
LENGTHS = ("completion_tokens", f"{LOGPROBS}_length", f"{SAMPLING_MASK}_length")
#: Fields that `return_logprob` adds to `meta_info` (SGLang 0.5.23, `tokenizer_manager.convert_logprob_style`).
LOGPROB_FIELDS = frozenset(
    {
        *LOGPROB_LISTS,
        f"{LOGPROBS}_length",
        "input_token_logprobs",
        "input_top_logprobs",
        "input_token_ids_logprobs",
    }
)
VERSION, VERSIONS = "weight_version", "weight_versions"
FINISH_REASON, INDEX, VERSION_NAMED = Field("finish_reason"), Field("index"), Field(VERSION)
ABORT = "abort"
_ABORT_QUOTED = b'"abort"'
PROMPT_TOKENS = "prompt_tokens"
#: The text of a token that is only a part of a character.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
#: Exceptions raised by reading JSON that has another structure.
MALFORMED = (KeyError, TypeError, IndexError, AttributeError)

#: The `reason` of an answer that misses a field, as opposed to one that contradicts itself.
INCOMPLETE: Literal["incomplete"] = "incomplete"
Unreadable = Literal[
    "incomplete",
    "token_counts_disagree",
    "tokens_taken_back",
    "logprobs_of_other_tokens",
    "invalid_tokens",
    "not_json",
    "versions_leave_gaps",
    "versions_end_elsewhere",
]


class UnreadableAnswer(ValueError):
    """An error about an answer that misses a field or contradicts itself. `reason` has few values, since it labels a
    metric."""

    def __init__(self, reason: Unreadable, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Unreadable = reason


def in_words(error: Exception) -> str:
    """Describe one of the `MALFORMED` exceptions for an error message."""
    if isinstance(error, KeyError) and error.args:
        return f"the field {error.args[0]!r} is missing"
    return "a field is missing or has the wrong type"


@contextmanager
def readable() -> Iterator[None]:
    """Convert `MALFORMED` and ValueError to UnreadableAnswer, such as for JSON too deeply nested to be written
    again."""
    try:
        yield
    except UnreadableAnswer:
        raise
    except (*MALFORMED, ValueError) as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error


@dataclass(frozen=True)
class GenerateAnswer:
    """One complete answer of `/generate`.

    Attributes:
        text: the text as the engine returns it, without trimmed stop strings.
        ids: all sampled token ids.
        logprobs: one per id; empty if the answer has none.
        rid: the engine's id of the generation.
        finish: `stop`, `length` or `abort`.
        matched: the token id or stop string that ended the generation.
        versions: contiguous runs over the ids; empty if the engine names no weight version.
        prompt_tokens: the length of the prompt in tokens; None if the answer does not contain it.
        sampling_mask: the sampling mask of the ids; None if the request did not ask for it.
    """

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    rid: str
    finish: str
    matched: int | str | None
    versions: Sequence[VersionRun]
    prompt_tokens: int | None = None
    sampling_mask: SamplingMask | None = None

    @classmethod
    def read(cls, answer: Any, *, logprobs: bool = True) -> GenerateAnswer:
        """Parse an answer that is already decoded from JSON.

        Args:
            logprobs: the request set `return_logprob`, so the answer must contain logprobs.

        Raises:
            UnreadableAnswer: a field is missing, or fields contradict each other.
        """
        try:
            meta, ids = answer["meta_info"], answer["output_ids"]
            entries, reason = meta.get(LOGPROBS), meta["finish_reason"]
            if entries is None and logprobs:
                raise UnreadableAnswer("incomplete", LOGPROBS)
            if meta.get("completion_tokens", len(ids)) != len(ids):
                raise UnreadableAnswer("token_counts_disagree", f"{meta['completion_tokens']} tokens, {len(ids)} ids")
            if entries is not None:
                check_logprobs(ids, entries)
            text, finish = answer["text"], reason["type"]
            if not (isinstance(text, str) and isinstance(finish, str) and isinstance(ids, list)):
                raise UnreadableAnswer("incomplete", "text, output_ids or finish_reason.type has the wrong type")
            return cls(
                text=text,
                ids=ids,
                logprobs=[entry[0] for entry in entries or ()],
                rid=str(meta["id"]),
                finish=finish,
                matched=reason.get("matched"),
                versions=version_runs(meta, len(ids)),
                prompt_tokens=token_count(meta),
                sampling_mask=sampling_mask_of(meta, ids),
            )
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error


def sampling_mask_of(meta: Mapping[str, Any], ids: Sequence[int]) -> SamplingMask | None:
    """Return the sampling mask of the sampled ids in an answer's `meta_info`; None without a mask, or without its
    logprobs.

    Raises:
        UnreadableAnswer: the mask or its logprobs do not have one element per id, or do not fit the ids.
    """
    sets, logprobs = meta.get(SAMPLING_MASK), meta.get(SAMPLING_LOGPROBS)
    if sets is None or logprobs is None:
        return None
    for name, value in ((SAMPLING_MASK, sets), (SAMPLING_LOGPROBS, logprobs)):
        if not isinstance(value, list) or len(value) != len(ids):
            raise UnreadableAnswer("token_counts_disagree", f"{name} does not have one element per token")
    try:
        if any(isinstance(each, list) for each in logprobs):  # `sampling_logprobs_mode: "support"`: one per id of a set
            if [*map(len, logprobs)] != [*map(len, sets)]:
                raise ValueError(f"{SAMPLING_LOGPROBS} does not have one logprob per id of each set")
            logprobs = [each[told.index(token)] for each, told, token in zip(logprobs, sets, ids, strict=True)]
        return SamplingMask.of(sets, logprobs, token_array(ids))
    except (ValueError, *MALFORMED) as error:
        raise UnreadableAnswer("invalid_tokens", f"{SAMPLING_MASK}: {error}") from None


def require_sampling_mask(mask: SamplingMask | None, ids: Sequence[int]) -> None:
    """Check that an answer to a request for sampling masks has one.

    Raises:
        UnreadableAnswer: it does not.
    """
    if mask is None and ids:
        missing = f"{SAMPLING_MASK} or {SAMPLING_LOGPROBS}: the engine may be too old to tell them"
        raise UnreadableAnswer(INCOMPLETE, missing)


def token_count(counts: object, name: str = PROMPT_TOKENS) -> int | None:
    """Return a token count from a `meta_info` or `usage` object; None if it is missing or not an integer."""
    count = counts.get(name) if isinstance(counts, Mapping) else None
    return count if type(count) is int else None


def check_logprobs(ids: Sequence[int], entries: Sequence[Sequence[Any]], start: int = 0) -> None:
    """Check that there is one logprob entry per id, and that the entries from `start` on name these ids.

    Raises:
        UnreadableAnswer: the check fails, or an id from `start` on is not an integer.
    """
    if not isinstance(entries, list):
        raise UnreadableAnswer("invalid_tokens", "the logprobs are not a list")
    if len(entries) != len(ids):
        raise count_mismatch(ids, len(entries))
    if tokens_of(entries, start) != ids[start:]:
        raise UnreadableAnswer("logprobs_of_other_tokens")
    if not {int}.issuperset(map(type, ids[start:])):  # in Python, JSON's `true` equals 1
        raise UnreadableAnswer("invalid_tokens", "a token id is not an integer")


def tokens_of(entries: Sequence[Any], start: int = 0) -> list[Any]:
    """Return the token ids that logprob entries from `start` on name. An entry is a list: logprob, token id, and more.

    Raises:
        UnreadableAnswer: an entry is not such a list.
    """
    try:
        return [entry[1] for entry in entries[start:]]
    except MALFORMED:
        for position, entry in enumerate(entries):
            if not isinstance(entry, list) or len(entry) < 2:
                shown = f"position {position}: {reprlib.repr(entry)} is not a list of a logprob and its token id"
                raise UnreadableAnswer("invalid_tokens", shown) from None
        raise


def count_mismatch(ids: Sequence[Any], logprobs: int) -> UnreadableAnswer:
    """Return the error for ids and logprobs whose counts differ; its message names the first id without a logprob."""
    counts = f"{len(ids)} ids, {logprobs} logprobs"
    first = f"; position {logprobs}, token {ids[logprobs]} has none" if logprobs < len(ids) else ""
    return UnreadableAnswer("token_counts_disagree", counts + first)


def version_runs(meta: Mapping[str, Any], tokens: int) -> list[VersionRun]:
    """Return the weight versions of the `tokens` sampled tokens; an empty list if the engine names none.

    They come from `weight_versions`, or from `weight_version` for all tokens.

    Args:
        meta: an answer's `meta_info`; for `/v1/completions`, its `metadata`.

    Raises:
        UnreadableAnswer: runs leave gaps, overlap or do not cover the tokens, or one has no version, start or end.
    """
    spans = meta.get(VERSIONS)
    if not spans:
        version = meta.get(VERSION)
        return [VersionRun(str(version), 0, tokens)] if version is not None and tokens else []
    try:
        if any(span["version"] is None or {type(span["start"]), type(span["end"])} != {int} for span in spans):
            raise UnreadableAnswer("incomplete", f"an element of {VERSIONS} misses its version or integer bounds")
        runs = [VersionRun(str(span["version"]), span["start"], span["end"]) for span in spans]
        check_runs(runs, tokens)
    except (KeyError, TypeError) as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error
    return [run for run in runs if run.end > run.start]


def check_runs(runs: Sequence[VersionRun], tokens: int) -> None:
    """Check that weight-version runs cover exactly `tokens` tokens.

    Raises:
        UnreadableAnswer: runs leave gaps, overlap, or do not cover the tokens.
    """
    reached = 0
    for run in runs:
        if run.start != reached or run.end < run.start:
            raise UnreadableAnswer("versions_leave_gaps", f"{[(each.start, each.end) for each in runs]}")
        reached = run.end
    if reached != tokens:
        raise UnreadableAnswer("versions_end_elsewhere", f"at token {reached}, but {tokens} tokens were sampled")


def without_logprobs(answer: Any) -> Any:
    """Return the answer without the fields that `return_logprob` adds. Other JSON is returned unchanged."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        return answer
    shown = {**meta}
    for name in LOGPROB_FIELDS:
        shown.pop(name, None)
    return {**answer, "meta_info": shown}


def finish_reasons(data: bytes, answers: int, *, beginning: bool = False) -> list[Any] | None:
    """Return the finish reasons in a reply or an event, in order, without parsing the rest.

    Args:
        data: JSON of a reply, or of an event.
        answers: the expected number of finish reasons.
        beginning: `data` may end early; bytes behind the last expected finish reason are ignored.

    Returns:
        None if there are fewer or more fields of this name, or if one is incomplete.
    """
    found: list[Any] = []
    try:
        for at in FINISH_REASON.places(data):
            if len(found) == answers:
                return None
            found.append(value_at(data, at))
            if beginning and len(found) == answers:
                return found
    except Incomplete:
        return None
    return found if len(found) == answers else None


def finish_of(answer: object) -> object:
    """Return the finish reason of parsed JSON; None if it has none."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    return meta.get("finish_reason") if isinstance(meta, Mapping) else None


def index_of(event: bytes) -> int | None:
    """Return the `index` of the generation that an event belongs to, without parsing the rest; None if it cannot be
    found."""
    try:
        index = INDEX.last(event)  # SGLang writes it there
    except Incomplete:
        try:
            index = INDEX.only(event)
        except Incomplete:
            return None
    return index if type(index) is int else None


class Progress(NamedTuple):
    """The state of an answer after an event: its finish reason (None while it continues) and the event's weight
    version."""

    finish: object
    version: object


def progress_of(event: bytes) -> Progress | None:
    """Return the progress in an event without parsing the rest; None if it cannot be found."""
    try:
        finish = FINISH_REASON.find(event)
        if finish is None:
            return None
        # SGLang writes the weight version behind the finish reason.
        version = VERSION_NAMED.find(event, finish[1]) or VERSION_NAMED.find(event)
        return Progress(value_at(event, finish[1]), None if version is None else value_at(event, version[1]))
    except Incomplete:
        return None


def is_unfinished(data: bytes) -> bool:
    """Return True if the event's only finish reason is null. The rest is not parsed."""
    found = FINISH_REASON.find(data)
    return found is not None and data.startswith(b"null", found[1]) and FINISH_REASON.find(data, found[1]) is None


def is_abort(finish: object) -> bool:
    """Return True if a finish reason means that the generation was aborted."""
    return finish == ABORT or (isinstance(finish, Mapping) and finish.get("type") == ABORT)


def contains_abort(data: bytes) -> bool:
    """Return True if a finish reason in the event is an abort. The rest is not parsed."""
    if _ABORT_QUOTED not in data:
        return False
    try:
        return any(is_abort(finish) for finish in FINISH_REASON.values(data))
    except Incomplete:
        return False
