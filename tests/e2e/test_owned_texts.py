"""Texts of a router of several processes: what goes on from a held one finds it, wherever it lands, without a key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.trajectory.retrieved import read_safetensors_list
from tests.support.cache_trial import CACHE, JSON, Trial, checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, ExpertsTrial, tokens_of, truth
from tests.support.http import ask
from tests.support.owned import several
from tests.support.stage import Stage

LAYER = (MiddlewareSpec(CACHE, {}),)
SYSTEM = "You are a careful solver. " * 40


@asynccontextmanager
async def trials_of(stage: Stage, directory: Path, count: int) -> AsyncIterator[list[Trial]]:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        routers = await several(stage, directory, count, worker.url, middlewares=LAYER, hf_checkpoint=checkpoint())
        yield [Trial(router, worker) for router in routers]


def held(trials: list[Trial]) -> list[int]:
    """How many generations each holds."""
    return [trial.statistics()["entries"] for trial in trials]


async def test_a_text_that_goes_on_finds_its_ids_wherever_it_lands(stage: Stage, tmp_path: Path) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        for prompt in range(4):
            text, before = SYSTEM + f"Question {prompt}: ", list[int]()
            for turn in range(4):
                trial = trials[(prompt + turn) % 3]
                answer = await trial.generate(text=text)
                (given,) = trial.given()
                assert given[: len(before)] == before, "the ids of the turn before, sampled ones included"
                before = [*given, *answer["output_ids"]]
                text += answer["text"]
                for each in trials:
                    found = await each.retrieve(text=text)
                    assert (found["tokens"], found["matched_tokens"]) == (before, len(before))
                text += f" And then {turn}?"
        assert held(trials) == [8, 4, 4], "where each was new"


async def test_ids_go_on_from_texts_and_texts_from_ids(stage: Stage, tmp_path: Path) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        first = await trials[0].generate(text=SYSTEM + "a")
        ids = [*trials[0].given()[0], *first["output_ids"]]
        second = await trials[1].generate(input_ids=ids)
        text = SYSTEM + "a" + first["text"] + second["text"]
        found = await trials[2].retrieve(text=text)
        assert found["tokens"] == ids + second["output_ids"]
        assert held(trials) == [2, 0, 0]


async def test_many_texts_and_ids_are_gathered_from_all_processes(stage: Stage, tmp_path: Path) -> None:
    async with trials_of(stage, tmp_path, 3) as trials:
        texts, rids, ids = [], [], []
        for prompt in range(6):
            text = f"Question {prompt} {'x' * prompt}: "
            answer = await trials[prompt % 3].generate(text=text)
            ids.append([*trials[0].given()[0], *answer["output_ids"]])
            texts.append(text + answer["text"])
            rids.append(answer["meta_info"]["id"])
        assert sorted(held(trials)) == [2, 2, 2]
        for trial in trials:
            found = await trial.retrieve(texts=[*texts, "never seen"], return_logp=True)
            assert [each["tokens"] for each in found[:6]] == ids
            assert [each["matched_tokens"] for each in found[:6]] == list(map(len, ids))
            assert found[6]["matched_tokens"] == 0
            body = json.dumps({"texts": texts}).encode()
            binary = [*JSON, ("Accept", "application/octet-stream")]
            answer = await ask(trial.router.url, "POST", "/retrieve_from_text", binary, body)
            assert [list(each.tokens) for each in read_safetensors_list(answer.body)] == ids
            for rid, tokens in zip(rids, ids, strict=True):
                assert (await trial.retrieve(rid=rid))["tokens"] == tokens
            assert (await trial.post("/retrieve_from_text", {"rid": "nobody's"})).status == 404
            strict = {"texts": [texts[0], texts[1] + "?"], "strict": True}
            assert (await trial.post("/retrieve_from_text", strict)).error_type == "not_found"


async def test_rows_are_delivered_from_whichever_process_holds_them(stage: Stage, tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=checkpoint(), moe=MOE) as worker:
        layers = (MiddlewareSpec(CACHE, {}), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE}))
        routers = await several(stage, tmp_path, 3, worker.url, middlewares=layers, hf_checkpoint=checkpoint())
        trials = [ExpertsTrial(router, [worker]) for router in routers]
        for prompt in range(3):
            answer = await trials[prompt].generate(text=f"Question {prompt}: ")
            (generation,) = trials[0].generations("/generate")[prompt:]
            wanted = truth(tokens_of(generation))
            for trial in trials:
                for asked in ({"rid": generation.rid}, {"text": f"Question {prompt}: {answer['text']}"}):
                    assert np.array_equal(await trial.rows(**asked), wanted)
        assert (await trials[0].refused(rid="nobody's"))[:2] == (404, "not_found")
