"""When recorded and recomputed logprobs lie too far apart."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from middleware_hub.auditing.tool.report import lines, nats
from middleware_hub.auditing.tool.verdict import ENOUGH, AuditedEpisodes, Limits, Verdict, judge
from miles_router.trajectory import Malformed

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


def test_what_lies_close_is_good() -> None:
    made = verdict(sample(0, 0.1), sample(1, 0.0))
    assert (made.good, made.too_far, made.slip) == (True, [], None)
    assert made.total is not None
    assert (made.total.tokens, round(made.total.at, 6)) == (200, 0.1)


def test_one_bad_sample_does_not_hide_among_good_ones() -> None:
    made = verdict(*(sample(leaf, 0.0) for leaf in range(40)), sample(40, 1.0))
    assert (made.good, made.too_far) == (False, ["sample s/40"])


def test_one_bad_worker_does_not_hide_among_good_ones() -> None:
    short: Any = {"tokens": ENOUGH - 1}
    bad = [sample(100 + leaf, 1.0, **short, worker="bad") for leaf in range(2)]
    made = verdict(*(sample(leaf, 0.0) for leaf in range(40)), *bad)
    assert made.too_far == ["worker bad"], "its samples are too short to be judged by themselves"


def test_one_bad_kind_does_not_hide_among_good_ones() -> None:
    short: Any = {"tokens": ENOUGH - 1}
    bad = [{**sample(100 + leaf, 1.0, **short, worker=str(leaf)), "kind": "text"} for leaf in range(2)]
    made = verdict(*(sample(leaf, 0.0) for leaf in range(40)), *bad)
    assert made.too_far == ["kind text"]


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


def test_positions_are_grouped() -> None:
    made = verdict(sample(0, 0.0, start=60), sample(1, 0.0, start=300_000))
    assert {name: each.tokens for name, each in made.parts["position"].items()} == {
        "0-64": 4,
        "64-256": 96,
        "262144-": 100,
    }


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


def test_many_samples_are_judged_at_once() -> None:
    began = time.process_time()
    made = verdict(*(sample(leaf, 0.0, tokens=2, worker=str(leaf)) for leaf in range(10_000)))
    assert len(made.parts["sample"]) == 10_000
    assert time.process_time() - began < 20


@pytest.mark.parametrize(("distance", "shown"), [(0.0, "0"), (3.7e-05, "3.7e-05"), (0.0021, "0.0021"), (0.118, "0.12")])
def test_a_small_distance_is_not_shown_as_none(distance: float, shown: str) -> None:
    assert nats(distance) == shown
