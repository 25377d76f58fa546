"""Answers of `/generate`, whole and growing: `engines/answers.py` and `engines/growing.py`.

An input is JSON: one whole answer, or a list of the events of a stream; or the seed of a good answer and its events.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import orjson

from miles_router.engines.answers import OUTPUT_LISTS, GenerateAnswer, UnreadableAnswer, without_logprobs
from miles_router.engines.growing import GrowingAnswer
from miles_router.trajectory import InvalidTrajectory, Piece
from tests.fuzz.target import Target, expand

SEED = b"seed "
LOGPROBS, SPANS = "output_token_logprobs", "weight_versions"
FINISHES: Sequence[Any] = (
    {"type": "stop", "matched": 7},
    {"type": "stop", "matched": "x"},
    {"type": "length", "length": 3},
    {"type": "abort", "message": "Aborted"},
)
TOKENS: tuple[bytes, ...] = (
    b"null",
    b"[]",
    b"{}",
    b"true",
    b'""',
    b"-1",
    b"1.5",
    b"[[-0.5, 1, null]]",
    b'"x"',
    b'{"type": "abort"}',
)
TOKENS += (b'"output_ids"', b'"completion_tokens": ', b'"weight_versions"', b'{"version": "1", "start": 0, "end": 2}')


class GenerateAnswers(Target):
    """Any JSON in place of an answer, or of a stream's events.

    - It is read, or refused as `UnreadableAnswer`; nothing else is raised.
    - What is read is aligned: a logprob for each token, of that token; versions that cover the tokens without gaps.
    - A stream that is refused at an event is as it was before that event; nothing that has come is taken back.
    - Looking at each event, and looking only at those that matter, come to the same end.
    - An answer is read as it was written, whole, cumulative or incremental, in whatever steps.
    """

    name = "generate-answers"
    runs = 12000
    tokens = TOKENS

    def generate(self, dice: random.Random) -> bytes:
        if dice.random() < 0.5:
            return SEED + b"%d" % dice.randrange(1 << 32)
        whole = answer(dice)
        kind = dice.choice(("whole", "cumulative", "incremental"))
        made = whole if kind == "whole" else streamed(dice, whole, incremental=kind == "incremental")
        return json.dumps(made).encode()

    def check(self, data: bytes) -> Hashable:
        if data.startswith(SEED):
            return _check_good(random.Random(data))
        try:
            parsed = orjson.loads(expand(data))
        except orjson.JSONDecodeError:
            return "no JSON"
        before = deepcopy(parsed)
        without_logprobs(parsed)
        seen = _check_stream(parsed) if isinstance(parsed, list) else _check_whole(parsed)
        assert parsed == before, "what was given has been changed"
        return seen


def answer(dice: random.Random) -> dict[str, Any]:
    """A whole answer as an engine gives it."""
    ids = [dice.randrange(100) for _ in range(dice.choice((0, 1, 2, 5)))]
    meta: dict[str, Any] = {"id": "r", "finish_reason": dice.choice(FINISHES), "completion_tokens": len(ids)}
    if dice.random() < 0.7:
        meta[LOGPROBS] = [[-dice.random(), token, None] for token in ids]
    if dice.random() < 0.7:
        meta["weight_version"] = "2"
        cut = dice.randint(0, len(ids))
        spans: list[dict[str, Any]] = [
            {"version": "1", "start": 0, "end": cut},
            {"version": "2", "start": cut, "end": len(ids)},
        ]
        meta[SPANS] = [span for span in spans if span["end"] > span["start"]] or spans[:1]
    return {"text": "".join(chr(97 + token % 26) for token in ids), "output_ids": ids, "meta_info": meta}


def streamed(dice: random.Random, whole: Mapping[str, Any], *, incremental: bool) -> list[dict[str, Any]]:
    """The events in which a whole answer may come."""
    ids, meta = whole["output_ids"], whole["meta_info"]
    ends = sorted({len(ids), *(dice.randint(0, len(ids)) for _ in range(3))})
    if len(ids) and ends[0] == 0:
        ends = ends[1:]
    events, start = [], 0
    for end in ends:
        last, first = end == len(ids), start if incremental else 0
        ahead = end if incremental else min(len(ids), end + dice.choice((0, 0, 1)))  # lists may be ahead of the count
        said = {**meta, "completion_tokens": end, "finish_reason": meta["finish_reason"] if last else None}
        if LOGPROBS in meta:
            said[LOGPROBS] = meta[LOGPROBS][first:ahead]
        if not last:
            said.pop(SPANS, None)
            if "weight_version" in said:
                said["weight_version"] = meta[SPANS][-1]["version"]
        events.append({"text": whole["text"][first:end], "output_ids": ids[first:ahead], "meta_info": said})
        start = end
    return events


def _check_good(dice: random.Random) -> Hashable:
    """An answer that comes in events is, at their end, the answer."""
    whole, incremental = answer(dice), dice.random() < 0.5
    events = streamed(dice, whole, incremental=incremental)
    for skim in (False, True):
        grown = _grow(events, skim=skim)
        assert grown == whole, f"{events} came to {grown}, not {whole}"
    return (incremental, len(events), len(whole["output_ids"]))


def _grow(events: Sequence[Any], *, skim: bool) -> dict[str, Any] | None:
    growing = GrowingAnswer()
    for event in deepcopy(events):
        (growing.add_lazily if skim else growing.add)(event)
    return growing.answer


def _check_whole(parsed: Any) -> Hashable:
    seen: list[Hashable] = []
    for logprobs in (True, False):
        try:
            read = GenerateAnswer.read(parsed, logprobs=logprobs)
        except UnreadableAnswer as refused:
            seen.append(refused.reason)
            continue
        aligned(parsed)
        assert read.ids == parsed["output_ids"], "other ids"
        entries = parsed["meta_info"].get(LOGPROBS)
        assert list(read.logprobs) == [entry[0] for entry in entries or ()], "other logprobs"
        assert not logprobs or len(read.logprobs) == len(read.ids), "tokens without logprobs"
        assert not read.versions or [run.end for run in read.versions][-1] == len(read.ids), "versions end elsewhere"
        assert [run.start for run in read.versions] == [0, *(run.end for run in read.versions)][: len(read.versions)]
        seen.append((read.finish, min(len(read.ids), 3), len(read.logprobs) > 0, min(len(read.versions), 3)))
    return tuple(seen)


def aligned(parsed: Any) -> None:
    """What was read as an answer can be recorded as one, or its arrays refuse it: ids that are numbers, and a logprob
    for each, of that id."""
    ids, entries = parsed["output_ids"], parsed["meta_info"].get(LOGPROBS)
    assert isinstance(ids, list), f"the ids are no list: {ids!r}"
    if entries is None:
        return
    assert [entry[1] for entry in entries] == ids, f"logprobs of other tokens: {ids} and {entries}"
    values = [entry[0] for entry in entries]
    try:
        Piece.sampled(ids, values, None)
    except InvalidTrajectory:
        return
    assert all(type(token) is int for token in ids), f"an id is no number: {ids!r}"
    assert all(type(value) in (int, float) and math.isfinite(value) for value in values), f"logprobs {values!r}"


def _check_stream(events: Sequence[Any]) -> Hashable:
    growing, refusal, seen = GrowingAnswer(), "", list[int]()
    for event in deepcopy(events):
        before = deepcopy(growing.answer), deepcopy(growing.spans), growing.incremental
        if not isinstance(event, dict):
            break
        try:
            grown = growing.add(event)
        except UnreadableAnswer as refused:
            refusal = refused.reason
            now = growing.answer, growing.spans, growing.incremental
            assert now == before, f"{event} was refused and has changed {before} to {now}"
            break
        seen.append(len(grown["output_ids"]))
        if before[0] is not None:
            known = before[0]["output_ids"]
            assert grown["output_ids"][: len(known)] == known, f"{known} was taken back: {grown['output_ids']}"
        entries = grown["meta_info"].get(LOGPROBS)
        assert entries is None or len(entries) == len(grown["output_ids"]), f"{len(entries)} logprobs: {grown}"
        if growing.ended:
            aligned(grown)
        assert not growing.spans or growing.spans[-1]["end"] == len(grown["output_ids"]), f"versions {growing.spans}"
        if growing.ended:
            break
    if not refusal and growing.ended:
        _same_when_skimmed(events[: len(seen)], growing)
    return (refusal, growing.ended, growing.incremental, tuple(min(count, 4) for count in seen[:4]))


def _same_when_skimmed(events: Sequence[Any], growing: GrowingAnswer) -> None:
    skimming = GrowingAnswer()
    for event in deepcopy(events):
        skimming.add_lazily(event)
    assert skimming.answer is not None
    assert growing.answer is not None
    meta, whole = skimming.answer["meta_info"], growing.answer["meta_info"]
    # What an event in the midst says and the last does not is not looked at, but for the tokens'.
    last = events[-1]["meta_info"].keys() | OUTPUT_LISTS | {SPANS}
    seen_meta = {name: whole[name] for name in whole.keys() & last} | {name: meta[name] for name in meta.keys() - last}
    seen = {**growing.answer, "meta_info": seen_meta}
    assert skimming.answer == seen, f"skimmed it is {skimming.answer}, not {seen}"
    assert skimming.spans == growing.spans, f"skimmed the versions are {skimming.spans}, not {growing.spans}"
