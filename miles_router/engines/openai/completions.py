"""The completions endpoint: what it is asked so that a turn can be recorded exactly, and what it answers (SGLang
0.5.23, `serving_completions.py`). Pure.

Ids and logprobs stand in each choice, whole and in each chunk. The weight versions of a whole answer stand in its
`metadata`: the spans of the first choice alone. A stream tells none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import (
    MALFORMED,
    VERSION,
    VERSIONS,
    UnreadableAnswer,
    count_mismatch,
    in_words,
    version_runs,
)
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_stream import sound_usage, with_usage, without_usage
from miles_router.engines.openai.choices import Choice, GrowingChoice, GrowingChoices
from miles_router.trajectory.pieces import VersionRun


class CompletionsEndpoint:
    """`/v1/completions`."""

    path = paths.COMPLETIONS
    takes_ids = False
    rows_missing: str | None = "of several completions SGLang tells the rows of one alone"
    length_fields: tuple[str, ...] = ("max_tokens",)
    tokens_by_default: int | None = 16
    chunk_events = frozenset({b""})
    #: No stream falls short.
    chunks = None

    def request(self, fields: Mapping[str, Any], *, stream: bool, ids: Sequence[bytes] | None = None) -> bytes:
        """The request for the engine. Its prompt is a client's own."""
        sent = {**fields, "return_token_ids": True, **(with_usage(fields) if fields.get("stream") else {})}
        if sent.get("logprobs") is None:
            sent["logprobs"] = 0  # those of the sampled tokens alone
        return orjson.dumps(sent)

    def choices(self, answer: Mapping[str, Any]) -> list[Choice]:
        """What a whole answer says was sampled.

        Raises:
            UnreadableAnswer: it lacks something, or contradicts itself.
        """
        try:
            return _whole(answer["choices"], answer.get("metadata") or {}, answer.get("id"))
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error

    def growing(self, *, may_be_cut: bool = False) -> GrowingCompletions:
        """Return what takes a stream's chunks."""
        return GrowingCompletions()

    def as_asked(self, answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer with what its client asked for itself."""
        kept = {**answer, "choices": [_choice_as_asked(choice, fields) for choice in answer["choices"]]}
        if "usage" in kept:
            kept["usage"] = sound_usage(kept["usage"])
        if kept.get("sglext") == {}:  # its rows were taken out
            del kept["sglext"]
        return kept

    def chunk_as_asked(self, chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """A chunk with what its client asked for itself; None if it says nothing else."""
        kept = self.as_asked(chunk, fields)
        emptied = "sglext" in chunk and not (kept["choices"] or kept.get("usage") or "sglext" in kept)
        return None if emptied else without_usage(kept, fields)

    def shortfall(self, facts: Facts) -> str | None:
        """Every engine's streams tell everything."""
        return None


def _choice_as_asked(choice: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(choice)
    if fields.get("logprobs") is None:  # 0 asks too
        kept["logprobs"] = None
    if not fields.get("return_token_ids"):
        kept.pop("token_ids", None)
        kept.pop("prompt_token_ids", None)
    return kept


def _whole(choices: list[Mapping[str, Any]], metadata: Mapping[str, Any], rid: str | None) -> list[Choice]:
    one = len(choices) == 1
    versions = metadata if one else _of_all(metadata)
    source = "engine" if one else "engine_first_choice"
    read = []
    for index, choice in enumerate(choices):
        grown = _GrowingCompletion(rid if one else None)
        grown.add(choice, lambda: None)
        facts = {"rid": grown.rid, "first_token_at": None, "versions": source}
        read.append(grown.choice(index, version_runs(versions, grown.tokens), facts))
    return read


def _of_all(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer of several choices tells the spans of its first alone; they hold for all if they are one version."""
    versions = {span["version"] for span in metadata.get(VERSIONS) or ()} or {metadata.get(VERSION)}
    if len(versions) > 1:
        raise UnreadableAnswer("incomplete", "the weights changed, and the first choice alone says where")
    return {VERSION: versions.pop()}


class _GrowingCompletion(GrowingChoice):
    """One choice, whole or as it grows."""

    def __init__(self, rid: str | None) -> None:
        super().__init__(rid)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._prompt: list[int] | None = None

    def _add(self, choice: Mapping[str, Any]) -> int:
        ids = choice.get("token_ids") or ()
        self._text.append(choice.get("text") or "")
        self._ids += ids
        self.logprobs += self.told_logprobs(choice, "token_logprobs")
        self._prompt = self._prompt or choice.get("prompt_token_ids")
        return len(ids)

    def choice(self, index: int, versions: list[VersionRun], facts: dict[str, Any]) -> Choice:
        if self.finish is None:
            raise UnreadableAnswer("incomplete", "a choice has no finish reason")
        if len(self._ids) != len(self.logprobs):
            raise count_mismatch(self._ids, len(self.logprobs))
        return Choice(
            index=index,
            message={"role": "assistant", "content": "".join(self._text)},
            finish=self.finish,
            matched=self.matched,
            ids=self._ids,
            logprobs=self.logprobs,
            versions=versions,
            prompt=self._prompt,
            facts=facts,
        )


class GrowingCompletions(GrowingChoices[_GrowingCompletion]):
    """A completion as its chunks come, each with its ids."""

    def _begin(self, rid: str | None) -> _GrowingCompletion:
        return _GrowingCompletion(rid)

    def _choices(self) -> list[Choice]:
        return [
            choice.choice(index, choice.versions.runs, {"rid": choice.rid})
            for index, choice in sorted(self.growing.items())
        ]
