"""Work that nobody wants ends at its engine at once, and what it has sampled until then stays, unless it is deleted."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.fleet import post, posting
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import case
from tests.support.session_trial import SessionTrial, chunks_of, exactly, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

HI = [user("Hi")]
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30_000}
GENERATION: dict[str, Any] = {"text": "Hi", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, token_latency_s=0.002) as started:
        yield started


async def it_samples(trial: SessionTrial, generations: int = 1) -> None:
    """Until so many generations have sampled something."""

    def sampled() -> bool:
        return sum(bool(running.output_ids) for running in trial.worker.engine.running.values()) == generations

    await until(sampled, f"{generations} generations sample")


async def gone(trial: SessionTrial) -> None:
    """Until the engine has nothing more to do."""
    await until(lambda: not trial.worker.running, "the engine is idle")


def finish_of(answer: RawReply, *, stream: bool) -> str:
    """Why an answer ended."""
    assert answer.status == 200, answer.body
    if not stream:
        return str(answer.json()["choices"][0]["finish_reason"])
    said = [choice["finish_reason"] for chunk in chunks_of(answer.body) for choice in chunk["choices"]]
    return str(next(each for each in said if each is not None))


async def the_partial_sample_stays(trial: SessionTrial, session: str, reason: str, ended: int = 1) -> None:
    """What was sampled until the end is a sample that says why it ended; and nothing begins any more."""
    (sample,) = await trial.samples(session)
    assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", reason)
    assert 0 < sum(sample["loss_mask"]) < ENDLESS["max_tokens"]
    exactly(sample, trial.log[0].generation)
    refused = await trial.turn(session, HI)
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.json()["error"]["reason"] == reason
    assert trial.statistics()["ended"] == {reason: ended}


# A group that has enough


async def test_an_abort_of_a_group_ends_nobody_else(trial: SessionTrial) -> None:
    mine, other = await trial.create(contract={"group": 7}), await trial.create(contract={"group": 70})
    async with under_way(trial.turn(mine, HI, **ENDLESS)) as turn, under_way(trial.turn(other, HI, **ENDLESS)) as left:
        await it_samples(trial, 2)
        await trial.ask("POST", "/abort_request", {"group": "7"})
        await turn
        assert (left.done(), trial.worker.running) == (False, 1)
    assert (await trial.read(other))["metadata"].get("end_reason") is None


@pytest.mark.parametrize("named", [True, False], ids=["with a rid", "without"])
async def test_a_group_s_text_rollouts_end_too(trial: SessionTrial, named: bool) -> None:
    body = {**GENERATION, **({"rid": "one"} if named else {})}
    asked = trial.router.ask(
        "POST", "/generate", [("Content-Type", "application/json"), ("X-Group-Id", "g")], json.dumps(body).encode()
    )
    async with under_way(asked) as mine:
        await it_samples(trial)
        other = posting(trial.router, **GENERATION)
        await it_samples(trial, 2)
        await trial.ask("POST", "/abort_request", {"group": "g"})
        answer = await mine
        assert trial.worker.running == 1, "the other one goes on"
        await post(trial.router, "/abort_request", abort_all=True)
        await other
    if named:
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert (answer.status, answer.error_type) == (409, "conflict")


# A deadline


@both
async def test_a_deadline_ends_the_turn_under_way(trial: SessionTrial, stream: bool) -> None:
    for seconds in (0.5, 4.0, 32.0):  # the first that is long enough for a turn to begin here
        session = await trial.create(contract={"budget": {"deadline_s": seconds}})
        answer = await trial.turn(session, HI, stream=stream, **ENDLESS)
        if answer.status == 200:
            break
    await gone(trial)
    assert finish_of(answer, stream=stream) == "abort"
    (sample,) = await trial.samples(session)
    assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "deadline")
    exactly(sample, trial.log[-1].generation)
    count = len(trial.log)
    assert (await trial.turn(session, HI)).json()["error"]["reason"] == "deadline"
    assert len(trial.log) == count


# A session that is deleted


async def test_a_group_s_turns_end_at_their_engine_and_stay(trial: SessionTrial) -> None:
    wrong: Any = ("", True, ["g"], 1.5)
    for group in wrong:
        answer = await trial.ask("POST", "/abort_request", {"group": group})
        assert (answer.status, answer.error_type) == (400, "invalid_request"), group
    named: list[dict[str, Any]] = [{"contract": {"group": "g"}}, {"metadata": {"group": "g"}}]
    for number, (fields, stream) in enumerate(itertools.product(named, (False, True)), 1):
        with case(fields, stream):
            trial.worker.log.clear()
            session, idle = await trial.create(**fields), await trial.create(**fields)
            async with under_way(trial.turn(session, HI, stream=stream, **ENDLESS)) as turn:
                await it_samples(trial)
                assert (await trial.ask("POST", "/abort_request", {"group": "g"})).status == 200
                await gone(trial)
                assert finish_of(await turn, stream=stream) == "abort"
            await the_partial_sample_stays(trial, session, "aborted", 2 * number)
            assert (await trial.turn(idle, HI)).status == 400, "a member without a turn begins none"
            assert len(trial.log) == 1
            for each in (session, idle):
                await trial.ask("DELETE", f"/sessions/{each}")


async def test_a_session_deleted_with_abort_leaves_no_work_behind(trial: SessionTrial) -> None:
    for stream in (False, True):
        trial.worker.log.clear()
        session = await trial.create()
        assert (await trial.ask("DELETE", f"/sessions/{session}?abort=yes")).status == 400, "no flag deletes nothing"
        async with under_way(whole_or_cut(trial.turn(session, HI, stream=stream, **ENDLESS))) as turn:
            await it_samples(trial)
            assert (await trial.ask("DELETE", f"/sessions/{session}?abort=true")).status == 204
            await gone(trial)
            answer = await turn
            if stream:
                assert (answer.status, b"[DONE]" in answer.body) == (200, False), "it does not look complete"
            else:
                assert (answer.status, answer.error_type) == (404, "not_found")
        told = {exchange.json()["rid"] for exchange in trial.worker.log.at("/abort_request")}
        assert told == {trial.log[0].json()["rid"]}, "an engine looks only now and then whether its client is there"
    assert trial.statistics()["ended"] == {"deleted": 2}
    session = await trial.create()
    async with under_way(trial.turn(session, HI, ignore_eos=True, max_tokens=300)) as turn:
        await it_samples(trial)
        assert (await trial.ask("DELETE", f"/sessions/{session}")).status == 204
        assert (await turn).json()["usage"]["completion_tokens"] == 300, "without abort it finishes"
