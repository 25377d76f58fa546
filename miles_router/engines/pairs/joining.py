"""The one answer that the two of a pair make. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines.answers import MALFORMED, VERSION_NAMED, VERSIONS, UnreadableAnswer, goes_on
from miles_router.engines.events import Event, write_event
from miles_router.engines.pairs.held_rows import JoinedString, RowStrings
from miles_router.engines.pairs.prefill import PrefillAnswer, index_of, loads, meta_of, metas_of
from miles_router.engines.pairs.request import PairedRequest, has_value
from miles_router.engines.scan import Field, Incomplete

SPANS, RETRACTIONS = Field(VERSIONS), Field("num_retractions")
RETRACTED = "the decode half has retracted the generation, and lost"
#: Logprobs that the prefill half alone has.
INPUT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
#: Those of given ids, of which the decode half has not the first token's.
IDS_LOGPROBS = "output_token_ids_logprobs"


class LostAccount(UnreadableAnswer):
    """The decode half has retracted a generation, and does not know any more what it would have to tell of it."""


def versions_of(answer: bytes) -> set[str]:
    """The weights that a decode half says sampled the first token of each generation.

    Raises:
        UnreadableAnswer: it does not say it in its own form.
    """
    try:
        return {str(spans[0]["version"]) for spans in SPANS.values(answer) if spans}  # type: ignore[index]
    except (Incomplete, *MALFORMED) as error:
        raise UnreadableAnswer("incomplete", repr(error)) from error


def first_version(events: bytes) -> str | None:
    """The weights that the beginning of a stream names; None where it names none."""
    try:
        version = next(VERSION_NAMED.values(events), None)
    except Incomplete:
        return None
    return None if version is None else str(version)


def one_answer(
    answer: bytes, rows: RowStrings, prefill: PrefillAnswer, request: PairedRequest, *, changed: bool
) -> list[bytes]:
    """A decode half's whole answer with what the prefill half alone knows, in pieces; byte for byte where that is
    nothing.

    Args:
        answer: without its rows.
        rows: what was taken out of it.
        changed: the weights may have changed since the request was sent.

    Raises:
        UnreadableAnswer: the two do not fit together, or the decode half has lost a part of its account.
    """
    known = prefill.version
    others = versions_of(answer) - {known} if known is not None else ()
    if (others or changed) and has_value(answer, RETRACTIONS, bool):
        raise LostAccount("incomplete", f"{RETRACTED} which weights sampled what")
    if not (request.rows or request.prompt_logprobs or others):
        return [answer]
    parsed = loads(answer)
    if request.rows or request.prompt_logprobs:
        theirs = prefill.metas()
        for place, meta in enumerate(metas_of(parsed)):
            _mend(meta, rows, _of_place(theirs, place), prefill, request)
    if others and known is not None:
        for meta in _all_metas(parsed):
            _stamp_first(meta, known)
    return rows.whole(orjson.dumps(parsed))


def one_event(
    event: Event,
    rows: RowStrings,
    prefill: PrefillAnswer,
    theirs: Mapping[int, Mapping[str, Any]],
    request: PairedRequest,
) -> list[bytes] | None:
    """An event of a decode half's stream with what the prefill half alone knows, in pieces; None where that is nothing.

    Args:
        theirs: `prefill.metas()`.

    Raises:
        UnreadableAnswer: as `one_answer`.
    """
    has_rows = any(fields.rows.quoted in event.data for fields in request.rows)
    if not (request.prompt_logprobs or has_rows) and goes_on(event.data):
        return None
    parsed = event.parse()
    if parsed is None or event.is_error:
        return None
    _mend(meta_of(parsed), rows, _of_place(theirs, index_of(parsed)), prefill, request)
    return rows.whole(write_event(parsed, event.name))


def _mend(
    meta: dict[str, Any], rows: RowStrings, theirs: Mapping[str, Any], prefill: PrefillAnswer, request: PairedRequest
) -> None:
    for fields in request.rows:
        own, prompts = rows.of(fields, meta), prefill.rows.of(fields, theirs)
        if own is None and (prompts is None or meta.get("completion_tokens") != 1):
            continue  # one that ends with what it was handed over collects nothing
        if meta.get(RETRACTIONS.name):
            raise LostAccount("incomplete", f"{RETRACTED} its rows")
        if prompts is None:
            raise UnreadableAnswer("incomplete", f"the prefill half tells no {fields.rows.name}: {fields.remedy}")
        rows.put(fields, meta, JoinedString(prompts, own))
    if request.prompt_logprobs:
        meta |= {name: theirs[name] for name in INPUT_LOGPROBS if name in theirs}
        asked, first = meta.get(IDS_LOGPROBS), theirs.get(IDS_LOGPROBS)
        if asked and asked[0] is None and first:
            meta[IDS_LOGPROBS] = [first[0], *asked[1:]]


def _stamp_first(meta: dict[str, Any], version: str) -> None:
    """The first token was sampled by the weights of the prefill half."""
    spans = meta.get(VERSIONS)
    if not spans or not spans[0]["end"] or spans[0]["version"] == version:
        return
    first, *others = spans
    kept = [{**first, "start": 1}] if first["end"] > 1 else []
    meta[VERSIONS] = [{"version": version, "start": 0, "end": 1}, *kept, *others]
    meta[VERSION_NAMED.name] = meta[VERSIONS][-1]["version"]


def _all_metas(parsed: Any) -> list[dict[str, Any]]:
    """Everything in an answer that names weights."""
    metadata = parsed.get("metadata") if isinstance(parsed, dict) else None
    return [*metas_of(parsed), *([metadata] if isinstance(metadata, dict) else [])]


def _of_place(theirs: Mapping[int, Mapping[str, Any]], place: int) -> Mapping[str, Any]:
    if place not in theirs:
        raise UnreadableAnswer("incomplete", f"the prefill half has no answer {place}")
    return theirs[place]
