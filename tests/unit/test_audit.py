"""Audits: which sampled tokens are compared, and when recorded and recomputed logprobs lie too far apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from middleware_hub.auditing.spans import AuditedTurn, Comparable, Distribution, distribution
from middleware_hub.auditing.spans import comparable as of_line
from middleware_hub.auditing.tool.report import lines
from middleware_hub.auditing.tool.verdict import ENOUGH, AuditedEpisodes, Limits, Verdict, judge
from miles_router.engines.recomputing import AskedSampling
from miles_router.trajectory import Malformed, Piece

ANY = 1 << 20
PLAIN = AskedSampling({}, None, "")


def comparable(
    line: list[AuditedTurn], elsewhere: dict[int, int], now: str | None, longest: int, *assumed: dict[str, Any]
) -> Comparable:
    """With what an engine assumes."""
    return of_line(line, elsewhere, now, longest, {turn: distribution(turn.asked, assumed) for turn in line})


def turn(number: int, start: int, *sampled: tuple[int, str | None], **facts: Any) -> AuditedTurn:
    """One that sampled from a position on."""
    pieces = [Piece.sampled(range(count), [-1.0] * count, version) for count, version in sampled]
    end = start + sum(count for count, _ in sampled)
    known: Any = {"worker": "a", "cache_versions": (), "asked": PLAIN, "chat": True, **facts}
    return AuditedTurn(number=number, start=start, end=end, pieces=pieces, **known)


def test_what_another_sample_has_is_left_out() -> None:
    first = turn(0, 10, (2, "1"), (5, "1"))
    assert [(span.start, span.end) for span in comparable([first], {0: 3}, "1", ANY).spans] == [(13, 17)]
    assert comparable([first], {0: 7}, "1", ANY).spans == ()


@pytest.mark.parametrize(
    ("sampled", "facts", "now", "others"),
    [
        ([(5, "1")], {}, "2", {"other_weights": 5}),
        ([(5, "1")], {}, None, {"unknown_weights": 5}),
        ([(5, "1"), (3, "2")], {}, "2", {"other_weights": 5, "weights_changed_within": 3}),
        ([(5, "2")], {"cache_versions": ["1", "2"]}, "2", {"old_cache": 5}),
        ([(5, "2")], {"asked": PLAIN._replace(reshaped_by="regex")}, "2", {"reshaped_by_regex": 5}),
        ([(5, "2")], {"asked": PLAIN._replace(adapter=None)}, "2", {"unknown_adapter": 5}),
        ([(5, "2")], {"asked": None}, "2", {"unknown_settings": 5}),
        ([(5, "1")], {"asked": None}, "2", {"other_weights": 5}),
    ],
)
def test_what_cannot_be_compared_says_why(
    sampled: list[tuple[int, str | None]], facts: dict[str, Any], now: str | None, others: dict[str, int]
) -> None:
    found = comparable([turn(0, 10, *sampled, **facts)], {}, now, ANY)
    assert (found.spans, found.excluded) == ((), others)


@pytest.mark.parametrize(
    ("said", "reshaped", "assumed", "told"),
    [
        ({}, None, {}, Distribution(None, 1.0)),
        ({}, None, {"temperature": 0.7}, Distribution(None, 0.7)),
        ({"temperature": "0.6"}, None, {}, Distribution("reshaped_by_temperature", 1.0)),
        ({}, None, {"repetition_penalty": 1.1}, Distribution("reshaped_by_repetition_penalty", 1.0)),
        ({"repetition_penalty": 1.0}, None, {"repetition_penalty": 1.1}, Distribution(None, 1.0)),
        ({"top_k": 1, "temperature": 0.6}, None, {}, Distribution("reshaped_by_temperature", 1.0)),
        ({}, None, {"top_k": 1, "temperature": 0.01}, Distribution("reshaped_by_temperature", 1.0)),
        ({"temperature": 0.6}, None, {"top_k": 1}, Distribution("reshaped_by_temperature", 1.0)),
    ],
)
def test_what_a_request_said_counts_before_what_its_engine_assumes(
    said: dict[str, Any], reshaped: str | None, assumed: dict[str, Any], told: Distribution
) -> None:
    assert distribution(AskedSampling(said, reshaped, ""), [assumed]) == told


LIMITS = Limits(quantile=0.95, threshold=0.3)
NO_PROMPTS: dict[str, Any] = {"compared": 0, "differ": 0, "differences": [], "not_compared": {}}


def sample(leaf: int, apart: float, *, tokens: int = 100, **fields: Any) -> dict[str, Any]:
    """A sample each of whose tokens lies so far apart."""
    recorded = -np.random.default_rng(leaf).random(tokens) - 1.0
    span = {
        "start": 10,
        "end": 10 + tokens,
        "version": "1",
        "worker": "a",
        "recomputed_by": "b",
        "recorded": recorded.tolist(),
        "recomputed": (recorded - apart).tolist(),
        **fields,
    }
    return {"leaf": leaf, "spans": [span], "not_comparable": {}, "refusals": []}


def verdict(*samples: dict[str, Any], limits: Limits = LIMITS, **prompts: Any) -> Verdict:
    found = AuditedEpisodes()
    answered = {"compared": 1, "differ": 0, "differences": [], "not_compared": {}, **prompts}
    for kind in ("session", "text"):
        own = [each for each in samples if each.get("kind", "session") == kind]
        found.add(
            {"id": kind[0], "kind": kind, "samples": own, "prompts": answered if kind == "session" else NO_PROMPTS}
        )
    return judge(found, limits)


def test_one_bad_worker_does_not_hide_among_good_ones() -> None:
    short: Any = {"tokens": ENOUGH - 1}
    bad = [sample(100 + leaf, 1.0, **short, worker="bad") for leaf in range(2)]
    made = verdict(*(sample(leaf, 0.0) for leaf in range(40)), *bad)
    assert made.too_far == ["worker bad"], "its samples are too short to be judged by themselves"


def test_few_tokens_are_judged_together() -> None:
    made = verdict(sample(0, 1.0, tokens=3))
    assert made.too_far == ["all"]


def test_rare_outliers_are_no_alarm() -> None:
    one = sample(0, 0.0)
    one["spans"][0]["recomputed"][:4] = [-9.0] * 4
    assert verdict(one).good is True
    assert verdict(one, limits=Limits(quantile=1.0)).good is False


def test_what_is_good_has_not_slipped() -> None:
    """A span of few tokens may lie apart by chance, and fit those beside it."""
    few = sample(1, 0.0, tokens=3)
    few["spans"][0].update(recorded=[-2.0, -1.0, -1.0], recomputed=[-1.0, -2.0, -1.0])
    made = verdict(sample(0, 0.0, tokens=1000), few)
    assert (made.good, made.slip) == (True, None)
    assert not any("shifted by one" in line for line in lines(made))


@pytest.mark.parametrize("by", [1, -1])
def test_a_slip_is_said(by: int) -> None:
    one = sample(0, 0.0)
    one["spans"][0]["recomputed"] = np.random.default_rng(1).normal(-5, 3, 100).tolist()
    one["spans"][0]["recorded"] = np.roll(one["spans"][0]["recomputed"], -by).tolist()
    made = verdict(one)
    assert (made.good, made.slip) == (False, by)
    assert any("shifted by one" in line for line in lines(made))


def test_prompts_that_differ_are_bad_whatever_logprobs_say() -> None:
    side = {"tokens": 3, "ids": [1], "text": "x", "dropped": 0}
    difference = {"turn": 0, "position": 2, "held": side, "rendered": {**side, "text": "y"}}
    made = verdict(sample(0, 0.0), differ=1, differences=[difference])
    assert (made.good, made.too_far) == (False, [])
    assert [line for line in lines(made) if line.endswith("'")] == ["    held:     'x'", "    rendered: 'y'"]


def test_nothing_comparable_is_neither_good_nor_bad() -> None:
    empty = {"leaf": 0, "spans": [], "not_comparable": {"other_weights": 9}, "refusals": ["no room"]}
    made = verdict(empty)
    assert (made.good, made.total) == (None, None)
    said = list(lines(made))
    assert "  other_weights: 9" in said
    assert "  an engine refused: 'no room'" in said
    assert said[-1].startswith("NOTHING COMPARABLE")


@pytest.mark.parametrize(
    "changed",
    [
        {"recorded": [], "recomputed": []},
        {"recorded": [-1.0], "recomputed": [-1.0, -2.0]},
        {"recorded": [None], "recomputed": [-1.0]},
        {"recorded": [[-1.0]], "recomputed": [[-1.0]]},
        {"start": "here"},
    ],
)
def test_what_is_no_answer_is_refused(changed: dict[str, Any]) -> None:
    one = sample(0, 0.0, tokens=1)
    one["spans"][0].update(changed)
    with pytest.raises(Malformed):
        verdict(one)
