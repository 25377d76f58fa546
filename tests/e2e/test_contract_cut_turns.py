"""The contract of an episode whose turns a pause cuts, and the end of one that waits between two parts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.brake import Brake
from tests.support.cuts import cut, cuttable, go_on, pause, reached
from tests.support.events import answers_of
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.support.session_trial import CHAT, SessionTrial, exactly
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
every = pytest.mark.parametrize("api", [Api(CHAT), Api(MESSAGES), Api(RESPONSES), Api(CHAT, named=True)], ids=str)


async def between_two_parts(trial: SessionTrial, brake: Brake) -> None:
    """Until the turn has sampled something, and waits for the fleet to go on."""
    await reached(trial, brake, 4)
    await pause(trial)
    await until(lambda: trial.router.app.router.gate.held == 1, "it waits between two parts")


async def asked(api: Api, trial: SessionTrial, session: str, *, stream: bool) -> RawReply:
    """A long turn's reply, cut off or not."""
    return await whole_or_cut(api.ask(trial, session, 1000, stream=stream, ignore_eos=True))


@both
@every
async def test_what_two_parts_sample_together_is_what_the_budget_has(stage: Stage, api: Api, stream: bool) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create(contract={"budget": {"max_tokens": 30}, "freshness": {"oldest_version": 1}})
        async with under_way(asked(api, trial, session, stream=stream)) as turn:
            await between_two_parts(trial, brake)
            await go_on(trial, brake, "2")
            assert (await turn).status == 200
        first, second = (each.generation for each in trial.door)
        assert 0 < len(first.output_ids) < 30
        assert len(first.output_ids) + len(second.output_ids) == 30
        (record,) = await trial.records(session)
        assert record["completion_tokens"] == 30
        (sample,) = await trial.samples(session)
        assert (sum(sample["loss_mask"]), sample["metadata"]["end_reason"]) == (30, "budget_tokens")
        assert [run["version"] for run in sample["weight_versions"]] == ["1", "2"]
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


@pytest.mark.parametrize("prompts", ["Hi", ["Hi", "You"]], ids=["one", "several"])
async def test_completions_that_were_cut_count_what_was_recorded(stage: Stage, prompts: Any) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create(contract={"budget": {"max_tokens": 60}})
        ask = {"model": "m", "prompt": prompts, "max_tokens": 20, "ignore_eos": True}
        async with under_way(trial.ask("POST", f"/sessions/{session}{COMPLETIONS}", ask)) as turn:
            await cut(trial, brake, 3)
            assert (await turn).status == 200
        counted = sum(record["completion_tokens"] for record in await trial.records(session))
        told = sum(sum(sample["loss_mask"]) for sample in await trial.samples(session))
        assert 0 < counted == told <= 40
        assert trial.router.app.router.gate.held == 0


@both
@every
async def test_a_group_that_is_aborted_ends_a_turn_between_two_parts(stage: Stage, api: Api, stream: bool) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create(contract={"group": "g"})
        async with under_way(asked(api, trial, session, stream=stream)) as turn:
            await between_two_parts(trial, brake)
            assert (await trial.ask("POST", "/abort_request", {"group": "g"})).status == 200
            reply = await turn
            await go_on(trial, brake)
        (sample,) = await trial.samples(session)
        exactly(sample, trial.door[0].generation)
        assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "aborted")
        assert len(trial.door) == 1, "nothing more was sampled"
        if not stream and api.path != CHAT:
            assert api.refusal(reply)[0] == "context_length_exceeded", "these APIs have no word for an abort"
        assert api.refusal(await api.ask(trial, session, 1))[0] == "context_length_exceeded"


@both
@pytest.mark.parametrize("named", [True, False], ids=["with a rid", "without"])
async def test_a_group_s_text_rollout_ends_between_two_parts(stage: Stage, stream: bool, named: bool) -> None:
    async with cuttable(stage) as (trial, brake):
        sampling = {"max_new_tokens": 1000, "ignore_eos": True}
        body = {"text": "Hi", "sampling_params": sampling, "stream": stream, **({"rid": "one"} if named else {})}
        async with under_way(trial.ask("POST", "/generate", body, [("X-Group-Id", "g")])) as rollout:
            await between_two_parts(trial, brake)
            assert (await trial.ask("POST", "/abort_request", {"group": "g"})).status == 200
            answer = answers_of((await rollout).body, stream=stream)[-1]
            await go_on(trial, brake)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        (record,) = trial.worker.door.at("/generate")
        assert answer["output_ids"] == record.generation.output_ids


@both
async def test_a_deadline_ends_a_turn_between_two_parts(stage: Stage, stream: bool) -> None:
    async with cuttable(stage) as (trial, brake):
        for seconds in (1.0, 8.0, 64.0):  # the first that is long enough to get there
            session = await trial.create(contract={"budget": {"deadline_s": seconds}})
            async with under_way(asked(Api(CHAT), trial, session, stream=stream)) as turn:
                await until(lambda: bool(trial.worker.running) or turn.done(), "it samples, or it is late")
                brake.on = not turn.done()
                await pause(trial)
                await turn
                await go_on(trial, brake)
            if await trial.samples(session):
                break
        (sample,) = await trial.samples(session)
        exactly(sample, trial.door[-1].generation)
        assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "deadline")


@both
@pytest.mark.parametrize("api", [Api(CHAT), Api(MESSAGES), Api(CHAT, named=True)], ids=str)
async def test_a_session_deleted_between_two_parts_of_its_turn_leaves_no_work(
    stage: Stage, api: Api, stream: bool
) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create()
        async with under_way(asked(api, trial, session, stream=stream)) as turn:
            await between_two_parts(trial, brake)
            assert (await trial.ask("DELETE", f"/sessions/{session}?abort=true")).status == 204
            reply = await turn
            await go_on(trial, brake)
        assert (reply.status == 200) == stream, "a stream that had begun is broken off"
        assert not trial.worker.running
        assert len(trial.door) == 1
        assert trial.statistics()["sampled_tokens"] == 0
