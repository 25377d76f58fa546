"""Texts under `--state-dir`: what was answered is there again in a router that is started on the same directory; rows
of experts too with `--state-rows`, else they are missing by name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_router import cli
from miles_router.errors import StateFull
from miles_router.settings.config import MiddlewareSpec
from miles_router.state.inspection import holdings
from miles_router.testing import SimulatedWorker
from tests.e2e.test_retrieve_from_text import siblings
from tests.support.cache_trial import CACHE, JSON, SHORT, Trial, checkpoint, events
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, array_of, truth
from tests.support.http import RawReply, whole_or_cut
from tests.support.restarts import StateDirectories
from tests.support.waiting import until


class Restarts(StateDirectories):
    """Of texts."""

    @contextlib.asynccontextmanager
    async def started(
        self, more: tuple[MiddlewareSpec, ...] = (), *, state_rows: bool = False, **options: Any
    ) -> AsyncIterator[Trial]:
        """The next router; `options` of the text cache."""
        settings = {"hf_checkpoint": checkpoint(), "state_rows": state_rows}
        async with self.router(MiddlewareSpec(CACHE, options), *more, **settings) as router:
            yield Trial(router, self.worker)


@pytest.fixture
async def restarts(tmp_path: Path) -> AsyncIterator[Restarts]:
    async with SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as worker:
        yield Restarts(worker, tmp_path)


async def told(trial: Trial, asked: list[dict[str, Any]]) -> list[bytes]:
    """What `/retrieve_from_text` says to each, as JSON and as safetensors."""
    answers = []
    for each in asked:
        for headers in (JSON, [("Accept", "application/octet-stream")]):
            answer = await trial.post("/retrieve_from_text", each, headers)
            assert answer.status == 200, answer.body
            answers.append(answer.body)
    return answers


async def streamed(trial: Trial, text: str) -> Any:
    body = {"text": text, "sampling_params": SHORT, "stream": True}
    answer = await trial.post("/generate", body, JSON)
    assert answer.status == 200
    return [each for each in events(answer.body) if each][-1]


async def test_what_is_retrieved_after_a_kill_is_byte_for_byte_what_was_before(restarts: Restarts) -> None:
    async with restarts.started() as before:
        first = await before.generate(text="Question: one?")
        more = "Question: one?" + first["text"] + "\nand two?"
        second = await streamed(before, more)
        siblings = await before.generate(text=["Question: one?", "Another"], sampling_params={**SHORT, "n": 3})
        by_ids = await before.generate(input_ids=[5, 6, 7, 8])
        answers = [first, second, *siblings, by_ids]
        asked: list[dict[str, Any]] = [{"rid": each["meta_info"]["id"]} for each in answers]
        texts = [
            f"Question: one?{first['text']}",
            more + second["text"],
            *(f"Another{a['text']}" for a in siblings[3:]),
        ]
        asked += [{"text": text} for text in texts]
        known = await told(before, asked)
        async with restarts.started() as after:
            assert await told(after, asked) == known
        async with restarts.started() as again:  # each by itself, in another order
            assert await told(again, asked[::-1]) == [
                body for pair in zip(known[-2::-2], known[::-2], strict=True) for body in pair
            ]


async def test_the_command_writes_the_generations_of_a_prompt(
    restarts: Restarts, capsys: pytest.CaptureFixture[str]
) -> None:
    async with restarts.started() as before:
        first = await before.generate(text="Question: one?")
        text = "Question: one?" + first["text"]
        second = await before.generate(text=f"{text} And two?")
        known = [await before.retrieve(rid=each["meta_info"]["id"]) for each in (first, second)]
        directory = str(restarts.directory)
    await asyncio.to_thread(cli.main, ["state", directory])
    owners = {line.split()[1] for line in capsys.readouterr().out.splitlines() if " family " in line}
    (owner,) = owners
    await asyncio.to_thread(cli.main, ["state", directory, owner])
    written = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert written == [{name: each[name] for name in written[0]} for each in known]
    assert {"rid", "response", "tokens", "loss_mask", "rollout_logp", "weight_versions"} <= written[0].keys()


@pytest.mark.alone("which of two processes has heard a generation last, nobody knows")
async def test_siblings_with_equal_text_stay_ambiguous(restarts: Restarts) -> None:
    async with restarts.started() as before:
        text, rids = await siblings(before)
        known = await told(before, [{"text": text}, *({"text": text, "rid": rid} for rid in rids)])
        async with restarts.started() as after:
            assert await told(after, [{"text": text}, *({"text": text, "rid": rid} for rid in rids)]) == known
            assert (await after.retrieve(text=text))["candidates"] == rids


async def test_a_text_goes_on_with_the_ids_that_were_sampled_before_the_kill(restarts: Restarts) -> None:
    async with restarts.started() as before:
        first = await before.generate(text="Question: one?")
        (given,) = before.given()
        async with restarts.started() as after:
            second = await after.generate(text=f"Question: one?{first['text']}\nand two?")
            assert after.given()[0][: len(given) + 6] == given + first["output_ids"]
            async with restarts.started() as again:
                found = await again.retrieve(rid=second["meta_info"]["id"])
                assert found["tokens"] == after.given()[0] + second["output_ids"]
                assert found["loss_mask"][len(given) : len(given) + 6] == [1] * 6


async def test_only_what_a_text_may_find_is_read(restarts: Restarts) -> None:
    async with restarts.started() as before:
        answers = [await before.generate(text=f"You are helpful. Question {each}?") for each in range(5)]
        async with restarts.started() as after:
            assert after.statistics()["entries"] == 0
            await after.retrieve(text=f"You are helpful. Question 3?{answers[3]['text']}")
            assert after.statistics()["entries"] == 1
            await after.retrieve(rid=answers[1]["meta_info"]["id"])
            assert after.statistics()["entries"] == 2
            await after.retrieve(text="Nobody has seen this")
            assert after.statistics()["entries"] == 2


async def test_a_full_disk_refuses_an_answer_by_name_and_loses_nothing(restarts: Restarts) -> None:
    async with restarts.started() as before:
        first = await before.generate(text="Question: one?")
        asked = {"text": "two", "sampling_params": SHORT}
        refused = await _refusing(before, lambda: before.post("/generate", asked))
        assert (refused.status, refused.json()["error"]["type"]) == (507, "state_failed")
        cut = await _refusing(before, lambda: whole_or_cut(before.post("/generate", {**asked, "stream": True})))
        assert b'"finish_reason":null' in cut.body
        assert b'"finish_reason":{' not in cut.body
        known = await told(before, [{"rid": first["meta_info"]["id"]}])
        third = await before.generate(text=f"Question: one?{first['text']}")
        async with restarts.started() as after:
            assert await told(after, [{"rid": first["meta_info"]["id"]}]) == known
            await after.retrieve(rid=third["meta_info"]["id"])


async def _refusing(trial: Trial, ask: Callable[[], Any]) -> Any:
    store = trial.router.app.router.store
    assert store is not None
    append = store.append

    async def full(*args: Any, **named: Any) -> None:
        raise StateFull("no room is left on the disk")

    store.append = full  # type: ignore[method-assign]
    try:
        return await ask()
    finally:
        store.append = append  # type: ignore[method-assign]


@pytest.fixture
async def with_rows(tmp_path: Path) -> AsyncIterator[Restarts]:
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


def bytes_of_rows(with_rows: Restarts) -> int:
    """On the disk as a kill at this moment would leave it."""
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(with_rows.directory, Path(place) / "copy")
        return sum(each.large for each in holdings(copy))


def numbers(trial: Trial) -> dict[str, Any]:
    return dict(trial.router.app.router.statistics["radix_tree_archive"]())


def deleted() -> bool:
    return not any(task.get_name() == "delete texts" for task in asyncio.all_tasks())


async def test_rows_of_texts_after_a_kill_are_byte_for_byte_those_before(with_rows: Restarts) -> None:
    async with with_rows.started(keeper(), state_rows=True) as before:
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
        async with with_rows.started(keeper(), state_rows=True) as after:
            assert await all_rows(after, asked) == known
            assert numbers(after)["loaded"] == len(answers) + 1
            for name in ("families", "tokens"):
                assert numbers(after)[name] == written[name] > 0
        async with with_rows.started(keeper(), state_rows=False) as again:  # what is held is read, whatever is written
            assert await all_rows(again, asked[::-1]) == known[::-1]


async def test_rows_of_texts_that_were_not_written_are_said_to_be_missing(with_rows: Restarts) -> None:
    async with with_rows.started(keeper()) as before:
        answer = await before.generate(text="one")
        asked = {"text": f"one{answer['text']}"}
        assert (await rows(before, asked)).status == 200
        assert bytes_of_rows(with_rows) == 0
        async with with_rows.started(keeper(), state_rows=True) as after:
            found = await rows(after, asked)
            assert found.error_type == "not_found"
            assert "--state-rows was off" in found.json()["error"]["message"]
            more = await after.generate(text=f"{asked['text']} and two")
            whole = await after.retrieve(rid=more["meta_info"]["id"])
            assert np.array_equal(array_of(await rows(after, {"rid": whole["rid"]})), truth(whole["tokens"]))


@pytest.mark.alone("what is in memory is bounded in each process")
async def test_rows_of_texts_that_nobody_touched_are_deleted_where_there_is_no_room(with_rows: Restarts) -> None:
    async with with_rows.started(keeper(), state_rows=True) as before:
        answers = [await before.generate(text=f"Question {each}: {'x' * 40}") for each in range(6)]
        rids = [each["meta_info"]["id"] for each in answers]
        written = bytes_of_rows(with_rows)
        last = await all_rows(before, [{"rid": rids[-1]}])
        room = written // 3
        async with with_rows.started(keeper(room), state_rows=True) as after:
            assert await all_rows(after, [{"rid": rids[-1]}]) == last, "the oldest go first"
            await until(deleted, "the disk knows")
            assert bytes_of_rows(with_rows) <= room
            for rid in rids:
                await after.retrieve(rid=rid)
            assert (await rows(after, {"rid": rids[0]})).status == 404
            async with with_rows.started(keeper(), state_rows=True) as again:
                assert await all_rows(again, [{"rid": rids[-1]}]) == last
                assert (await again.retrieve(rid=rids[0]))["rid"] == rids[0]
