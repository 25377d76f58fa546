"""Turns of agents that a pause cuts, that end too early, or that cannot be carried on."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from miles_router.errors import ConfigError
from tests.support.chat_turns import read_stream
from tests.support.cuts import cut, cuttable, go_on, lose, pause, reached
from tests.support.http import CutReply, request
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
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import soon, until

HI: list[Any] = [user("What is 17 + 25?")]
CALL = qwen3().encode(ASK_ADD)


def tokens_up_to(part: str) -> int:
    """How many tokens of a call are in front of this."""
    return len(qwen3().encode(ASK_ADD[: ASK_ADD.index(part)]))


@pytest.mark.parametrize("parsers", ["hybrid", "engine"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", ['"b"', " 25", "}}"])
async def test_a_call_that_ended_by_length_is_never_shown_as_complete(
    stage: Stage, stream: bool, part: str, parsers: str
) -> None:
    async with simulated_sessions(stage, options={"parsers": parsers}) as trial:
        trial.worker.say(ASK_ADD)
        session = await trial.create()
        budget = tokens_up_to(part)
        fields: dict[str, Any] = {"tools": [ADD], "max_tokens": budget}
        if stream:
            message, finish, _ = read_stream(await trial.stream(session, HI, **fields))
        else:
            answer = await trial.chat(session, HI, **fields)
            message, finish = message_of(answer), answer["choices"][0]["finish_reason"]
        assert finish == "length"
        calls = message.get("tool_calls") or []
        assert len(calls) == (stream or parsers == "hybrid"), "a family that is not known is left out by the engine"
        for call in calls:
            assert call["function"]["name"] == "add"
            with pytest.raises(json.JSONDecodeError):
                json.loads(call["function"]["arguments"])
        (record,) = await trial.records(session)
        assert [call["function"]["arguments"] for call in record["response"].get("tool_calls", ())] == [
            call["function"]["arguments"] for call in calls
        ]
        (sample,) = await trial.samples(session)
        assert sample["tokens"][-budget:] == CALL[:budget]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_sampled_to_its_end_is_complete_whatever_ends_the_answer(
    stage: Stage, stream: bool
) -> None:
    async with simulated_sessions(stage) as trial:
        trial.worker.say(ASK_ADD)
        session = await trial.create()
        fields: dict[str, Any] = {"tools": [ADD], "max_tokens": len(CALL)}
        if stream:
            message, finish, _ = read_stream(await trial.stream(session, HI, **fields))
        else:
            answer = await trial.chat(session, HI, **fields)
            message, finish = message_of(answer), answer["choices"][0]["finish_reason"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 17, "b": 25}
        assert finish == "length"


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        str(each.__dict__["fields"]["reason"])
        for each in caplog.records
        if each.getMessage() == "generation_not_resumed"
    ]


BOUND: dict[str, dict[str, Any]] = {
    "response_format constrains": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": "a text " * 9}}}
    },
    "tool_choice constrains": {"tools": [ADD], "tool_choice": "required"},
    "frequency_penalty depends": {"frequency_penalty": 0.5},
    "regex depends": {"regex": "a{40}"},
}


@pytest.mark.parametrize("reason", BOUND)
async def test_a_whole_answer_that_only_one_go_can_give_is_asked_for_again(
    stage: Stage, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create()
        with caplog.at_level("WARNING"):
            async with under_way(trial.turn(session, HI, max_tokens=40, **BOUND[reason])) as turn:
                await cut(trial, brake, 1, "2")
                answer = (await turn).json()
        first, second = trial.door
        again = {name: value for name, value in json.loads(second.body).items() if name != "extra_key"}
        assert json.loads(first.body) == again, "as it was, but for the cache of the new weights"
        assert any(each.startswith(reason) for each in given_up(caplog))
        (sample,) = await trial.samples(session)
        exactly(sample, second.generation)
        assert [run["version"] for run in sample["weight_versions"]] == ["2"]
        assert answer["choices"][0]["finish_reason"] != "abort"


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_is_aborted_in_the_queue_is_resumed_and_tells_its_prompt(
    stage: Stage, stream: bool, choices: int
) -> None:
    """SGLang tells of a generation that it aborts in its queue no length of the prompt, which chat shows as 0."""
    async with cuttable(stage) as (trial, brake):
        session, engine = await trial.create(), trial.worker.engine
        brake.on = True
        fields: dict[str, Any] = {
            "max_tokens": 8,
            "n": choices,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        asked = trial.turn(session, HI, stream=stream, **fields)
        async with under_way(asked) as turn:
            await until(lambda: len(engine.running) == choices, "they run, and have sampled nothing")
            for mode in ("retract", "abort"):
                await pause(trial, mode)
            await go_on(trial, brake, "2")
            answer = await turn
        assert answer.status == 200, answer.body
        said = chunks_of(answer.body)[-1] if stream else answer.json()
        samples = await trial.samples(session)
        assert len(samples) == choices
        for sample in samples:
            assert said["usage"]["prompt_tokens"] == len(sample["tokens"]) - 8
            assert [run["version"] for run in sample["weight_versions"]] == ["2"]
        if stream:
            assert all(record["first_token_at"] is not None for record in await trial.records(session))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_is_aborted_in_the_queue_is_recorded_beside_one_that_ends(
    stage: Stage, stream: bool
) -> None:
    async with cuttable(stage, settings={"partial_rollout": "return"}) as (trial, brake):
        session, engine = await trial.create(), trial.worker.engine
        brake.on = True
        fields: dict[str, Any] = {
            "max_tokens": 8,
            "n": 2,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        async with under_way(trial.turn(session, HI, stream=stream, **fields)) as turn:
            await until(lambda: len(engine.running) == 2, "they run, and have sampled nothing")
            next(iter(engine.running.values())).abort_waiting()
            brake.on = False
            answer = await turn
        assert answer.status == 200, answer.body
        assert len(await trial.samples(session)) == 1
        assert sorted(record["finish_reason"] for record in await trial.records(session)) == ["abort", "length"]


async def test_a_penalty_of_the_model_s_own_counts_like_one_of_the_agent_s(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tokenizer_directory("qwen3"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    async with cuttable(stage, settings={"hf_checkpoint": str(tmp_path)}) as (trial, brake):
        session = await trial.create()
        with caplog.at_level("WARNING"):
            async with under_way(trial.chat(session, HI, max_tokens=20, ignore_eos=True)) as turn:
                await cut(trial, brake, 3)
                await turn
        assert given_up(caplog) == ["repetition_penalty depends on the output so far"]


@pytest.mark.parametrize("reason", BOUND)
async def test_a_stream_that_only_one_go_can_give_ends_with_what_there_is(
    stage: Stage, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cuttable(stage) as (trial, brake):
        session = await trial.create()
        with caplog.at_level("WARNING"):
            async with under_way(trial.stream(session, HI, max_tokens=40, **BOUND[reason])) as turn:
                await cut(trial, brake, 5, "2")
                chunks = await turn
        assert [each["choices"][0]["finish_reason"] for each in chunks][-1] == "abort"
        assert any(each.startswith(reason) for each in given_up(caplog))
        (sample,) = await trial.samples(session)
        exactly(sample, trial.door[0].generation)
        assert sample["status"] == "aborted"


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_of_a_turn_goes_on(stage: Stage, stream: bool) -> None:
    async with cuttable(stage, stop_probability=0.0) as (trial, brake):
        session = await trial.create()
        fields: dict[str, Any] = {"n": 3, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
        async with under_way(trial.turn(session, HI, stream=stream, **fields)) as turn:
            await cut(trial, brake, 4, "2")
            answer = await turn
        begun, *rest = trial.door
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


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("tokens", [3, 12, 30], ids=["reasoning", "text", "call"])
@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_a_turn_of_another_api_goes_on(stage: Stage, api: str, tokens: int, live: bool) -> None:
    async with cuttable(stage) as (trial, brake):
        said = f"<think>\nI think so.\n</think>\n\nIt is, I say, forty-two.\n{ASK_ADD}"
        trial.worker.say(said)
        session, ask = await trial.create(), asking(trial, api, live=live)
        async with under_way(ask(session)) as turn:
            await cut(trial, brake, tokens, "2")
            answer = await turn
        trial.worker.say(said)
        uncut = await ask(await trial.create())
        assert answer == uncut
        assert (answer[-1]["name"], len(answer)) == ("add", 3)
        (sample,), (one, two, _) = await trial.samples(session), trial.door
        assert sample["tokens"] == [*two.generation.input_ids, *two.generation.output_ids]
        assert two.generation.input_ids == [*one.generation.input_ids, *one.generation.output_ids]
        assert [run["version"] for run in sample["weight_versions"]] == ["1", "2"]


def asking(trial: SessionTrial, api: str, *, live: bool) -> Callable[[str], Coroutine[Any, Any, list[Any]]]:
    """Gives what one turn says, as the official client reads it: without the names of its parts."""
    tool, url = ADD["function"], f"{trial.router.url}/sessions/"

    async def by_messages(session: str) -> list[Any]:
        tools: Any = [{"name": tool["name"], "input_schema": tool["parameters"]}]
        async with AsyncAnthropic(base_url=url + session, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "m", "max_tokens": 500, "messages": HI, "tools": tools}
            if not live:
                return plainly((await client.messages.create(**asked)).to_dict()["content"])
            async with client.messages.stream(**asked) as stream:
                return plainly((await stream.get_final_message()).to_dict()["content"])

    async def by_responses(session: str) -> list[Any]:
        async with AsyncOpenAI(base_url=f"{url}{session}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": "m", "input": HI, "tools": [{"type": "function", **tool}]}
            if not live:
                return plainly((await client.responses.create(**asked)).to_dict()["output"])
            async with client.responses.stream(**asked) as stream:
                return plainly((await stream.get_final_response()).to_dict()["output"])

    return by_messages if api == "messages" else by_responses


def plainly(parts: Any) -> list[Any]:
    """Without names, which are made up, and what the client's helpers add."""
    made_up = ("id", "call_id", "signature", "parsed_arguments", "caller")
    return [{name: value for name, value in part.items() if name not in made_up} for part in parts]


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


async def test_an_agent_that_aborts_between_two_parts_has_ended_its_turn(stage: Stage) -> None:
    async with cuttable(stage) as (trial, brake):
        trial.worker.say(f"It is\n{ASK_ADD}")
        session = await trial.create()
        async with under_way(trial.stream(session, HI, max_tokens=500, tools=[ADD], rid="mine")) as turn:
            await reached(trial, brake, 12)
            await pause(trial)
            await until(lambda: trial.router.app.router.gate.held, "it waits")
            assert (await trial.ask("POST", "/abort_request", {"rid": "mine"})).status == 200
            chunks = await turn
            await go_on(trial, brake)
        assert [each["choices"][0]["finish_reason"] for each in chunks][-1] == "abort"
        (sample,) = await trial.samples(session)
        exactly(sample, trial.door[0].generation)
        assert len(trial.door) == 1


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parsers": "mine"}, "parsers: 'mine' is not one of engine, local, hybrid"),
        ({"parsers": "local"}, "there is no local parser for tito_model None"),
    ],
)
async def test_parsers_that_there_are_not_are_refused_by_name(
    stage: Stage, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await session_trial(stage, await stage.worker(), options=options)


LOSABLE = {"resume_on_worker_loss": True, "max_retries": 3}


@pytest.mark.alone("its worker comes back within a step of the test's loop")
@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("tokens", [[0], [1], [9], [22, 3], [9, 0, 0]])
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
        last = trial.door[-1].generation
        assert sample["tokens"] == [*last.input_ids, *last.output_ids]
        names = [each.json()["rid"] for each in trial.door]
        assert len(set(names)) == len(names), "a worker that still had one would refuse it, or abort it"


@pytest.mark.alone("its worker comes back within a step of the test's loop")
async def test_a_whole_answer_whose_worker_was_lost_is_asked_for_again(stage: Stage) -> None:
    async with cuttable(stage, settings={**LOSABLE, "partial_rollout": "return"}) as (trial, brake):
        session = await trial.create()
        async with under_way(trial.chat(session, HI, max_tokens=20, ignore_eos=True)) as turn:
            await reached(trial, brake, 3)
            await lose(trial, brake)
            await turn
        (sample,) = await trial.samples(session)
        exactly(sample, trial.door[-1].generation)


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
