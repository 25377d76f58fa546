"""Joins the answers of both halves of a pair to the answer for the client. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines.answers import MALFORMED, VERSION_NAMED, VERSIONS, UnreadableAnswer, is_unfinished
from miles_router.engines.events import Event, write_event
from miles_router.engines.json_bytes import Field, Incomplete
from miles_router.engines.pairs.held_rows import JoinedString, RowStrings
from miles_router.engines.pairs.prefill import PrefillAnswer, index_of, meta_of, metas_of, parse_answer
from miles_router.engines.pairs.request import PairedRequest, has_value

SPANS, RETRACTIONS = Field(VERSIONS), Field("num_retractions")
RETRACTED = "the decode half has retracted the generation, and lost"
#: Logprobs that only the prefill half has.
INPUT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
#: The logprobs of requested ids. The decode half lacks them for the first token.
IDS_LOGPROBS = "output_token_ids_logprobs"


class LostByRetraction(UnreadableAnswer):
    """The decode half retracted a generation, and lost its rows or the weight versions of its tokens."""


def first_token_versions(answer: bytes) -> set[str]:
    """Return the weight versions that a decode half reports for the first token of each generation.

    Raises:
        UnreadableAnswer: the version spans are malformed.
    """
    try:
        return {str(spans[0]["version"]) for spans in SPANS.values(answer) if spans}  # type: ignore[index]
    except (Incomplete, *MALFORMED) as error:
        raise UnreadableAnswer("incomplete", repr(error)) from error


def first_version(events: bytes) -> str | None:
    """Return the first weight version in the beginning of a stream; None if there is none."""
    try:
        version = next(VERSION_NAMED.values(events), None)
    except Incomplete:
        return None
    return None if version is None else str(version)


def join_answer(
    answer: bytes, rows: RowStrings, prefill: PrefillAnswer, request: PairedRequest, *, changed: bool
) -> list[bytes]:
    """Return the decode half's whole answer, completed with data that only the prefill half has, in pieces.

    The bytes stay as they are if there is nothing to add.

    Args:
        answer: the decode half's answer without its rows.
        rows: the rows that were taken out of `answer`.
        changed: whether the weights may have changed since the request was sent.

    Raises:
        LostByRetraction: the decode half retracted a generation, and lost its rows or weight versions.
        UnreadableAnswer: the two answers do not fit together.
    """
    known = prefill.version
    others = first_token_versions(answer) - {known} if known is not None else ()
    if (others or changed) and has_value(answer, RETRACTIONS, bool):
        raise LostByRetraction("incomplete", f"{RETRACTED} the weight versions of its tokens")
    if not (request.rows or request.prompt_logprobs or others):
        return [answer]
    parsed = parse_answer(answer)
    if request.rows or request.prompt_logprobs:
        theirs = prefill.metas()
        for place, meta in enumerate(metas_of(parsed)):
            _complete_meta(meta, rows, _meta_at(theirs, place), prefill, request)
    if others and known is not None:
        for meta in _all_metas(parsed):
            _set_first_version(meta, known)
    return rows.with_joined_rows(orjson.dumps(parsed))


def join_event(
    event: Event,
    rows: RowStrings,
    prefill: PrefillAnswer,
    theirs: Mapping[int, Mapping[str, Any]],
    request: PairedRequest,
) -> list[bytes] | None:
    """Return an event of the decode half, completed with data that only the prefill half has, in pieces.

    Args:
        theirs: `prefill.metas()`.

    Returns:
        None if the event stays as it is.

    Raises:
        LostByRetraction: the decode half retracted the generation, and lost its rows.
        UnreadableAnswer: the two answers do not fit together.
    """
    has_rows = any(fields.rows.quoted in event.data for fields in request.rows)
    if not (request.prompt_logprobs or has_rows) and is_unfinished(event.data):
        return None
    parsed = event.parse()
    if parsed is None or event.is_error:
        return None
    _complete_meta(meta_of(parsed), rows, _meta_at(theirs, index_of(parsed)), prefill, request)
    return rows.with_joined_rows(write_event(parsed, event.name))


def _complete_meta(
    meta: dict[str, Any], rows: RowStrings, theirs: Mapping[str, Any], prefill: PrefillAnswer, request: PairedRequest
) -> None:
    for fields in request.rows:
        own, prompts = rows.held(fields, meta), prefill.rows.held(fields, theirs)
        if own is None and (prompts is None or meta.get("completion_tokens") != 1):
            continue  # no rows are due; only a generation of one token has the prefill half's rows alone
        if meta.get(RETRACTIONS.name):
            raise LostByRetraction("incomplete", f"{RETRACTED} its rows")
        if prompts is None:
            raise UnreadableAnswer("incomplete", f"the prefill half returned no {fields.rows.name}: {fields.remedy}")
        rows.insert(fields, meta, JoinedString(prompts, own))
    if request.prompt_logprobs:
        meta |= {name: theirs[name] for name in INPUT_LOGPROBS if name in theirs}
        asked, first = meta.get(IDS_LOGPROBS), theirs.get(IDS_LOGPROBS)
        if asked and asked[0] is None and first:
            meta[IDS_LOGPROBS] = [first[0], *asked[1:]]


def _set_first_version(meta: dict[str, Any], version: str) -> None:
    """Set the weight version of the first token to `version`, which the prefill half has."""
    spans = meta.get(VERSIONS)
    if not spans or not spans[0]["end"] or spans[0]["version"] == version:
        return
    first, *others = spans
    kept = [{**first, "start": 1}] if first["end"] > 1 else []
    meta[VERSIONS] = [{"version": version, "start": 0, "end": 1}, *kept, *others]
    meta[VERSION_NAMED.name] = meta[VERSIONS][-1]["version"]


def _all_metas(parsed: Any) -> list[dict[str, Any]]:
    """Return every object of an answer that contains weight versions."""
    metadata = parsed.get("metadata") if isinstance(parsed, dict) else None
    return [*metas_of(parsed), *([metadata] if isinstance(metadata, dict) else [])]


def _meta_at(theirs: Mapping[int, Mapping[str, Any]], place: int) -> Mapping[str, Any]:
    if place not in theirs:
        raise UnreadableAnswer("incomplete", f"the prefill half has no answer with index {place}")
    return theirs[place]
