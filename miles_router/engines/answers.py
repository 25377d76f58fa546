"""Answers of `/generate`: what they say, read strictly, and seen without parsing. Pure.

Token counts, logprobs and weight versions that disagree are refused, never mended: a sample made of them would be
silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_router.engines.scan import Field, Incomplete, value_at
from miles_router.trajectory.pieces import VersionRun

#: Lists of `meta_info` with one element for each sampled token.
OUTPUT_LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
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
FINISH_REASON = Field("finish_reason")
ABORT = "abort"
_ABORT_QUOTED = b'"abort"'

Unreadable = Literal[
    "incomplete", "token_counts_disagree", "logprobs_of_other_tokens", "versions_leave_gaps", "versions_end_elsewhere"
]


class UnreadableAnswer(ValueError):
    """An answer that lacks what is needed of it, or that contradicts itself. `reason` is one of few words, which label
    metrics."""

    def __init__(self, reason: Unreadable, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Unreadable = reason


@dataclass(frozen=True)
class GenerateAnswer:
    """One complete answer.

    Attributes:
        text: what the engine shows; trimmed stop strings and the like are not in it.
        ids: every id that was sampled.
        logprobs: one for each id.
        rid: the engine's name of the generation.
        finish: `stop`, `length` or `abort`.
        matched: the token or string that stopped it.
        versions: runs over the ids, without gaps; empty where the engine names no version.
    """

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    rid: str
    finish: str
    matched: int | str | None
    versions: Sequence[VersionRun]

    @classmethod
    def read(cls, answer: Any) -> GenerateAnswer:
        """Read a parsed answer that was asked for with `return_logprob`.

        Raises:
            UnreadableAnswer: a field is missing, or fields contradict each other.
        """
        try:
            meta, ids = answer["meta_info"], answer["output_ids"]
            entries, reason = meta["output_token_logprobs"], meta["finish_reason"]
            if meta.get("completion_tokens", len(ids)) != len(ids) or len(entries) != len(ids):
                counts = f"{meta.get('completion_tokens')} tokens, {len(ids)} ids, {len(entries)} logprobs"
                raise UnreadableAnswer("token_counts_disagree", counts)
            if [entry[1] for entry in entries] != ids:
                raise UnreadableAnswer("logprobs_of_other_tokens")
            return cls(
                text=answer["text"],
                ids=ids,
                logprobs=[entry[0] for entry in entries],
                rid=str(meta["id"]),
                finish=reason["type"],
                matched=reason.get("matched"),
                versions=version_runs(meta, len(ids)),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error


def version_runs(meta: Mapping[str, Any], tokens: int) -> list[VersionRun]:
    """The weight versions of so many sampled tokens: `weight_versions`, or `weight_version` for all of them; none where
    the engine tells none.

    Args:
        meta: an answer's `meta_info`; of `/v1/completions`, its `metadata`.

    Raises:
        UnreadableAnswer: they leave gaps, overlap, or do not cover the tokens.
    """
    spans = meta.get(VERSIONS)
    if not spans:
        version = meta.get(VERSION)
        return [VersionRun(str(version), 0, tokens)] if version is not None and tokens else []
    try:
        runs = [VersionRun(str(span["version"]), span["start"], span["end"]) for span in spans]
        reached = 0
        for run in runs:
            if run.start != reached or run.end < run.start:
                raise UnreadableAnswer("versions_leave_gaps", f"{[(each.start, each.end) for each in runs]}")
            reached = run.end
    except (KeyError, TypeError) as error:
        raise UnreadableAnswer("incomplete", repr(error)) from error
    if reached != tokens:
        raise UnreadableAnswer("versions_end_elsewhere", f"at {reached}, and {tokens} tokens were sampled")
    return [run for run in runs if run.end > run.start]


def without_logprobs(answer: Any) -> Any:
    """The answer without what `return_logprob` adds. Anything that is not an answer is returned unchanged."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        return answer
    return {**answer, "meta_info": {name: value for name, value in meta.items() if name not in LOGPROB_FIELDS}}


def finish_reasons(data: bytes, answers: int, *, beginning: bool = False) -> list[Any] | None:
    """The finish reasons of a reply's answers, or of an event's one, in order, without parsing the rest.

    Args:
        data: JSON of a reply, or an event.
        answers: how many there must be.
        beginning: `data` is the beginning of a reply, and there may be more behind it.

    Returns:
        None where they cannot be seen: too few or too many fields of this name, or one that is cut.
    """
    found: list[Any] = []
    try:
        for at in FINISH_REASON.places(data):
            if len(found) == answers:
                return None if not beginning else found
            found.append(value_at(data, at))
    except Incomplete:
        return None
    return found if len(found) == answers else None


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
