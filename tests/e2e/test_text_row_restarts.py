"""Rows of experts of texts under `--state-dir`: with `--state-rows` they are there again, else missing by name."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.state.inspection import holdings
from miles_router.testing import SimulatedWorker
from tests.e2e.test_text_restarts import Restarts
from tests.support.cache_trial import SHORT, Trial, checkpoint, events
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, array_of, truth
from tests.support.http import RawReply
from tests.support.waiting import until


@pytest.fixture
async def restarts(tmp_path: Path) -> AsyncIterator[Restarts]:
    async with SimulatedWorker(tokenizer=checkpoint(), weight_version="1", moe=MOE) as worker:
        yield Restarts(worker, tmp_path)


def keeper(max_bytes: int = 1 << 20) -> tuple[MiddlewareSpec]:
    return (MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE, "max_bytes": max_bytes}),)


async def rows(trial: Trial, asked: dict[str, Any]) -> RawReply:
    return await trial.post("/routed_experts", asked)


async def all_rows(trial: Trial, asked: Sequence[dict[str, Any]]) -> list[bytes]:
    answers = [await rows(trial, each) for each in asked]
    assert {each.status for each in answers} == {200}, [each.body for each in answers]
    return [each.body for each in answers]


def bytes_of_rows(restarts: Restarts) -> int:
    """On the disk as a kill at this moment would leave it."""
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(restarts.directory, Path(place) / "copy")
        return sum(each.large for each in holdings(copy))


def numbers(trial: Trial) -> dict[str, Any]:
    return dict(trial.router.app.router.statistics["radix_tree_archive"]())


def deleted() -> bool:
    return not any(task.get_name() == "delete texts" for task in asyncio.all_tasks())


async def test_rows_of_texts_after_a_kill_are_byte_for_byte_those_before(restarts: Restarts) -> None:
    async with restarts.started(keeper(), state_rows=True) as before:
        first = await before.generate(text="Question: one?")
        text = "Question: one?" + first["text"]
        more = {"text": f"{text} And two?", "sampling_params": SHORT, "stream": True}
        second = [each for each in events((await before.post("/generate", more)).body) if each][-1]
        siblings = await before.generate(text=["Question: one?", "Another"], sampling_params={**SHORT, "n": 3})
        own = {"return_routed_experts": True, "routed_experts_start_len": 3}
        by_client = await before.generate(text="From the fourth on", **own)
        answers = [first, second, *siblings]
        asked: list[dict[str, Any]] = [{"rid": each["meta_info"]["id"]} for each in answers]
        asked += [{"text": f"{text} And two?{second['text']}", "format": form} for form in ("json", "safetensors")]
        asked += [{"text": text, "start": 2, "stop": 9}, {"rid": by_client["meta_info"]["id"], "start": 3}]
        known = await all_rows(before, asked)
        for each in answers:
            tokens = (await before.retrieve(rid=each["meta_info"]["id"]))["tokens"]
            assert np.array_equal(array_of(await rows(before, {"rid": each["meta_info"]["id"]})), truth(tokens))
        written = numbers(before)
        assert written["row_bytes"] > 0
        async with restarts.started(keeper(), state_rows=True) as after:
            assert await all_rows(after, asked) == known
            assert numbers(after)["loaded"] == len(answers) + 1
            for name in ("families", "tokens"):
                assert numbers(after)[name] == written[name] > 0
        async with restarts.started(keeper(), state_rows=False) as again:  # what is held is read, whatever is written
            assert await all_rows(again, asked[::-1]) == known[::-1]


async def test_rows_of_texts_that_were_not_written_are_said_to_be_missing(restarts: Restarts) -> None:
    async with restarts.started(keeper()) as before:
        answer = await before.generate(text="one")
        asked = {"text": f"one{answer['text']}"}
        assert (await rows(before, asked)).status == 200
        assert bytes_of_rows(restarts) == 0
        async with restarts.started(keeper(), state_rows=True) as after:
            found = await rows(after, asked)
            assert found.error_type == "not_found"
            assert "--state-rows was off" in found.json()["error"]["message"]
            more = await after.generate(text=f"{asked['text']} and two")
            whole = await after.retrieve(rid=more["meta_info"]["id"])
            assert np.array_equal(array_of(await rows(after, {"rid": whole["rid"]})), truth(whole["tokens"]))


@pytest.mark.alone("what is in memory is bounded in each process")
async def test_rows_of_texts_that_nobody_touched_are_deleted_where_there_is_no_room(restarts: Restarts) -> None:
    async with restarts.started(keeper(), state_rows=True) as before:
        answers = [await before.generate(text=f"Question {each}: {'x' * 40}") for each in range(6)]
        rids = [each["meta_info"]["id"] for each in answers]
        written = bytes_of_rows(restarts)
        last = await all_rows(before, [{"rid": rids[-1]}])
        room = written // 3
        async with restarts.started(keeper(room), state_rows=True) as after:
            assert await all_rows(after, [{"rid": rids[-1]}]) == last, "the oldest go first"
            await until(deleted, "the disk knows")
            assert bytes_of_rows(restarts) <= room
            for rid in rids:
                await after.retrieve(rid=rid)
            assert (await rows(after, {"rid": rids[0]})).status == 404
            async with restarts.started(keeper(), state_rows=True) as again:
                assert await all_rows(again, [{"rid": rids[-1]}]) == last
                assert (await again.retrieve(rid=rids[0]))["rid"] == rids[0]
