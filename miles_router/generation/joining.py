"""Functions that join the answers of several attempts into the answer of a single generation. No I/O.

Answers have the form of SGLang's `/generate`: `text`, `output_ids`, `meta_info`. Fields about the output are
concatenated or added up. Fields about the prompt come from the first attempt, fields about the end from the last.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from miles_router.engines.answers import LENGTHS, OUTPUT_LISTS, VERSION, VERSIONS, UnreadableAnswer
from miles_router.engines.rows import ROW_FIELDS, cut_rows, decode_rows

ADDED = (*LENGTHS, "num_retractions", "reasoning_tokens", "e2e_latency")
OF_THE_REQUEST = ("id", "e2e_latency", "resumed")
OF_THE_PROMPT = ("prompt_tokens", "cached_tokens", "cached_tokens_details")
OF_THE_END = ("finish_reason", VERSION)
ROWS = tuple(fields.rows.name for fields in ROW_FIELDS.values())
RESUMED = "resumed"  # number of times that the generation was resumed
LAST_TOKEN = 16  # maximum characters behind a stop string in the token that completes it
AT_ONCE = 16  # maximum tokens that an engine adds in one step


def join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return `first` continued by `second`, whose prompt was the prompt and output of `first`.

    Raises:
        UnreadableAnswer: only one answer names weight versions, or a list does not have one element per token.
    """
    head, tail = first["meta_info"], second["meta_info"]
    if first["output_ids"]:  # the prompt of `second` is a longer one
        tail = {name: tail[name] for name in tail if name not in OF_THE_PROMPT}
    if not first["output_ids"]:  # no token yet, for example aborted in the queue: `second` is the answer
        head = {name: head[name] for name in OF_THE_REQUEST if name in head}
    elif second["output_ids"] and bool(head.get(VERSIONS)) != bool(tail.get(VERSIONS)):
        raise UnreadableAnswer("versions_leave_gaps", "only some of the joined answers name weight versions")
    meta = {**tail, **head}
    for name in OUTPUT_LISTS:
        lists = (head.get(name) or (), tail.get(name) or ())
        if any(lists) and [*map(len, lists)] != [len(first["output_ids"]), len(second["output_ids"])]:
            raise UnreadableAnswer("token_counts_disagree", f"{name} does not have one element per token")
        if head.get(name) is not None or tail.get(name) is not None:
            meta[name] = [*lists[0], *lists[1]]
    for name in ADDED:
        numbers = [each for each in (head.get(name), tail.get(name)) if isinstance(each, (int, float))]
        if numbers:
            meta[name] = sum(numbers)
    for name in OF_THE_END:
        if name in tail:
            meta[name] = tail[name]
    shift = len(first["output_ids"])
    if VERSIONS in tail:
        meta[VERSIONS] = join_spans(head.get(VERSIONS) or (), tail[VERSIONS] or (), shift)
    for name in ROWS:
        if name in head or name in tail:
            meta[name] = join_base64(head.get(name) or "", tail.get(name) or "")
    meta["finish_reason"] = _add_length(tail.get("finish_reason"), shift)
    meta[RESUMED] = head.get(RESUMED, 0) + 1 + tail.get(RESUMED, 0)  # `tail` counts moves between workers
    ids = [*first["output_ids"], *second["output_ids"]]
    return {**first, "text": first["text"] + second["text"], "output_ids": ids, "meta_info": meta}


def _add_length(finish: Any, shift: int) -> Any:
    """Return a finish reason `{"type": "length", "length": n}` with n increased by `shift`, the number of tokens from
    earlier attempts. Other finish reasons are returned unchanged."""
    if isinstance(finish, Mapping) and isinstance(finish.get("length"), int):
        return {**finish, "length": finish["length"] + shift}
    return finish


def join_spans(
    head: Sequence[Mapping[str, Any]], tail: Sequence[Mapping[str, Any]], shift: int
) -> list[dict[str, Any]]:
    """Concatenate version spans. Adjacent spans of the same version are merged, and empty ones dropped."""
    spans: list[dict[str, Any]] = []
    moved = [{**span, "start": span["start"] + shift, "end": span["end"] + shift} for span in tail]
    for span in [*map(dict, head), *moved]:
        if span["start"] == span["end"]:
            continue
        if spans and spans[-1]["version"] == span["version"] and spans[-1]["end"] == span["start"]:
            spans[-1]["end"] = span["end"]
        else:
            spans.append(span)
    return spans


def join_base64(head: str, tail: str) -> str:
    """Concatenate two byte strings in base64. They are decoded only if the first does not end on a boundary of three
    bytes.

    Raises:
        UnreadableAnswer: invalid base64.
    """
    if not head.endswith("="):
        return head + tail
    return base64.b64encode(decode_rows(head) + decode_rows(tail)).decode("ascii")


def truncate(
    answer: Mapping[str, Any],
    tokens: int,
    text: str,
    finish: Mapping[str, Any],
    *,
    request: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the answer as if it had ended after `tokens` tokens, with `text` and `finish`.

    `request` defines the token of the first row.

    Raises:
        UnreadableAnswer: the rows do not fit the tokens.
    """
    meta = dict(answer["meta_info"])
    dropped = len(answer["output_ids"]) - tokens
    for name in OUTPUT_LISTS:
        if meta.get(name) is not None:
            meta[name] = meta[name][:tokens]
    for name in LENGTHS:
        if isinstance(meta.get(name), int):
            meta[name] -= dropped
    if meta.get(VERSIONS):
        spans = [{**span, "end": min(span["end"], tokens)} for span in meta[VERSIONS] if span["start"] < tokens]
        meta[VERSIONS] = spans
        meta[VERSION] = spans[-1]["version"] if spans else meta.get(VERSION)
    for fields in ROW_FIELDS.values():
        name = fields.rows.name
        if meta.get(name) and dropped:
            rows = meta.get("prompt_tokens", 0) + tokens - 1 - fields.start_of(request)
            meta[name] = cut_rows(meta[name], rows + dropped, 0, rows)
    meta["finish_reason"] = dict(finish)
    return {**answer, "text": text, "output_ids": answer["output_ids"][:tokens], "meta_info": meta}


def find_stop_across(text: str, boundary: int, stops: Sequence[str], *, halved: bool = False) -> tuple[int, str] | None:
    """Return (position, stop string) of the first stop string that begins before `boundary` and ends behind it, or
    None.

    The engine cannot see it, because the first part is in its prompt. With `halved`, a character spans the cut and is
    located behind the boundary; a stop string that begins with it is found too.
    """
    found = []
    for stop in stops:
        at = text.find(stop, max(0, boundary - len(stop) + 1), boundary + halved + len(stop) - 1)
        if at >= 0:
            found.append((at, stop))
    return min(found, default=None)


def stop_may_form(text: str, boundary: int, stops: Sequence[str], *, halved: bool = False) -> bool:
    """Return whether a stop string may have begun before `boundary` that text behind `text` could complete."""
    first = max(0, boundary - max(map(len, stops), default=0))
    places = range(first, boundary + halved)
    return any(len(stop) > len(text) - at and stop.startswith(text[at:]) for at in places for stop in stops)


def find_end(
    ids: Sequence[int], tail: str, stops: Sequence[str], end_ids: Collection[int], budget: int | None
) -> tuple[int, dict[str, Any]] | None:
    """Return (number of tokens, finish reason) if an aborted answer already contains its end, else None.

    An engine handles an abort before it looks for the end. Speculative decoding may add several tokens at once.

    Args:
        tail: the text of the last tokens.
    """
    found = [(at, stop) for stop in stops if (at := tail.find(stop, max(0, len(tail) - len(stop) - LAST_TOKEN))) >= 0]
    if found:
        return len(ids), {"type": "stop", "matched": min(found)[1]}
    end = next((at + 1 for at in range(max(0, len(ids) - AT_ONCE), len(ids)) if ids[at] in end_ids), None)
    if budget is not None and len(ids) >= budget and (end is None or end > budget):
        return budget, {"type": "length", "length": budget}
    return (end, {"type": "stop", "matched": ids[end - 1]}) if end is not None else None
