"""The contract of an episode whose turns a pause cuts, and the end of one that waits between two parts."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.brake import Brake
from tests.support.cuts import cut, cuttable, go_on, pause, reached
from tests.support.events import answers_of
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import BOTH, COMPLETIONS, TALKS, Api, case
from tests.support.session_trial import CHAT, SessionTrial, exactly
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

APIS = [*TALKS, Api(CHAT, named=True)]


async def between_two_parts(trial: SessionTrial, brake: Brake) -> None:
    """Until the turn has sampled something, and waits for the fleet to go on."""
    await reached(trial, brake, 4)
    await pause(trial)
    await until(lambda: trial.router.app.router.gate.held == 1, "it waits between two parts")


async def asked(api: Api, trial: SessionTrial, session: str, *, stream: bool) -> RawReply:
    """A long turn's reply, cut off or not."""
    return await whole_or_cut(api.ask(trial, session, 1000, stream=stream, ignore_eos=True))


async def test_what_two_parts_sample_together_is_what_the_budget_has(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        for number, (api, stream) in enumerate(itertools.product(APIS, BOTH), 1):
            with case(api, stream):
                contract = {"budget": {"max_tokens": 30}, "freshness": {"oldest_version": number}}
                session = await trial.create(contract=contract)
                async with under_way(asked(api, trial, session, stream=stream)) as turn:
                    await between_two_parts(trial, brake)
                    await go_on(trial, brake, str(number + 1))
                    assert (await turn).status == 200
                first, second = (each.generation for each in trial.log[-2:])
                assert 0 < len(first.output_ids) < 30
                assert len(first.output_ids) + len(second.output_ids) == 30
                (record,) = await trial.records(session)
                assert record["completion_tokens"] == 30
                (sample,) = await trial.samples(session)
                assert (sum(sample["loss_mask"]), sample["metadata"]["end_reason"]) == (30, "budget_tokens")
                assert [run["version"] for run in sample["weight_versions"]] == [str(number), str(number + 1)]
                assert sample["metadata"]["stale"] is False
                assert api.refusal(await api.ask(trial, session, 1))[0] == "context_length_exceeded"


async def test_a_budget_is_reserved_once_for_all_parts(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create(contract={"budget": {"max_tokens": 50}})
        api = Api(CHAT)
        async with under_way(api.ask(trial, session, 40, ignore_eos=True)) as turn:
            await between_two_parts(trial, brake)
            async with under_way(api.ask(trial, session, 40, "And I?", ignore_eos=True)) as other:
                while (await trial.read(session))["metadata"]["in_flight"] < 2:
                    pass
                await go_on(trial, brake)
                answers = [(await each).json() for each in (turn, other)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [40, 10]
        prompts: Any = ("Hi", ["Hi", "You"])
        for prompt in prompts:  # of completions that were cut counts what was recorded
            session = await trial.create(contract={"budget": {"max_tokens": 60}})
            ask = {"model": "m", "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
            async with under_way(trial.ask("POST", f"/sessions/{session}{COMPLETIONS}", ask)) as turn:
                await cut(trial, brake, 3)
                assert (await turn).status == 200
            counted = sum(record["completion_tokens"] for record in await trial.records(session))
            told = sum(sum(sample["loss_mask"]) for sample in await trial.samples(session))
            assert 0 < counted == told <= 40
            assert trial.router.app.router.gate.held == 0


async def test_a_group_that_is_aborted_ends_a_turn_between_two_parts(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        for api, stream in itertools.product(APIS, BOTH):
            with case(api, stream):
                session, before = await trial.create(contract={"group": "g"}), len(trial.log)
                async with under_way(asked(api, trial, session, stream=stream)) as turn:
                    await between_two_parts(trial, brake)
                    assert (await trial.ask("POST", "/abort_request", {"group": "g"})).status == 200
                    reply = await turn
                    await go_on(trial, brake)
                (sample,) = await trial.samples(session)
                (once,) = trial.log[before:]
                exactly(sample, once.generation)
                assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "aborted")
                if not stream and api.path != CHAT:
                    code, _ = api.refusal(reply)
                    assert code == "context_length_exceeded", "these APIs have no word for an abort"
                assert api.refusal(await api.ask(trial, session, 1))[0] == "context_length_exceeded"
                await trial.ask("DELETE", f"/sessions/{session}")
        for stream, rid in itertools.product(BOTH, ({"rid": "one"}, {})):
            with case("a text rollout", stream, rid):
                body = {"text": "Hi", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}, **rid}
                rollout = trial.ask("POST", "/generate", {**body, "stream": stream}, [("X-Group-Id", "g")])
                async with under_way(rollout) as text:
                    await between_two_parts(trial, brake)
                    assert (await trial.ask("POST", "/abort_request", {"group": "g"})).status == 200
                    answer = answers_of((await text).body, stream=stream)[-1]
                    await go_on(trial, brake)
                assert answer["meta_info"]["finish_reason"]["type"] == "abort"
                assert answer["output_ids"] == trial.worker.log.at("/generate")[-1].generation.output_ids
