"""Parts of one generation, sampled in several goes, joined into the answer one go would have given. Pure.

An answer is one of SGLang's `/generate`: `text`, `output_ids`, `meta_info`. What it says of the output is concatenated
or added up; what it says of the prompt is the first part's, of the end the last part's.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Answer = Mapping[str, Any]

CONCATENATED = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
ADDED = ("completion_tokens", "output_token_logprobs_length", "num_retractions", "reasoning_tokens", "e2e_latency")
OF_THE_REQUEST = ("id", "e2e_latency", "resumed")
OF_THE_END = ("finish_reason", "weight_version")
EXPERTS = "routed_experts"
VERSIONS = "weight_versions"
RESUMED = "resumed"  # how often the generation was carried on
LAST_TOKEN = 16  # characters that may stand behind a stop string in the token that completes it
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def join(first: Answer, second: Answer) -> dict[str, Any]:
    """`first` carried on by `second`, whose prompt was the first's prompt and output."""
    head, tail = first["meta_info"], second["meta_info"]
    if not first["output_ids"]:  # cut before it sampled anything, while it queued say: the second part is the answer
        head = {name: head[name] for name in OF_THE_REQUEST if name in head}
    meta = {**tail, **head}
    for name in CONCATENATED:
        if head.get(name) is not None or tail.get(name) is not None:
            meta[name] = [*(head.get(name) or ()), *(tail.get(name) or ())]
    for name in ADDED:
        if isinstance(head.get(name), (int, float)) or isinstance(tail.get(name), (int, float)):
            meta[name] = (head.get(name) or 0) + (tail.get(name) or 0)
    for name in OF_THE_END:
        if name in tail:
            meta[name] = tail[name]
    shift = len(first["output_ids"])
    if VERSIONS in tail:
        meta[VERSIONS] = join_spans(head.get(VERSIONS) or (), tail[VERSIONS] or (), shift)
    if EXPERTS in head or EXPERTS in tail:
        meta[EXPERTS] = join_base64(head.get(EXPERTS) or "", tail.get(EXPERTS) or "")
    meta["finish_reason"] = _whole_length(tail.get("finish_reason"), shift)
    meta[RESUMED] = head.get(RESUMED, 0) + 1
    ids = [*first["output_ids"], *second["output_ids"]]
    return {**first, "text": first["text"] + second["text"], "output_ids": ids, "meta_info": meta}


def _whole_length(finish: Any, shift: int) -> Any:
    """`{"type": "length", "length": n}` counts the whole output."""
    if isinstance(finish, Mapping) and isinstance(finish.get("length"), int):
        return {**finish, "length": finish["length"] + shift}
    return finish


def join_spans(
    head: Sequence[Mapping[str, Any]], tail: Sequence[Mapping[str, Any]], shift: int
) -> list[dict[str, Any]]:
    """Version spans in a row; neighbours of one version are one, empty ones none."""
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
    """Base64 of two byte strings in a row; decoded only if the first does not end on a boundary of three bytes."""
    if not head.endswith("="):
        return head + tail
    return base64.b64encode(base64.b64decode(head) + base64.b64decode(tail)).decode("ascii")


def cut(answer: Answer, tokens: int, text: str, finish: Mapping[str, Any], *, experts_start: int = 0) -> dict[str, Any]:
    """The answer as if it had ended after `tokens` tokens, with `text` and `finish`. `experts_start` is the token that
    its first row of routed experts is about."""
    meta = dict(answer["meta_info"])
    dropped = len(answer["output_ids"]) - tokens
    for name in CONCATENATED:
        if meta.get(name) is not None:
            meta[name] = meta[name][:tokens]
    for name in ("completion_tokens", "output_token_logprobs_length"):
        if isinstance(meta.get(name), int):
            meta[name] -= dropped
    if meta.get(VERSIONS):
        spans = [{**span, "end": min(span["end"], tokens)} for span in meta[VERSIONS] if span["start"] < tokens]
        meta[VERSIONS] = spans
        meta["weight_version"] = spans[-1]["version"] if spans else meta.get("weight_version")
    if meta.get(EXPERTS):
        rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - experts_start
        meta[EXPERTS] = _without_rows(meta[EXPERTS], dropped, rows)
    meta["finish_reason"] = dict(finish)
    return {**answer, "text": text, "output_ids": answer["output_ids"][:tokens], "meta_info": meta}


def _without_rows(encoded: str, dropped: int, rows: int) -> str:
    data = base64.b64decode(encoded)
    row = len(data) // (rows + dropped)
    return base64.b64encode(data[: rows * row]).decode("ascii")


def straddling(text: str, boundary: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop string that begins before `boundary` and ends behind it: `(where, which)`. An engine that has the
    first part as its prompt cannot see it."""
    found = []
    for stop in stops:
        at = text.find(stop, max(0, boundary - len(stop) + 1), boundary + len(stop) - 1)
        if 0 <= at < boundary:
            found.append((at, stop))
    return min(found, default=None)


def forming(text: str, boundary: int, stops: Sequence[str]) -> int:
    """Where a stop string may have begun before `boundary` that could still be completed; the end of `text` if none."""
    for at in range(max(0, boundary - max(map(len, stops), default=0)), boundary):
        if any(len(stop) > len(text) - at and stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)


def ending(answer: Answer, stops: Sequence[str], end_ids: Collection[int], budget: int | None) -> dict[str, Any] | None:
    """The `finish_reason` of an answer whose last token would have ended it, had it not been aborted at that very
    token: an engine looks for an abort first."""
    ids, text = answer["output_ids"], answer["text"]
    if not ids:
        return None
    found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, len(text) - len(stop) - LAST_TOKEN))) >= 0]
    if found:
        return {"type": "stop", "matched": min(found)[1]}
    if ids[-1] in end_ids:
        return {"type": "stop", "matched": ids[-1]}
    if budget is not None and len(ids) >= budget:
        return {"type": "length", "length": len(ids)}
    return None
