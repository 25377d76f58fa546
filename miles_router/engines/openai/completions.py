"""The completions endpoint: requests that make exact recording of a turn possible, and the reading of answers. Pure.

Source: SGLang 0.5.23, `serving_completions.py`. Each choice, of a whole answer or a chunk, contains ids and logprobs.
The `metadata` of a whole answer contains the weight version spans of the first choice only. A stream contains no
versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import (
    ASKS_FOR_MASK,
    MALFORMED,
    VERSION,
    VERSIONS,
    UnreadableAnswer,
    count_mismatch,
    in_words,
    version_runs,
)
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_stream import valid_usage, with_usage, without_usage
from miles_router.engines.openai.choices import Choice, GrowingChoice, GrowingChoices
from miles_router.errors import BadRequest
from miles_router.trajectory.pieces import VersionRun


class CompletionsEndpoint:
    """The `OpenAIEndpoint` for `/v1/completions`."""

    path = paths.COMPLETIONS
    takes_ids = False
    rows_missing: str | None = "SGLang returns the rows of only one of several completions"
    length_fields: tuple[str, ...] = ("max_tokens",)
    tokens_by_default: int | None = 16
    chunk_events = frozenset({b""})
    whole_only = frozenset[str]()
    chunks = None

    def request(self, fields: Mapping[str, Any], *, stream: bool, ids: Sequence[bytes] | None = None) -> bytes:
        """Return the request for the engine, with the client's own prompt; `ids` is ignored.

        Raises:
            BadRequest: it asks for sampling masks, which the engine would leave out without a word.
        """
        if fields.get(ASKS_FOR_MASK):
            raise BadRequest(f"{self.path} does not return sampling masks ({ASKS_FOR_MASK}); chat and /generate do")
        sent = {**fields, "return_token_ids": True, **(with_usage(fields) if fields.get("stream") else {})}
        if sent.get("logprobs") is None:
            sent["logprobs"] = 0  # logprobs of the sampled tokens only
        return orjson.dumps(sent)

    def choices(self, answer: Mapping[str, Any]) -> list[Choice]:
        try:
            return _whole(answer["choices"], answer.get("metadata") or {}, answer.get("id"))
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error

    def growing(self, *, may_be_cut: bool = False) -> GrowingCompletions:
        return GrowingCompletions()

    def for_client(self, answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        kept = {**answer, "choices": [_choice_for_client(choice, fields) for choice in answer["choices"]]}
        if "usage" in kept:
            kept["usage"] = valid_usage(kept["usage"])
        if kept.get("sglext") == {}:  # empty, since its rows were taken out
            del kept["sglext"]
        return kept

    def chunk_for_client(self, chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        kept = self.for_client(chunk, fields)
        emptied = "sglext" in chunk and not (kept["choices"] or kept.get("usage") or "sglext" in kept)
        return None if emptied else without_usage(kept, fields)

    def shortfall(self, facts: Facts) -> str | None:
        """Return None: the streams of all engines are complete."""
        return None


def _choice_for_client(choice: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(choice)
    if fields.get("logprobs") is None:  # 0 asks for logprobs too
        kept["logprobs"] = None
    if not fields.get("return_token_ids"):
        kept.pop("token_ids", None)
        kept.pop("prompt_token_ids", None)
    return kept


def _whole(choices: list[Mapping[str, Any]], metadata: Mapping[str, Any], rid: str | None) -> list[Choice]:
    one = len(choices) == 1
    versions = metadata if one else _shared_metadata(metadata)
    source = "engine" if one else "engine_first_choice"
    read = []
    for index, choice in enumerate(choices):
        grown = _GrowingCompletion(rid if one else None)
        grown.add(choice, lambda: None)
        facts = {"rid": grown.rid, "first_token_at": None, "versions": source}
        read.append(grown.choice(index, version_runs(versions, grown.tokens), facts))
    return read


def _shared_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata for each of several choices, from the spans of the first choice.

    Raises:
        UnreadableAnswer: the spans have several versions, so that the versions of the other choices are unknown.
    """
    versions = {span["version"] for span in metadata.get(VERSIONS) or ()} or {metadata.get(VERSION)}
    if len(versions) > 1:
        raise UnreadableAnswer("incomplete", "the weights changed, and only the first choice has version spans")
    return {VERSION: versions.pop()}


class _GrowingCompletion(GrowingChoice):
    """One choice of completions, put together from chunks."""

    def __init__(self, rid: str | None) -> None:
        super().__init__(rid)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._prompt: list[int] | None = None

    def _add(self, choice: Mapping[str, Any]) -> int:
        ids = choice.get("token_ids") or ()
        self._text.append(choice.get("text") or "")
        self._ids += ids
        self.logprobs += self.logprob_list(choice, "token_logprobs")
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
    """A streamed completions answer, put together from chunks."""

    def _begin(self, rid: str | None) -> _GrowingCompletion:
        return _GrowingCompletion(rid)

    def _choices(self) -> list[Choice]:
        return [
            choice.choice(index, choice.versions.runs, {"rid": choice.rid})
            for index, choice in sorted(self.growing.items())
        ]
