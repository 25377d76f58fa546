"""Text rollouts as episodes at `/router/episodes`: each field is what answers and `/retrieve_from_text` say; what is
evicted is gone; what runs says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.e2e.test_episodes import ROW, TURN, asked, got
from tests.support.cache_trial import CACHE, Trial, checkpoint, simulated_trial
from tests.support.experts_trial import simulated_experts
from tests.support.session_trial import SESSIONS
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[Trial]:
    async with simulated_trial(stage) as made:
        yield made


async def the_rows(trial: Any, **query: Any) -> list[Any]:
    """All of them, newest first."""
    return list((await got(trial, "episodes", **query))["episodes"])


async def three_turns(trial: Trial) -> tuple[str, list[Any]]:
    """A rollout whose text goes on twice behind an answer: its last text, and the answers."""
    text, answers = "one", []
    for _ in range(3):
        answers.append(await trial.generate(text=text))
        text += f"{answers[-1]['text']} and"
    return text.removesuffix(" and"), answers


async def test_a_rollout_is_one_episode_whose_turns_are_its_generations(trial: Trial) -> None:
    text, answers = await three_turns(trial)
    found = await trial.retrieve(text=text)
    (row,) = await the_rows(trial)
    assert set(row) == ROW
    assert (row["kind"], row["state"], row["turns"], row["segments"], row["leaves"]) == ("text", "idle", 3, 1, 1)
    assert (row["reasons"], row["finish_reason"], row["end_reason"]) == ({}, "length", None)
    assert row["tokens"] == {
        "all": len(found["tokens"]),
        "sampled": sum(found["loss_mask"]),
        "trained": sum(found["loss_mask"]),
    }
    assert trial.worker is not None
    assert (row["weight_versions"], row["workers"]) == (["default"], [trial.worker.url])
    assert (row["group"], row["label"], row["model"], row["waited_s"]) == (None, None, None, 0.0)
    detail = await got(trial, f"episodes/{row['id']}")
    assert {**{name: detail[name] for name in ROW}, "turns": detail["turns_total"]} == row
    assert (detail["metadata"], detail["contract"], detail["leaf_turns"]) == (None, None, [2])
    turns = detail["turns"]
    assert all(set(turn) == TURN for turn in turns)
    assert [(turn["turn"], turn["parent"], turn["reason"]) for turn in turns] == [
        (0, None, None),
        (1, 0, None),
        (2, 1, None),
    ]
    assert [turn["rid"] for turn in turns] == [answer["meta_info"]["id"] for answer in answers]
    assert [turn["cached_tokens"] for turn in turns] == [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert [turn["prompt_tokens"] for turn in turns] == [answer["meta_info"]["prompt_tokens"] for answer in answers]
    given = [exchange.generation for exchange in trial.log]
    assert [turn["end"] for turn in turns] == [len(each.input_ids) + len(each.output_ids) for each in given]
    assert all(row["started_at"] <= turn["asked_at"] <= turn["answered_at"] for turn in turns)
    spans = [span for turn in turns for span in turn["spans"]]
    assert [{name: span[name] for name in ("version", "start", "end")} for span in spans] == found["weight_versions"]
    assert {span["worker"] for span in spans} == {trial.worker.url}


async def test_its_tokens_are_those_that_are_retrieved(trial: Trial) -> None:
    text, _ = await three_turns(trial)
    found = await trial.retrieve(text=text)
    (row,) = await the_rows(trial)
    told = await got(trial, f"episodes/{row['id']}/tokens")
    for name, other in (
        ("tokens", "tokens"),
        ("loss_mask", "loss_mask"),
        ("sampled", "loss_mask"),
        ("logprobs", "rollout_logp"),
    ):
        assert told[name] == found[other], name
    assert told["versions"] == found["weight_versions"]
    assert (told["leaf"], told["length"], told["spelling"] is None) == (2, len(found["tokens"]), False)
    runs = [(run["start"], run["end"]) for run in found["weight_versions"]]
    assert [(turn["start"], turn["end"]) for turn in told["turns"]] == runs
    part = await got(trial, f"episodes/{row['id']}/tokens", start=2, stop=5)
    assert part["tokens"] == found["tokens"][2:5]


async def test_a_rollout_under_way_runs_and_one_that_is_not_answered_is_none(stage: Stage) -> None:
    async with simulated_trial(stage, token_latency_s=0.002) as trial:
        assert trial.worker is not None
        endless = {"text": "one", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        async with under_way(trial.post("/generate", endless)):
            await until(lambda: trial.worker is not None and trial.worker.running, "it runs")
            (row,) = await the_rows(trial, state="running")
            assert (row["turns"], row["under_way"], row["leaves"], row["tokens"]["all"]) == (0, 1, 0, 0)
            refused = await asked(trial, f"episodes/{row['id']}/tokens")
            assert (refused.status, "leaf must be" in refused.json()["error"]["message"]) == (400, True)
        await until(lambda: trial.worker is not None and not trial.worker.running, "its client has left")
        await stage.nothing_under_way()
        assert await the_rows(trial) == []


async def another(stage: Stage, trial: Trial, options: dict[str, Any] | None = None, **settings: Any) -> Trial:
    """A router of other settings before the same worker."""
    assert trial.worker is not None
    layers = (MiddlewareSpec(CACHE, options or {}),)
    router = await stage.router(trial.worker.url, middlewares=layers, hf_checkpoint=checkpoint(), **settings)
    return Trial(router, trial.worker)


async def test_with_text_off_its_ids_stay(stage: Stage, trial: Trial) -> None:
    hidden = await another(stage, trial, dashboard_text="off")
    await hidden.generate(text="one")
    (row,) = await the_rows(hidden)
    told = await got(hidden, f"episodes/{row['id']}/tokens")
    assert (told["text"], told["tokens"], told["spelling"]) == (False, None, None)
    assert len(told["loss_mask"]) == told["length"] > 0


async def test_both_kinds_are_one_list_newest_first(stage: Stage) -> None:
    async with simulated_experts(stage, around=(SESSIONS, CACHE)) as trial:
        made: list[str] = []
        for number in range(3):
            made.append(await trial.create(f"session-{number}"))
            await trial.generate(text=f"text {number}")
        rows = await the_rows(trial)
        assert [row["kind"] for row in rows] == ["text", "session"] * 3
        assert [row["id"] for row in rows if row["kind"] == "session"] == made[::-1]
        first = await got(trial, "episodes", limit=3)
        second = await got(trial, "episodes", limit=3, after=first["next"])
        assert (first["episodes"] + second["episodes"], second["next"]) == (rows, None)
        assert [row["kind"] for row in await the_rows(trial, kind="text")] == ["text"] * 3
        text = next(row for row in rows if row["kind"] == "text")
        told = await got(trial, f"episodes/{text['id']}/tokens")
        assert len(told["expert_entropy"]) == told["length"] - 1
