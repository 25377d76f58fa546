"""Answers of `/generate`: what they say, read strictly, and seen without parsing. Pure.

Token counts, logprobs and weight versions that disagree are refused, never mended: a sample made of them would be
silently wrong.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.trajectory.pieces import VersionRun

#: Lists of `meta_info` with one element for each sampled token.
LOGPROBS = "output_token_logprobs"
OUTPUT_LISTS = (LOGPROBS, "output_top_logprobs", "output_token_ids_logprobs")
#: What `return_logprob` adds to `meta_info` (SGLang 0.5.23, `tokenizer_manager.convert_logprob_style`).
LOGPROB_FIELDS = frozenset(
    {
        *OUTPUT_LISTS,
        "output_token_logprobs_length",
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
#: What a token that is part of a character is decoded to.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
#: What reading JSON of another form raises.
MALFORMED = (KeyError, TypeError, IndexError, AttributeError)

#: The reason of an answer that lacks something, and does not contradict itself.
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
    """An answer that lacks what is needed of it, or that contradicts itself. `reason` is one of few words, which label
    metrics."""

    def __init__(self, reason: Unreadable, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Unreadable = reason


def in_words(error: Exception) -> str:
    """Say for people what one of `MALFORMED` has found."""
    if isinstance(error, KeyError) and error.args:
        return f"the field {error.args[0]!r} is missing"
    return "a part is missing, or has another type than it should have"


@contextmanager
def readable() -> Iterator[None]:
    """Raises UnreadableAnswer where an answer is of another form, or nested too deep to be written again."""
    try:
        yield
    except UnreadableAnswer:
        raise
    except (*MALFORMED, ValueError) as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error


@dataclass(frozen=True)
class GenerateAnswer:
    """One complete answer.

    Attributes:
        text: what the engine shows; trimmed stop strings and the like are not in it.
        ids: every id that was sampled.
        logprobs: one for each id; empty where the answer has none.
        rid: the engine's name of the generation.
        finish: `stop`, `length` or `abort`.
        matched: the token or string that stopped it.
        versions: runs over the ids, without gaps; empty where the engine names no version.
        prompt_tokens: how many tokens of prompt the engine read, where it says so.
    """

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    rid: str
    finish: str
    matched: int | str | None
    versions: Sequence[VersionRun]
    prompt_tokens: int | None = None

    @classmethod
    def read(cls, answer: Any, *, logprobs: bool = True) -> GenerateAnswer:
        """Read a parsed answer.

        Args:
            logprobs: whether it was asked for with `return_logprob`. If so, they must be there.

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
                raise UnreadableAnswer("incomplete", "text, output_ids or finish_reason.type has another type")
            return cls(
                text=text,
                ids=ids,
                logprobs=[entry[0] for entry in entries or ()],
                rid=str(meta["id"]),
                finish=finish,
                matched=reason.get("matched"),
                versions=version_runs(meta, len(ids)),
                prompt_tokens=token_count(meta),
            )
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error


def token_count(told: object, name: str = PROMPT_TOKENS) -> int | None:
    """Return a count of tokens in a `meta_info` or a `usage`; None where it is missing or no whole number."""
    count = told.get(name) if isinstance(told, Mapping) else None
    return count if type(count) is int else None


def check_logprobs(ids: Sequence[int], entries: Sequence[Sequence[Any]], start: int = 0) -> None:
    """See that there is one entry for each id, and that those from `start` on are of these ids, which are numbers.

    Raises:
        UnreadableAnswer: they are not.
    """
    if not isinstance(entries, list):
        raise UnreadableAnswer("invalid_tokens", "the logprobs are no list")
    if len(entries) != len(ids):
        raise too_few_or_many(ids, len(entries))
    if tokens_of(entries, start) != ids[start:]:
        raise UnreadableAnswer("logprobs_of_other_tokens")
    if not {int}.issuperset(map(type, ids[start:])):  # JSON's `true` is equal to 1
        raise UnreadableAnswer("invalid_tokens", "an id that is no whole number")


def tokens_of(entries: Sequence[Any], start: int = 0) -> list[Any]:
    """Return the ids that logprobs from `start` on are of, each of which is a list: a logprob, its token and more.

    Raises:
        UnreadableAnswer: one is no such list.
    """
    try:
        return [entry[1] for entry in entries[start:]]
    except MALFORMED:
        for position, entry in enumerate(entries):
            if not isinstance(entry, list) or len(entry) < 2:
                shown = f"position {position}: {reprlib.repr(entry)} is no list of a logprob and its token"
                raise UnreadableAnswer("invalid_tokens", shown) from None
        raise


def too_few_or_many(ids: Sequence[Any], logprobs: int) -> UnreadableAnswer:
    """Return the error of ids that have not a logprob each, with the first that has none."""
    counts = f"{len(ids)} ids, {logprobs} logprobs"
    first = f"; position {logprobs}, token {ids[logprobs]} has none" if logprobs < len(ids) else ""
    return UnreadableAnswer("token_counts_disagree", counts + first)


def version_runs(meta: Mapping[str, Any], tokens: int) -> list[VersionRun]:
    """The weight versions of so many sampled tokens: `weight_versions`, or `weight_version` for all of them; none where
    the engine tells none.

    Args:
        meta: an answer's `meta_info`; of `/v1/completions`, its `metadata`.

    Raises:
        UnreadableAnswer: they leave gaps, overlap, or do not cover the tokens; a version or a place is missing.
    """
    spans = meta.get(VERSIONS)
    if not spans:
        version = meta.get(VERSION)
        return [VersionRun(str(version), 0, tokens)] if version is not None and tokens else []
    try:
        if any(span["version"] is None or {type(span["start"]), type(span["end"])} != {int} for span in spans):
            raise UnreadableAnswer("incomplete", f"{VERSIONS} without a version, or with places that are no integers")
        runs = [VersionRun(str(span["version"]), span["start"], span["end"]) for span in spans]
        check_runs(runs, tokens)
    except (KeyError, TypeError) as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error
    return [run for run in runs if run.end > run.start]


def check_runs(runs: Sequence[VersionRun], tokens: int) -> None:
    """Refuse weight versions that are not those of so many tokens.

    Raises:
        UnreadableAnswer: they leave gaps, overlap, or do not cover the tokens.
    """
    reached = 0
    for run in runs:
        if run.start != reached or run.end < run.start:
            raise UnreadableAnswer("versions_leave_gaps", f"{[(each.start, each.end) for each in runs]}")
        reached = run.end
    if reached != tokens:
        raise UnreadableAnswer("versions_end_elsewhere", f"at {reached}, and {tokens} tokens were sampled")


def without_logprobs(answer: Any) -> Any:
    """The answer without what `return_logprob` adds. Anything that is not an answer is returned unchanged."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        return answer
    shown = {**meta}
    for name in LOGPROB_FIELDS:
        shown.pop(name, None)
    return {**answer, "meta_info": shown}


def finish_reasons(data: bytes, answers: int, *, beginning: bool = False) -> list[Any] | None:
    """The finish reasons of a reply's answers, or of an event's one, in order, without parsing the rest.

    Args:
        data: JSON of a reply, or an event.
        answers: how many there must be.
        beginning: `data` is the beginning of a reply; what stands behind the last of them is not looked at.

    Returns:
        None where they cannot be seen: too few or too many fields of this name, or one that is cut.
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
    """The finish reason of anything that was parsed; None where it has none."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    return meta.get("finish_reason") if isinstance(meta, Mapping) else None


def index_of(event: bytes) -> int | None:
    """Which of several generations an event is about, without parsing the rest; None where that cannot be seen."""
    try:
        index = INDEX.last(event)  # where SGLang writes it
    except Incomplete:
        try:
            index = INDEX.only(event)
        except Incomplete:
            return None
    return index if type(index) is int else None


class Progress(NamedTuple):
    """What an event of a stream says of its answer: how it ends (None: it goes on), and the weight version that it
    names."""

    finish: object
    version: object


def progress_of(event: bytes) -> Progress | None:
    """What an event says of its answer, without parsing the rest; None where that cannot be seen."""
    try:
        finish = FINISH_REASON.find(event)
        if finish is None:
            return None
        version = VERSION_NAMED.find(event, finish[1]) or VERSION_NAMED.find(event)  # SGLang writes it behind
        return Progress(value_at(event, finish[1]), None if version is None else value_at(event, version[1]))
    except Incomplete:
        return None


def goes_on(data: bytes) -> bool:
    """Whether an event says that its generation goes on: its one finish reason is null. The rest is not parsed."""
    found = FINISH_REASON.find(data)
    return found is not None and data.startswith(b"null", found[1]) and FINISH_REASON.find(data, found[1]) is None


def is_abort(finish: object) -> bool:
    """Whether a finish reason says that the generation was cut off."""
    return finish == ABORT or (isinstance(finish, Mapping) and finish.get("type") == ABORT)


def says_abort(data: bytes) -> bool:
    """Whether one of the finish reasons in an event says so. The rest is not parsed."""
    if _ABORT_QUOTED not in data:
        return False
    try:
        return any(is_abort(finish) for finish in FINISH_REASON.values(data))
    except Incomplete:
        return False
