"""Evaluations beside training: one weight version samples an episode or it is refused, and trainers never read it."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.e2e.test_session_restarts import Restarts
from tests.support.brake import Brake
from tests.support.cache_trial import CACHE, JSON, Trial, events, simulated_trial
from tests.support.cuts import continue_, cut, cuttable, go_on, new_version, pause, reached
from tests.support.experts_trial import SHORT, simulated_experts
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import BOTH, COMPLETIONS, PLAIN, Api, case
from tests.support.session_trial import (
    CHAT,
    SESSIONS,
    SessionTrial,
    message_of,
    qwen3,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import soon, until

HI = [user("Hi")]
TEXT = [*JSON, ("X-Evaluation", "true")]
WAITS: Any = {"otherwise": "wait"}
LONG: Any = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as started:
        yield started


@pytest.fixture
async def restarts(tmp_path: Path) -> AsyncIterator[Restarts]:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker:
        yield Restarts(worker, tmp_path)


async def update(trial: Any, version: str) -> None:
    await pause(trial, "retract")
    await continue_(trial, version)


def refused(reply: RawReply, *versions: str) -> str:
    """The reason of a 409, which names these versions."""
    assert reply.status == 409, reply.body
    error = reply.json()["error"]
    kind = (error.get("details") or {}).get("error_code") or error.get("code") or error["type"]
    assert kind == "conflict", error
    message = str(error["message"])
    for version in versions:
        assert re.search(rf"(weights|has) {version}\b", message), message
    return message


async def versions(trial: SessionTrial, session: str) -> set[str]:
    return {run["version"] for sample in await trial.samples(session) for run in sample["weight_versions"]}


# One weight version


async def test_an_evaluation_that_newer_weights_would_go_on_with_is_refused(trial: SessionTrial) -> None:
    for number, (api, stream) in enumerate(itertools.product(PLAIN, BOTH), 1):
        with case(api, stream):
            session, other = await trial.create(evaluation=True), await trial.create()
            for each in (session, other):
                assert (await api.ask(trial, each, 4, stream=stream)).status == 200
            await update(trial, str(number + 1))
            before = len(trial.worker.log.at(COMPLETIONS if api.path == COMPLETIONS else CHAT))
            refused(await api.ask(trial, session, 4, "More", stream=stream), str(number), str(number + 1))
            assert (await api.ask(trial, other, 4, "More", stream=stream)).status == 200, "training goes on"
            assert len(trial.worker.log.at(COMPLETIONS if api.path == COMPLETIONS else CHAT)) == before + 1
            assert await versions(trial, session) == {str(number)}
            assert (await api.ask(trial, await trial.create(evaluation=True), 4)).status == 200, "begun again"


async def test_a_turn_waits_for_its_weights_if_asked_and_no_longer_than_at_the_gate(stage: Stage) -> None:
    async with simulated_sessions(stage, settings={"gate_timeout": 1.0}) as trial:
        session = await trial.create(evaluation=WAITS)
        answer = await trial.chat(session, HI)
        await update(trial, "2")
        message = refused(await trial.turn(session, [*HI, message_of(answer), user("More")]), "1", "2")
        assert "--gate-timeout" in message
        more = trial.turn(session, [*HI, message_of(answer), user("More")])
        async with under_way(more) as turn:
            await until(lambda: trial.router.app.router.gate.held == 1, "it waits at the open gate")
            await new_version(trial, "1")
            assert (await soon(turn)).status == 200
        assert await versions(trial, session) == {"1"}


async def asked(api: Api, trial: SessionTrial, session: str, *, stream: bool) -> Any:
    return await whole_or_cut(api.ask(trial, session, 400, stream=stream, ignore_eos=True))


def shows_conflict(reply: RawReply, *, stream: bool) -> None:
    """Status 409, or in a stream that has begun the reason in place of its end."""
    if not stream:
        refused(reply)
        return
    assert b'"finish_reason":"abort"' not in reply.body, reply.body
    assert b"evaluation" in reply.body, reply.body


@pytest.mark.parametrize("resume", ["return", "resume"])
async def test_a_turn_that_an_update_cuts_is_never_answered_as_aborted(stage: Stage, resume: str) -> None:
    async with cuttable(stage, settings={"partial_rollout": resume}) as (trial, brake):
        for number, (api, stream) in enumerate(itertools.product(PLAIN, BOTH), 1):
            with case(api, stream):
                session = await trial.create(evaluation=True)
                async with under_way(asked(api, trial, session, stream=stream)) as turn:
                    await cut(trial, brake, 4, str(number + 1))
                    shows_conflict(await turn, stream=stream)
                assert await trial.records(session) == []
                assert (await api.ask(trial, session, 4)).status == 200, "it begins again under the new weights"
                assert await versions(trial, session) == {str(number + 1)}


async def test_a_turn_that_a_pause_cuts_is_resumed_under_the_same_weights(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        for api, stream in itertools.product(PLAIN, BOTH):
            if api.path == COMPLETIONS:  # completions are not resumed
                continue
            with case(api, stream):
                session = await trial.create(evaluation=True)
                async with under_way(asked(api, trial, session, stream=stream)) as turn:
                    await cut(trial, brake, 4)
                    assert (await turn).status == 200
                (record,) = await trial.records(session)
                assert record["completion_tokens"] == 400
                assert await versions(trial, session) == {"1"}


async def test_a_cut_turn_waits_for_its_weights_if_asked(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create(evaluation=WAITS)
        async with under_way(asked(Api(CHAT), trial, session, stream=True)) as turn:
            await cut(trial, brake, 4, "2")
            await until(lambda: trial.router.app.router.gate.held == 1, "it waits at the open gate")
            await new_version(trial, "1")
            assert (await soon(turn)).status == 200
        assert await versions(trial, session) == {"1"}
        assert len(trial.log) == 2


async def test_a_turn_within_which_the_weights_change_is_neither_recorded_nor_complete(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        for number, (api, stream) in enumerate(itertools.product(PLAIN, BOTH), 1):
            with case(api, stream):
                session = await trial.create(evaluation=True)
                async with under_way(asked(api, trial, session, stream=stream)) as turn:
                    await reached(trial, brake, 4)
                    await pause(trial, "retract")
                    await go_on(trial, brake, str(number + 1))
                    shows_conflict(await turn, stream=stream)
                assert await trial.records(session) == []


@pytest.mark.parametrize("said", [True, WAITS], ids=["refuse", "wait"])
async def test_a_worker_that_was_lost_before_its_answer_decides_no_version(stage: Stage, said: Any) -> None:
    kind: Any = {"tokenizer": qwen3(), "weight_version": "1", "token_latency_s": 0.0002}
    async with SimulatedWorker(**kind) as one, SimulatedWorker(**kind) as other:
        trial = await session_trial(stage, one, other, gate_timeout=1.0)
        session = await trial.create(evaluation=said)
        brakes = [Brake(worker.engine) for worker in trial.workers]
        for brake in brakes:
            brake.on = True
        async with under_way(trial.turn(session, HI)) as turn:
            await until(lambda: one.engine.running or other.engine.running, "a worker has the turn")
            await new_version(trial, "2")
            await (one if one.engine.running else other).kill()
            for brake in brakes:
                brake.on = False
            assert (await soon(turn)).status == 200
        assert await versions(trial, session) == {"2"}


async def test_weights_without_a_name_are_refused(trial: SessionTrial) -> None:
    assert (await trial.ask("POST", "/update_weights_from_disk", {"model_path": "/new"})).status == 200
    assert "weight_version" in refused(await trial.turn(await trial.create(evaluation=True), HI))


# Not for training


@pytest.mark.alone("it reads trajectories without naming a session")
async def test_trainers_never_read_evaluations_but_by_their_id(trial: SessionTrial) -> None:
    group: Any = {"metadata": {"group": "g", "instance_id": "g"}}
    mine, other = await trial.create(evaluation=True, **group), await trial.create(**group)
    for session in (mine, other):
        await trial.chat(session, HI)
        assert (await trial.ask("POST", "/session/finalize", {"session_id": session})).status == 200
    stats = (await trial.ask("GET", "/trajectory/stats")).json()
    assert (stats["trajectories"], stats["groups"], stats["active_sessions"]) == (1, 1, 0)
    listed = (await trial.ask("GET", "/sessions")).json()["sessions"]
    assert [each["session_id"] for each in listed] == [other]
    (own,) = (await trial.ask("GET", "/sessions?evaluation=true")).json()["sessions"]
    assert (own["session_id"], own["evaluation"]) == (mine, True)
    read = (await trial.ask("POST", "/trajectory/read", {"drain": True})).json()
    assert {each["trajectory_id"] for each in read["data"]} == {other}
    direct = await trial.ask("POST", "/trajectory/read", {"session_id": mine})
    assert direct.status == 400
    assert "is an evaluation" in direct.json()["error"]["message"]
    assert (await trial.read(mine))["metadata"]["evaluation"] is True
    (sample,) = await trial.samples(mine)
    assert sample["metadata"]["evaluation"] is True


async def test_an_aborted_group_of_training_leaves_evaluations_alone(trial: SessionTrial) -> None:
    session = await trial.create(evaluation=True, metadata={"group": "g"})
    answer = await trial.chat(session, HI)
    assert (await trial.ask("POST", "/abort_request", {"group": "g"})).status == 200
    await trial.chat(session, [*HI, message_of(answer), user("More")])


async def test_a_run_counts_evaluations_in_series_of_their_own(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create(evaluation=True)
        await trial.chat(session, HI)
        (sample,) = await trial.samples(session, reward=0.5)
        run = (await trial.ask("GET", "/router/run")).json()
        (version,) = run["versions"]
        assert (version["evaluated"], version["sampled"], version["trained"]) == (sum(sample["loss_mask"]), 0, 0)
        assert version["turns"] == 0
        assert run["rewards"] == []
        assert run["evaluations"] == [{"weight_version": "1", "count": 1, "sum": 0.5}]
        (row,) = (await trial.ask("GET", "/router/episodes")).json()["episodes"]
        assert (row["tokens"]["trained"], row["group"]) == (0, None)


async def test_no_rows_are_kept_of_evaluations_whoever_asks(stage: Stage) -> None:
    async with simulated_experts(stage, around=[SESSIONS, CACHE]) as trial:
        fields: tuple[Any, ...] = ({}, {"return_routed_experts": True})
        for asked_for in fields:
            with case(asked_for):
                session = await trial.create(evaluation=True)
                await trial.chat(session, HI, **asked_for)
                (sample,) = await trial.samples(session)
                assert "routed_experts" not in sample
                assert "routed_experts_missing" not in sample["metadata"]
                assert (await trial.deliver(session_id=session)).status == 404
                text = await trial.post("/generate", {"text": "Once", "sampling_params": SHORT, **asked_for}, TEXT[1:])
                assert (await trial.deliver(rid=text.json()["meta_info"]["id"])).status == 404
        assert trial.held["answers"] == 0


async def test_a_header_begins_an_evaluation_and_joins_no_other_session(trial: SessionTrial) -> None:
    evaluates = [("X-Evaluation", "true")]
    api = Api(CHAT, named=True)
    body = api.body(HI, 4)
    assert (await api.post(trial, "mine", body, evaluates)).status == 200
    assert (await api.post(trial, "other", body)).status == 200
    assert (await trial.read("mine"))["metadata"]["evaluation"] is True
    wrong = await api.post(trial, "third", body, [("X-Evaluation", "yes")])
    assert (wrong.status, wrong.error_type) == (400, "invalid_request")
    await update(trial, "2")
    refused(await api.post(trial, "mine", body), "1", "2")


async def test_the_header_is_refused_where_it_has_no_effect(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session, own = await trial.create(), await trial.create(evaluation=True)
        for value in ("true", "yes"):
            named = [("X-Evaluation", value)]
            for api in PLAIN:
                body = api.body("Hi" if api.path in (COMPLETIONS, "/v1/responses") else HI, 4)
                for path in (f"/sessions/{session}{api.path}", api.path):
                    with case(value, path):
                        reply = await trial.ask("POST", path, body, named)
                        assert (reply.status, b"X-Evaluation has no effect" in reply.body) == (400, True), reply.body
            text: Any = {"text": "Once", "sampling_params": SHORT}
            for path in ("/generate", f"/sessions/{session}/generate"):
                assert (await trial.ask("POST", path, text, named)).status == 400
        assert await trial.records(session) == []
        assert not list(trial.worker.log.at(CHAT))
        assert (await trial.turn(own, HI, [("X-Evaluation", "true")])).status == 200
        assert (await trial.turn(session, HI, [("X-Evaluation", "false")])).status == 200


async def test_what_an_evaluation_may_say_is_checked(trial: SessionTrial) -> None:
    wrong: list[Any] = [{"otherwise": "mark"}, {"other": 1}, "yes", 1, []]
    for evaluation in wrong:
        answer = await trial.ask("POST", "/sessions", {"evaluation": evaluation})
        assert answer.status == 400, evaluation
        assert "evaluation" in answer.json()["error"]["message"]
    twice = await trial.ask("POST", "/sessions", {"evaluation": True, "contract": {"evaluation": WAITS}})
    assert (twice.status, b"differ" in twice.body) == (400, True)
    session = await trial.create(evaluation=False)
    assert not {"evaluation", "contract"} & {*(await trial.read(session))["metadata"]}
    session = await trial.create(contract={"budget": {"max_turns": 3}}, evaluation=WAITS)
    contract = (await trial.read(session))["metadata"]["contract"]
    assert contract == {"budget": {"max_turns": 3}, "evaluation": WAITS}


async def test_the_client_makes_evaluations(trial: SessionTrial) -> None:
    async with RouterClient(trial.router.url) as client:
        session = await client.create_session(evaluation=WAITS)
        assert await client.sessions() == []
    assert (await trial.read(session.id))["metadata"]["evaluation"] is True


# Restarts


@pytest.mark.parametrize("said", [True, {}], ids=["true", "an empty object"])
async def test_an_evaluation_keeps_its_version_through_a_restart(restarts: Restarts, said: Any) -> None:
    async with restarts.started() as before:
        session = await before.create(evaluation=said)
        answer = await before.chat(session, HI)
        await before.ask("POST", "/session/finalize", {"session_id": (other := await before.create())})
    async with restarts.started() as after:
        listed = (await after.ask("GET", "/sessions")).json()["sessions"]
        assert session not in [each["session_id"] for each in listed]
        assert other in [each["session_id"] for each in listed]
        (own,) = (await after.ask("GET", "/sessions?evaluation=true")).json()["sessions"]
        assert own["session_id"] == session
        messages = [*HI, message_of(answer), user("More")]
        messages += [message_of(await after.chat(session, messages)), user("Again")]
        await update(after, "2")
        refused(await after.turn(session, messages), "1", "2")
        assert await versions(after, session) == {"1"}


# Texts


async def evaluate(trial: Trial, **body: Any) -> RawReply:
    return await trial.post("/generate", {"sampling_params": LONG, "text": "Once", **body}, TEXT)


async def test_a_text_of_an_evaluation_passes_unrecorded(stage: Stage) -> None:
    async with simulated_trial(stage, weight_version="1") as trial:
        for stream in BOTH:
            reply = await evaluate(trial, stream=stream)
            assert reply.status == 200
            answer = events(reply.body)[-1] if stream else reply.json()
            assert len(answer["output_ids"]) == 400
            assert "input_ids" not in trial.log[-1].json(), "as the client sent it"
            found = await trial.post("/retrieve_from_text", {"text": "Once" + answer["text"], "strict": True})
            assert found.status == 404
        assert trial.statistics()["recorded"] == 0
        assert trial.statistics()["passed_through"]["evaluation"] == 2


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_a_text_of_an_evaluation_never_has_tokens_of_two_versions(stage: Stage, mode: str) -> None:
    async with simulated_sessions(
        stage, more=[MiddlewareSpec(CACHE)], settings={"partial_rollout": "resume"}, token_latency_s=0.0002
    ) as trial:
        brake = Brake(trial.worker.engine)
        for version, stream in enumerate(BOTH, 2):
            with case(stream):
                body = {"text": "Once", "sampling_params": LONG, "stream": stream}
                async with under_way(whole_or_cut(trial.ask("POST", "/generate", body, TEXT[1:]))) as asking:
                    await reached(trial, brake, 4)
                    await pause(trial, mode)
                    await go_on(trial, brake, str(version))
                    reply = await soon(asking)
                shows_conflict(reply, stream=stream)
                assert b'"conflict"' in reply.body
        async with under_way(
            trial.ask("POST", "/generate", {"text": "Once", "sampling_params": LONG}, TEXT[1:])
        ) as one:
            await reached(trial, brake, 4)
            await pause(trial, mode)
            await go_on(trial, brake)
            assert len((await soon(one)).json()["output_ids"]) == 400, "the same weights go on"
