"""An episode's contract in every API that agents speak, whole and streamed, under the session's address and with its
name in a header: it is kept to the token, and told in the words that harnesses of that API look for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.session_apis import APIS, CHATS, COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.support.session_trial import CHAT, SessionTrial, simulated_sessions
from tests.support.stage import Stage

FULL = "context_length_exceeded"
#: What a harness compacts upon, by its API (LangChain and others, Claude Code, Codex), and the numbers behind it.
WORDS = {
    CHAT: "This model's maximum context length is ",
    COMPLETIONS: "This model's maximum context length is ",
    MESSAGES: "prompt is too long: ",
    RESPONSES: "Your input exceeds the context window of this model. ",
}
NUMBERS = {
    CHAT: r"60 tokens\. However, your messages resulted in \d+ tokens\.",
    COMPLETIONS: r"60 tokens\. However, your messages resulted in \d+ tokens\.",
    MESSAGES: r"\d+ tokens > 60 maximum",
    RESPONSES: r".*\(\d+ tokens; the window holds 60\.\)",
}
#: How an answer ends that the contract has made shorter than its agent wanted.
CUT = {
    CHAT: "length",
    COMPLETIONS: "length",
    MESSAGES: "model_context_window_exceeded",
    RESPONSES: "max_output_tokens",
}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
every = pytest.mark.parametrize("api", APIS, ids=str)


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as started:
        yield started


async def about(trial: SessionTrial, session: str) -> Any:
    return (await trial.read(session))["metadata"]


@both
@every
async def test_a_budget_is_kept_to_the_token(trial: SessionTrial, api: Api, stream: bool) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 20}})
    for most in (12, 1000):
        reply = await api.ask(trial, session, most, stream=stream, ignore_eos=True)
    assert api.end(reply, stream=stream) == CUT[api.path]
    assert [record["completion_tokens"] for record in await trial.records(session)] == [12, 8]
    refused = await api.ask(trial, session, 1, stream=stream)
    code, message = api.refusal(refused, stream=stream)
    assert code == FULL
    assert message.startswith(WORDS[api.path]), message
    assert len(trial.worker.door.at(CHAT)) + len(trial.worker.door.at(COMPLETIONS)) == 2
    samples = await trial.samples(session)
    assert sum(sum(sample["loss_mask"]) for sample in samples) == 20
    assert {sample["metadata"]["end_reason"] for sample in samples} == {"budget_tokens"}
    assert trial.statistics()["ended"] == {"budget_tokens": 1}


@both
@every
async def test_a_prompt_that_fills_the_context_is_told_in_the_api_s_words(
    trial: SessionTrial, api: Api, stream: bool
) -> None:
    session = await trial.create(contract={"budget": {"max_context": 60}})
    reply = await api.ask(trial, session, 1000, stream=stream, ignore_eos=True)
    assert api.end(reply, stream=stream) == CUT[api.path]
    (record,) = await trial.records(session)
    assert record["span"][1] == 60
    refused = await api.ask(trial, session, 1, "word " * 100, stream=stream)
    code, message = api.refusal(refused, stream=stream)
    assert code == FULL
    assert message.startswith(WORDS[api.path]), message
    assert re.fullmatch(NUMBERS[api.path], message.removeprefix(WORDS[api.path])), message
    assert (await about(trial, session))["end_reason"] == "context"


@both
@every
async def test_what_is_fixed_counts_in_every_api_and_the_answer_says_so(stage: Stage, api: Api, stream: bool) -> None:
    async with simulated_sessions(stage, enable_lora=True) as trial:
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "mine", "lora_path": "/mine"})
        contract = {"sampling": {"temperature": 0.25}, "model": {"name": "student", "lora": "mine"}}
        session = await trial.create(contract=contract)
        reply = await api.ask(trial, session, 4, stream=stream, temperature=2.0)
        assert api.model(reply, stream=stream) == "student"
        if api.path == RESPONSES:
            said = api.answers(reply, stream=stream)[-1]
            assert said.get("response", said)["temperature"] == 0.25
        (asked,) = [*trial.worker.door.at(CHAT), *trial.worker.door.at(COMPLETIONS)]
        sent = asked.json()
        assert (sent["temperature"], sent["model"], sent["lora_path"]) == (0.25, "student", "mine")
        (record,) = await trial.records(session)
        assert record["asked_for"] == {"temperature": 2.0, "model": "m"}


@every
async def test_stale_weights_answer_in_no_api(trial: SessionTrial, api: Api) -> None:
    session = await trial.create(contract={"freshness": {"oldest_version": 2}})
    refused = await api.ask(trial, session, 4)
    code, message = api.refusal(refused)
    assert (refused.status, code) == (400, "invalid_request")
    assert "weights of version 1 would take part" in message
    assert (await about(trial, session))["end_reason"] == "stale"


@every
async def test_an_episode_has_no_more_turns_than_its_budget(trial: SessionTrial, api: Api) -> None:
    session = await trial.create(contract={"budget": {"max_turns": 1}})
    assert (await api.ask(trial, session, 4)).status == 200
    assert api.refusal(await api.ask(trial, session, 4))[0] == FULL
    assert (await about(trial, session))["end_reason"] == "turns"


@pytest.mark.parametrize("api", CHATS, ids=str)
async def test_an_answer_that_ends_as_its_agent_asked_says_so(trial: SessionTrial, api: Api) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 100}, "sampling": {"stop": "zzz"}})
    reply = await api.ask(trial, session, 4, ignore_eos=True)
    expected = {CHAT: "length", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
    assert api.end(reply, stream=False) == expected[api.path]
    assert (await about(trial, session)).get("end_reason") is None


async def test_a_stop_of_the_contract_s_is_none_that_a_messages_agent_asked_for(trial: SessionTrial) -> None:
    session = await trial.create(contract={"sampling": {"stop": ["zzz"]}})
    trial.worker.say("It is zzz.")
    reply = await Api(MESSAGES).ask(trial, session, 50, stop_sequences=["is"])
    answer = reply.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    (record,) = await trial.records(session)
    assert record["asked_for"] == {"stop": ["is"]}


async def test_tokens_that_are_counted_cost_no_turn(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_turns": 1, "max_tokens": 4}})
    ask = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(2):
        counted = await trial.ask("POST", f"/sessions/{session}{MESSAGES}/count_tokens", ask)
        assert counted.status == 200
    assert (await Api(MESSAGES).ask(trial, session, 4)).status == 200


@pytest.mark.parametrize("named", [False, True], ids=["by the address", "by a header"])
async def test_the_models_that_an_agent_is_shown_are_the_one_of_its_contract(trial: SessionTrial, named: bool) -> None:
    session = await trial.create(contract={"model": {"name": "student"}})
    prefix, headers = ("", [("X-Session-Id", session)]) if named else (f"/sessions/{session}", [])
    anthropic = [*headers, ("anthropic-version", "2023-06-01")]
    for heads in (headers, anthropic):
        listed = (await trial.ask("GET", f"{prefix}/v1/models", headers=heads)).json()
        assert [model["id"] for model in listed["data"]] == ["student"]
        one = await trial.ask("GET", f"{prefix}/v1/models/student", headers=heads)
        assert one.json()["id"] == "student"
        real = await trial.ask("GET", f"{prefix}/v1/models/simulated-model", headers=heads)
        assert (real.status, b"student" in real.body) == (404, True)
