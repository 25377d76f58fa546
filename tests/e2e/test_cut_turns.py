"""Turns of agents that a pause cuts, that end too early, or that cannot be carried on."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.support.brake import Brake
from tests.support.chat_turns import read_stream
from tests.support.cuts import cut, cuttable, go_on, lose, pause, reached
from tests.support.events import answers_of
from tests.support.http import CutReply, RawReply, request, whole_or_cut
from tests.support.session_apis import BOTH, COMPLETIONS, TALKS, Api, case
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    CHAT,
    JSON,
    SessionTrial,
    chunks_of,
    exactly,
    message_of,
    qwen3,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import soon, until

HI: list[Any] = [user("What is 17 + 25?")]
CALL = qwen3().encode(ASK_ADD)


def tokens_up_to(part: str) -> int:
    """How many tokens of a call are in front of this."""
    return len(qwen3().encode(ASK_ADD[: ASK_ADD.index(part)]))


@pytest.mark.parametrize("parsers", ["hybrid", "engine"])
async def test_a_call_that_ended_by_length_is_never_shown_as_complete(stage: Stage, parsers: str) -> None:
    async with simulated_sessions(stage, options={"parsers": parsers}) as trial:
        for part, stream in itertools.product(('"b"', " 25", "}}", ""), BOTH):
            with case(part, stream):
                trial.worker.say(ASK_ADD)
                session, budget = await trial.create(), tokens_up_to(part) if part else len(CALL)
                said = await Api(CHAT).turn(trial, session, HI, budget, stream=stream, tools=[ADD])
                assert said.end == "length"
                assert len(said.calls) == (not part or stream or parsers == "hybrid"), "the engine leaves it out"
                for _, name, arguments in said.calls:
                    assert name == "add"
                    if part:
                        with pytest.raises(json.JSONDecodeError):
                            json.loads(arguments)
                    else:
                        assert json.loads(arguments) == {"a": 17, "b": 25}, "it was sampled to its end"
                (record,) = await trial.records(session)
                held = [call["function"]["arguments"] for call in record["response"].get("tool_calls", ())]
                assert held == [arguments for _, _, arguments in said.calls]
                (sample,) = await trial.samples(session)
                assert sample["tokens"][-budget:] == CALL[:budget]


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        str(each.__dict__["fields"]["reason"])
        for each in caplog.records
        if each.getMessage() == "generation_not_resumed"
    ]


async def running(trial: SessionTrial, count: int) -> None:
    await until(lambda: len(trial.worker.engine.running) == count, "they run, and have sampled nothing")


BOUND: dict[str, dict[str, Any]] = {
    "response_format constrains": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": "a text " * 9}}}
    },
    "tool_choice constrains": {"tools": [ADD], "tool_choice": "required"},
    "frequency_penalty depends": {"frequency_penalty": 0.5},
    "regex depends": {"regex": "a{40}"},
}


async def test_a_whole_answer_that_only_one_go_can_give_is_asked_for_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with cuttable(stage) as (trial, brake):
        for version, (reason, fields) in enumerate(BOUND.items(), 2):
            with case(reason), caplog.at_level("WARNING"):
                session = await trial.create()
                async with under_way(trial.turn(session, HI, max_tokens=40, **fields)) as turn:
                    await cut(trial, brake, 1, str(version))
                    answer = (await turn).json()
                first, second = trial.log[-2:]
                before, again = ({**each.json(), "extra_key": None} for each in (first, second))
                assert before == again, "as it was, but for the cache of the new weights"
                assert given_up(caplog)[-1].startswith(reason)
                (sample,) = await trial.samples(session)
                exactly(sample, second.generation)
                assert [run["version"] for run in sample["weight_versions"]] == [str(version)]
                assert answer["choices"][0]["finish_reason"] != "abort"


async def test_a_stream_that_only_one_go_can_give_ends_with_what_there_is(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with cuttable(stage) as (trial, brake):
        for version, (reason, fields) in enumerate(BOUND.items(), 2):
            with case(reason), caplog.at_level("WARNING"):
                session = await trial.create()
                async with under_way(trial.stream(session, HI, max_tokens=40, **fields)) as turn:
                    await cut(trial, brake, 5, str(version))
                    chunks = await turn
                assert [each["choices"][0]["finish_reason"] for each in chunks][-1] == "abort"
                assert given_up(caplog)[-1].startswith(reason)
                (sample,) = await trial.samples(session)
                exactly(sample, trial.log[-1].generation)
                assert sample["status"] == "aborted"


async def test_a_turn_that_is_aborted_in_the_queue_is_resumed_and_tells_its_prompt(stage: Stage) -> None:
    """SGLang tells of a generation that it aborts in its queue no length of the prompt, which chat shows as 0."""
    usage: Any = {"stream_options": {"include_usage": True}}
    async with cuttable(stage) as (trial, brake):
        for version, (choices, stream) in enumerate(itertools.product((1, 2), BOTH), 2):
            with case(choices, stream):
                session, fields = await trial.create(), usage if stream else {}
                brake.on = True
                asked = trial.turn(session, HI, stream=stream, max_tokens=8, n=choices, ignore_eos=True, **fields)
                async with under_way(asked) as turn:
                    await running(trial, choices)
                    for mode in ("retract", "abort"):
                        await pause(trial, mode)
                    await go_on(trial, brake, str(version))
                    answer = await turn
                assert answer.status == 200, answer.body
                said = chunks_of(answer.body)[-1] if stream else answer.json()
                samples = await trial.samples(session)
                assert len(samples) == choices
                for sample in samples:
                    assert said["usage"]["prompt_tokens"] == len(sample["tokens"]) - 8
                    assert [run["version"] for run in sample["weight_versions"]] == [str(version)]
                if stream:
                    assert all(record["first_token_at"] is not None for record in await trial.records(session))


async def test_a_choice_that_is_aborted_in_the_queue_is_recorded_beside_one_that_ends(stage: Stage) -> None:
    usage: Any = {"stream_options": {"include_usage": True}}
    async with cuttable(stage, settings={"partial_rollout": "return"}) as (trial, brake):
        for stream in BOTH:
            session, fields = await trial.create(), usage if stream else {}
            brake.on = True
            asked = trial.turn(session, HI, stream=stream, max_tokens=8, n=2, ignore_eos=True, **fields)
            async with under_way(asked) as turn:
                await running(trial, 2)
                next(iter(trial.worker.engine.running.values())).abort_waiting()
                brake.on = False
                assert (await turn).status == 200
            assert len(await trial.samples(session)) == 1
            assert sorted(record["finish_reason"] for record in await trial.records(session)) == ["abort", "length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_of_a_turn_goes_on(stage: Stage, stream: bool) -> None:
    async with cuttable(stage, stop_probability=0.0) as (trial, brake):
        session = await trial.create()
        fields: dict[str, Any] = {"n": 3, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
        async with under_way(trial.turn(session, HI, stream=stream, **fields)) as turn:
            await cut(trial, brake, 4, "2")
            answer = await turn
        begun, *rest = trial.log
        first = begun.generations
        samples = await trial.samples(session)
        assert len(first) == len(rest) == len(samples) == 3
        parts = {tuple(each.generation.input_ids): each.generation for each in rest}
        for choice, (sample, begin) in enumerate(zip(samples, first, strict=True)):
            end = parts[tuple(begin.input_ids + begin.output_ids)]
            assert sample["tokens"] == [*end.input_ids, *end.output_ids]
            assert len(begin.output_ids) + len(end.output_ids) == 30
            assert [run["version"] for run in sample["weight_versions"]] == ["1", "2"]
            if stream:
                mine = [
                    each for chunk in chunks_of(answer.body) for each in chunk["choices"] if each["index"] == choice
                ]
                told = [entry for each in mine for entry in (each["logprobs"] or {}).get("content") or ()]
            else:
                told = answer.json()["choices"][choice]["logprobs"]["content"]
            assert [entry["logprob"] for entry in told] == [*begin.logprobs, *end.logprobs]
            assert {len(entry["top_logprobs"]) for entry in told} == {2}


async def test_a_turn_of_another_api_goes_on(stage: Stage) -> None:
    """Cut within its reasoning, its text, or its call."""
    said = f"<think>\nI think so.\n</think>\n\nIt is, I say, forty-two.\n{ASK_ADD}"
    async with cuttable(stage) as (trial, brake):
        for version, (api, tokens, stream) in enumerate(itertools.product(TALKS[1:], (3, 12, 30), BOTH), 2):
            with case(api, tokens, stream):
                answers = []
                for is_cut in (True, False):
                    trial.worker.say(said)
                    session = await trial.create()
                    asked = api.turn(trial, session, HI, 500, stream=stream, tools=api.tools("add"))
                    async with under_way(asked) as turn:
                        if is_cut:
                            await cut(trial, brake, tokens, str(version))
                            of_parts = session
                        answer = await turn
                    answers.append((answer.text, answer.reasoning, [call[1:] for call in answer.calls], answer.end))
                assert answers[0] == answers[1]
                assert [name for name, _ in answers[0][2]] == ["add"]
                (sample,), (one, two, _) = await trial.samples(of_parts), trial.log[-3:]
                assert sample["tokens"] == [*two.generation.input_ids, *two.generation.output_ids]
                assert two.generation.input_ids == [*one.generation.input_ids, *one.generation.output_ids]
                versions = [run["version"] for run in sample["weight_versions"]]
                assert versions == [str(version - 1), str(version)]


@pytest.mark.alone("its worker is done before another process has told the test")
async def test_what_follows_a_cut_is_shown_as_it_comes(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        trial.worker.say(f"<think>\nI think.\n</think>\n\nIt is, I say, forty-two.\n{ASK_ADD}")
        session = await trial.create()
        client = await stage.client(trial.router)
        body = json.dumps({"model": "m", "messages": HI, "stream": True, "max_tokens": 500, "tools": [ADD]}).encode()
        await client.send(request("POST", f"/sessions/{session}{CHAT}", JSON, body))
        await client.read_head("POST")
        await cut(trial, brake, 4, "2")
        seen = b""
        for behind, shown in ((8, b'" is"'), (14, b'" forty"')):
            await reached(trial, brake, behind)
            while shown not in seen:
                seen += await client.read_part()
            assert trial.worker.running == 1, "it has not ended"
            brake.on = False
        rest = (await client.read_body()).body
        message, finish, _ = read_stream(chunks_of(seen + rest))
        assert (message["content"], finish) == ("\n\nIt is, I say, forty-two.\n", "tool_calls")


@pytest.mark.parametrize("parsers", ["engine", "hybrid"])
async def test_where_the_engine_s_parsers_fail_those_here_read_the_turn(
    stage: Stage, parsers: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cuttable(stage, options={"parsers": parsers}) as (trial, brake):
        trial.worker.say(f"<think>\nSo.\n</think>\n\nIt is\n{ASK_ADD}")
        trial.worker.faults.status(500, path="/parse_function_call", times=None)
        session = await trial.create()
        with caplog.at_level("WARNING"):
            async with under_way(trial.stream(session, HI, max_tokens=500, tools=[ADD])) as turn:
                await cut(trial, brake, 9)
                chunks = await turn
        finish = chunks[-1]["choices"][0]["finish_reason"]
        if parsers == "engine":
            assert (finish, given_up(caplog)) == ("abort", ["the worker answered /parse_function_call with status 500"])
            (sample,) = await trial.samples(session)
            assert sample["status"] == "aborted"
        else:
            message, finish, _ = read_stream(chunks)
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 17, "b": 25}
            assert (finish, given_up(caplog)) == ("tool_calls", [])


LOSABLE = {"resume_on_worker_loss": True, "max_retries": 3}


@pytest.mark.alone("its worker comes back within a step of the test's loop")
@pytest.mark.parametrize(("tokens", "root"), [([0], True), ([9], False), ([22, 3], True), ([9, 0, 0], False)])
async def test_a_stream_whose_worker_was_lost_goes_on(stage: Stage, tokens: list[int], root: bool) -> None:
    async with cuttable(stage, settings={**LOSABLE, "partial_rollout": "return"}) as (trial, brake):
        session, history = await trial.create(), HI
        if not root:
            message = message_of(await trial.chat(session, HI))
            history = [*HI, message, user("Go on")]
        text = f"<think>\nI add < both.\n</think>\n\nIt is 世界\n{ASK_ADD}"
        trial.worker.say(text)
        async with under_way(trial.stream(session, history, max_tokens=500, tools=[ADD])) as turn:
            for count in tokens:
                await reached(trial, brake, count)
                await lose(trial, brake)
            message, finish, _ = read_stream(await turn)
        assert (message["reasoning_content"], message["content"]) == ("\nI add < both.\n", "\n\nIt is 世界\n")
        (call,) = message["tool_calls"]
        assert (json.loads(call["function"]["arguments"]), finish) == ({"a": 17, "b": 25}, "tool_calls")
        *_, sample = await trial.samples(session)
        ids = qwen3().encode(text)
        assert sample["tokens"][-len(ids) - 1 : -1] == ids
        last = trial.log[-1].generation
        assert sample["tokens"] == [*last.input_ids, *last.output_ids]
        names = [each.json()["rid"] for each in trial.log]
        assert len(set(names)) == len(names), "a worker that still had one would refuse it, or abort it"


async def test_a_stream_whose_tokens_are_not_certain_is_broken_off(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tokens of Qwen3's vocabulary may spell an exclamation mark: an engine shows those that the tokenizer does not
    have as the first."""
    async with cuttable(stage, settings={**LOSABLE, "partial_rollout": "return"}) as (trial, brake):
        trial.worker.say("No! It is 42, I say, and so it is.")
        session = await trial.create()
        with caplog.at_level("WARNING"):
            turn = asyncio.ensure_future(trial.turn(session, HI, max_tokens=500, stream=True))
            await reached(trial, brake, 6)
            await lose(trial, brake)
            with pytest.raises(CutReply):
                await soon(turn)
        (reason,) = given_up(caplog)
        assert "not certain" in reason
        assert await trial.records(session) == []


# Under a contract

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
