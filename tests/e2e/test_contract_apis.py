"""An episode's contract in every API that agents speak, whole and streamed, under the session's address and with its
name in a header: it is kept to the token, and told in the words that harnesses of that API look for."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator

import pytest

from tests.support.session_apis import APIS, BOTH, COMPLETIONS, MESSAGES, RESPONSES, TALKS, Api, case
from tests.support.session_trial import CHAT, SessionTrial, simulated_sessions, user
from tests.support.stage import Stage

FULL = "context_length_exceeded"
LIMIT = "This model's maximum context length is "
#: What a harness compacts upon, by its API (LangChain and others, Claude Code, Codex), and the numbers behind it.
WORDS = {
    CHAT: (LIMIT, r"60 tokens\. However, your messages resulted in \d+ tokens\."),
    COMPLETIONS: (LIMIT, r"60 tokens\. However, your messages resulted in \d+ tokens\."),
    MESSAGES: ("prompt is too long: ", r"\d+ tokens > 60 maximum"),
    RESPONSES: ("Your input exceeds the context window of this model. ", r".*\(\d+ tokens; the window holds 60\.\)"),
}
#: How an answer ends that the contract has made shorter than its agent wanted, and one that its agent did.
CUT = {
    CHAT: ("length", "length"),
    COMPLETIONS: ("length", "length"),
    MESSAGES: ("model_context_window_exceeded", "max_tokens"),
    RESPONSES: ("max_output_tokens", "max_output_tokens"),
}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as started:
        yield started


async def end_reason(trial: SessionTrial, session: str) -> str | None:
    reason: str | None = (await trial.read(session))["metadata"].get("end_reason")
    return reason


def asked_for(trial: SessionTrial) -> int:
    return len(trial.log) + len(trial.worker.log.at(COMPLETIONS))


async def test_a_budget_is_kept_to_the_token(trial: SessionTrial) -> None:
    for number, (api, stream) in enumerate(itertools.product(APIS, BOTH), 1):
        with case(api, stream):
            session, before = await trial.create(contract={"budget": {"max_tokens": 20}}), asked_for(trial)
            for most in (12, 1000):
                reply = await api.ask(trial, session, most, stream=stream, ignore_eos=True)
            assert api.end(reply, stream=stream) == CUT[api.path][0]
            assert [record["completion_tokens"] for record in await trial.records(session)] == [12, 8]
            code, message = api.refusal(await api.ask(trial, session, 1, stream=stream), stream=stream)
            assert code == FULL
            assert message.startswith(WORDS[api.path][0]), message
            assert asked_for(trial) == before + 2, "what was refused has not been generated"
            samples = await trial.samples(session)
            assert sum(sum(sample["loss_mask"]) for sample in samples) == 20
            assert {sample["metadata"]["end_reason"] for sample in samples} == {"budget_tokens"}
            assert trial.statistics()["ended"] == {"budget_tokens": number}


async def test_a_prompt_that_fills_the_context_is_told_in_the_api_s_words(trial: SessionTrial) -> None:
    for api, stream in itertools.product(APIS, BOTH):
        with case(api, stream):
            session = await trial.create(contract={"budget": {"max_context": 60}})
            reply = await api.ask(trial, session, 1000, stream=stream, ignore_eos=True)
            assert api.end(reply, stream=stream) == CUT[api.path][0]
            (record,) = await trial.records(session)
            assert record["span"][1] == 60
            refused = await api.ask(trial, session, 1, "word " * 100, stream=stream)
            code, message = api.refusal(refused, stream=stream)
            words, numbers = WORDS[api.path]
            assert code == FULL
            assert message.startswith(words), message
            assert re.fullmatch(numbers, message.removeprefix(words)), message
            assert await end_reason(trial, session) == "context"


async def test_what_is_fixed_counts_in_every_api_and_the_answer_says_so(stage: Stage) -> None:
    async with simulated_sessions(stage, enable_lora=True) as trial:
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "mine", "lora_path": "/mine"})
        contract = {"sampling": {"temperature": 0.25}, "model": {"name": "student", "lora": "mine"}}
        for api, stream in itertools.product(APIS, BOTH):
            with case(api, stream):
                session = await trial.create(contract=contract)
                reply = await api.ask(trial, session, 4, stream=stream, temperature=2.0)
                assert api.model(reply, stream=stream) == "student"
                if api.path == RESPONSES:
                    said = api.answers(reply, stream=stream)[-1]
                    assert said.get("response", said)["temperature"] == 0.25
                sent = trial.worker.log.at(COMPLETIONS if api.path == COMPLETIONS else CHAT)[-1].json()
                assert (sent["temperature"], sent["model"], sent["lora_path"]) == (0.25, "student", "mine")
                (record,) = await trial.records(session)
                assert record["asked_for"] == {"temperature": 2.0, "model": "m"}


async def test_other_bounds_of_an_episode_hold_in_every_api(trial: SessionTrial) -> None:
    for api in APIS:
        with case(api):
            session = await trial.create(contract={"freshness": {"oldest_version": 2}})
            refused = await api.ask(trial, session, 4)
            code, message = api.refusal(refused)
            assert (refused.status, code) == (400, "invalid_request")
            assert "weights of version 1 would take part" in message
            assert await end_reason(trial, session) == "stale"
            session = await trial.create(contract={"budget": {"max_turns": 1}})
            assert (await api.ask(trial, session, 4)).status == 200
            assert api.refusal(await api.ask(trial, session, 4))[0] == FULL
            assert await end_reason(trial, session) == "turns"


async def test_an_answer_that_ends_as_its_agent_asked_says_so(trial: SessionTrial) -> None:
    for api in TALKS:
        session = await trial.create(contract={"budget": {"max_tokens": 100}, "sampling": {"stop": "zzz"}})
        reply = await api.ask(trial, session, 4, ignore_eos=True)
        assert api.end(reply, stream=False) == CUT[api.path][1], api
        assert await end_reason(trial, session) is None
    session = await trial.create(contract={"sampling": {"stop": ["zzz"]}})
    trial.worker.say("It is zzz.")
    answer = (await Api(MESSAGES).ask(trial, session, 50, stop_sequences=["is"])).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None), "its agent did not ask for that stop"
    (record,) = await trial.records(session)
    assert record["asked_for"] == {"stop": ["is"]}


async def test_what_is_asked_beside_turns_costs_none_and_shows_the_contract_s_model(trial: SessionTrial) -> None:
    contract = {"budget": {"max_turns": 1, "max_tokens": 4}, "model": {"name": "student"}}
    session = await trial.create(contract=contract)
    for prefix, headers in ((f"/sessions/{session}", []), ("", [("X-Session-Id", session)])):
        counting = {"model": "m", "messages": [user("Hi")]}
        assert (await trial.ask("POST", f"{prefix}{MESSAGES}/count_tokens", counting, headers)).status == 200
        for heads in (headers, [*headers, ("anthropic-version", "2023-06-01")]):
            listed = (await trial.ask("GET", f"{prefix}/v1/models", headers=heads)).json()
            assert [model["id"] for model in listed["data"]] == ["student"]
            one = await trial.ask("GET", f"{prefix}/v1/models/student", headers=heads)
            assert one.json()["id"] == "student"
            real = await trial.ask("GET", f"{prefix}/v1/models/simulated-model", headers=heads)
            assert (real.status, b"student" in real.body) == (404, True)
    assert (await Api(MESSAGES).ask(trial, session, 4)).status == 200
