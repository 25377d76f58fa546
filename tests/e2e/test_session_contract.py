"""An episode's contract: what it leaves for each turn to the token, what its agent cannot change, and how it ends; work
that nobody wants ends at its engine at once. It holds in every API that agents speak."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.fleet import post, posting
from tests.support.http import RawReply, whole_or_cut
from tests.support.session_apis import APIS, BOTH, COMPLETIONS, MESSAGES, RESPONSES, TALKS, Api, case
from tests.support.session_trial import CHAT, SessionTrial, chunks_of, exactly, message_of, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

HI = [user("Hi")]

LONG: Any = {"ignore_eos": True, "max_tokens": 1000}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as started:
        yield started


def overflow_of(answer: RawReply) -> dict[str, Any]:
    """The error of an agent whose contract leaves nothing."""
    assert answer.status == 400, answer.body
    error: dict[str, Any] = answer.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert error["message"].startswith("This model's maximum context length is")
    return error


async def end_reason(trial: SessionTrial, session: str) -> str | None:
    reason: str | None = (await trial.read(session))["metadata"].get("end_reason")
    return reason


async def ask_again(trial: SessionTrial, session: str, answer: Any, **fields: Any) -> RawReply:
    """The next turn behind the first."""
    return await trial.turn(session, [*HI, message_of(answer), user("More")], **fields)


# What may stand in one


async def test_a_contract_is_read_when_the_session_is_made_and_shown_with_it(trial: SessionTrial) -> None:
    contract = {"budget": {"max_turns": 2}, "sampling": {"temperature": 0.5}}
    session = await trial.create(contract=contract)
    assert (await trial.read(session))["metadata"]["contract"] == contract
    await trial.chat(session, HI)
    (sample,) = await trial.samples(session)
    assert sample["metadata"]["contract"] == contract
    assert "end_reason" not in sample["metadata"]


# The budget


async def test_turns_at_the_same_time_share_a_budget_to_the_token(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 50}})
    turns = [trial.turn(session, [user(f"Hi {number}")], ignore_eos=True, max_tokens=20) for number in range(4)]
    answers = await asyncio.gather(*turns)
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 400]
    assert sorted(record["completion_tokens"] for record in await trial.records(session)) == [10, 20, 20]


async def test_a_turn_waits_for_what_others_may_leave_of_the_budget(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 40}})
    trial.worker.say("Short.")
    trial.worker.say("Short.")
    trial.worker.stop_scheduler()
    async with under_way(trial.turn(session, HI, max_tokens=None)) as first:
        await until(lambda: trial.worker.running == 1, "the first runs, and may take all")
        async with under_way(trial.turn(session, [user("And I?")], max_tokens=None)) as second:
            while not second.done() and (await trial.read(session))["metadata"]["in_flight"] < 2:
                pass
            trial.worker.continue_scheduler()
            assert [(await first).status, (await second).status] == [200, 200]
    assert len(trial.log) == 2


async def test_a_turn_under_a_budget_is_cut_to_what_the_engine_s_window_holds(stage: Stage) -> None:
    async with simulated_sessions(stage, context_len=100) as trial:
        free = await trial.create()
        assert (await trial.turn(free, HI, **LONG)).status == 400, "the engine refuses it"
        session = await trial.create(contract={"budget": {"max_tokens": 5000}})
        answer = await trial.chat(session, HI, **LONG)
        assert answer["choices"][0]["finish_reason"] == "length"
        refused = await ask_again(trial, session, answer)
        assert overflow_of(refused)["reason"] == "context"


# What the agent cannot change


@pytest.mark.parametrize("enabled", [True, False])
async def test_an_adapter_that_is_not_there_is_never_the_base_model(stage: Stage, enabled: bool) -> None:
    async with simulated_sessions(stage, enable_lora=enabled) as trial:
        session = await trial.create(contract={"model": {"lora": "mine"}})
        answer = await trial.turn(session, HI)
        assert (answer.status, b"mine" in answer.body) == (400, True)
        assert await trial.records(session) == []


async def test_no_name_of_a_model_gets_around_the_adapter_of_the_run(stage: Stage) -> None:
    async with simulated_sessions(stage, options={"lora_path": "mine"}, enable_lora=True) as trial:
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "mine", "lora_path": "/mine"})
        session = await trial.create()
        await trial.chat(session, HI, model="base:other")
        assert (trial.log[0].json()["model"], trial.log[0].json()["lora_path"]) == ("base", "mine")
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "other", "lora_path": "/other"})
        for path, fields in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})):
            answer = await trial.ask("POST", f"/sessions/{session}{path}", {**fields, "model": "base:other"})
            assert answer.status == 200, answer.body
        assert {each.lora_path for each in trial.worker.log.generations} == {"mine"}


async def test_what_is_not_traced_has_the_adapter_of_the_run_too(stage: Stage) -> None:
    async with simulated_sessions(stage, options={"lora_path": "mine"}, enable_lora=True) as trial:
        for name in ("mine", "other"):
            await trial.ask("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": "/x"})
        session = await trial.create()
        for path, fields in (("/generate", {"text": "Hi"}), (COMPLETIONS, {"prompt": "Hi", "echo": True})):
            for own in ({}, {"model": "other"}, {"lora_path": "other"}):
                answer = await trial.ask("POST", f"/sessions/{session}{path}", {**fields, **own})
                assert answer.status == 200, answer.body
        assert [each.lora_path for each in trial.worker.log.generations] == ["mine"] * 6
        await trial.ask("POST", f"/sessions/{session}/v1/embeddings", {"input": "Hi", "lora_path": "other"})
        assert trial.worker.log.at("/v1/embeddings")[0].json()["lora_path"] == "mine"


# How old the weights may be


async def new_weights(trial: SessionTrial, version: str) -> None:
    """The fleet has weights of this version."""
    fields = {"model_path": "/new", "weight_version": version, "flush_cache": True}
    answer = await trial.ask("POST", "/update_weights_from_disk", fields)
    assert answer.status == 200, answer.body


async def test_a_turn_in_which_stale_weights_would_take_part_is_refused_by_name(trial: SessionTrial) -> None:
    old = await trial.create(contract={"freshness": {"oldest_version": 2}})
    early = await trial.turn(old, HI)
    assert (early.status, early.error_type) == (400, "invalid_request")
    assert (trial.log, await end_reason(trial, old)) == ([], "stale")
    session = await trial.create(contract={"freshness": {"oldest_version": 1}})
    answer = await trial.chat(session, HI)
    assert (await trial.samples(session))[0]["metadata"]["stale"] is False
    await new_weights(trial, "2")
    assert (await ask_again(trial, session, answer)).status == 200, "old enough"
    assert (await trial.turn(old, HI)).status == 200, "the fleet has come so far"


async def test_a_history_of_stale_weights_is_not_continued(trial: SessionTrial) -> None:
    free = await trial.create(contract={"freshness": {"oldest_version": 2, "otherwise": "mark"}})
    answer = await trial.chat(free, HI)
    await new_weights(trial, "2")
    assert (await ask_again(trial, free, answer)).status == 200, "it is marked, not refused"
    assert (await trial.turn(free, [user("Anew")])).status == 200
    marked = [sample["metadata"]["stale"] for sample in await trial.samples(free)]
    assert marked == [True, False]


async def test_what_cannot_be_counted_or_recorded_is_refused_under_a_budget(trial: SessionTrial) -> None:
    session = await trial.create(contract={"budget": {"max_tokens": 20}})
    wrong: Any = ({"max_tokens": "9"}, {"max_tokens": 0}, {"n": "2"})
    for fields in wrong:  # an engine might read it otherwise
        answer = await trial.turn(session, HI, **fields)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), fields
    for path, body in (("/generate", {"text": "Once"}), (COMPLETIONS, {"prompt": "Once", "echo": True})):
        answer = await trial.ask("POST", f"/sessions/{session}{path}", body)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), path
        assert trial.worker.log.at(path) == []
    session = await trial.create(contract={"budget": {"max_context": 60}})
    answer = await trial.turn(session, HI, chat_template_kwargs=7)  # no template is rendered with that
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert trial.log == []
    # Completions give 16 tokens where nobody says how many; a field of chat's does not get around the budget.
    session, asked = await trial.create(contract={"budget": {"max_tokens": 20}}), {"max_completion_tokens": 1}
    for tokens in (16, 4):
        body = {"model": "m", "prompt": "Once", "ignore_eos": True, **asked}
        answer = await trial.ask("POST", f"/sessions/{session}{COMPLETIONS}", body)
        assert answer.json()["usage"]["completion_tokens"] == tokens


ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30_000}
GENERATION: dict[str, Any] = {"text": "Hi", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
async def slow(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, token_latency_s=0.002) as started:
        yield started


async def it_samples(slow: SessionTrial, generations: int = 1) -> None:
    """Until so many generations have sampled something."""

    def sampled() -> bool:
        return sum(bool(running.output_ids) for running in slow.worker.engine.running.values()) == generations

    await until(sampled, f"{generations} generations sample")


async def gone(slow: SessionTrial) -> None:
    """Until the engine has nothing more to do."""
    await until(lambda: not slow.worker.running, "the engine is idle")


def finish_of(answer: RawReply, *, stream: bool) -> str:
    """Why an answer ended."""
    assert answer.status == 200, answer.body
    if not stream:
        return str(answer.json()["choices"][0]["finish_reason"])
    said = [choice["finish_reason"] for chunk in chunks_of(answer.body) for choice in chunk["choices"]]
    return str(next(each for each in said if each is not None))


async def the_partial_sample_stays(slow: SessionTrial, session: str, reason: str, ended: int = 1) -> None:
    """What was sampled until the end is a sample that says why it ended; and nothing begins any more."""
    (sample,) = await slow.samples(session)
    assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", reason)
    assert 0 < sum(sample["loss_mask"]) < ENDLESS["max_tokens"]
    exactly(sample, slow.log[0].generation)
    refused = await slow.turn(session, HI)
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.json()["error"]["reason"] == reason
    assert slow.statistics()["ended"] == {reason: ended}


# A group that has enough


async def test_an_abort_of_a_group_ends_nobody_else(slow: SessionTrial) -> None:
    mine, other = await slow.create(contract={"group": 7}), await slow.create(contract={"group": 70})
    async with under_way(slow.turn(mine, HI, **ENDLESS)) as turn, under_way(slow.turn(other, HI, **ENDLESS)) as left:
        await it_samples(slow, 2)
        await slow.ask("POST", "/abort_request", {"group": "7"})
        await turn
        assert (left.done(), slow.worker.running) == (False, 1)
    assert (await slow.read(other))["metadata"].get("end_reason") is None


@pytest.mark.parametrize("named", [True, False], ids=["with a rid", "without"])
async def test_a_group_s_text_rollouts_end_too(slow: SessionTrial, named: bool) -> None:
    body = {**GENERATION, **({"rid": "one"} if named else {})}
    asked = slow.router.ask(
        "POST", "/generate", [("Content-Type", "application/json"), ("X-Group-Id", "g")], json.dumps(body).encode()
    )
    async with under_way(asked) as mine:
        await it_samples(slow)
        other = posting(slow.router, **GENERATION)
        await it_samples(slow, 2)
        await slow.ask("POST", "/abort_request", {"group": "g"})
        answer = await mine
        assert slow.worker.running == 1, "the other one goes on"
        await post(slow.router, "/abort_request", abort_all=True)
        await other
    if named:
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert (answer.status, answer.error_type) == (409, "conflict")


# A deadline


@both
async def test_a_deadline_ends_the_turn_under_way(slow: SessionTrial, stream: bool) -> None:
    for seconds in (0.5, 4.0, 32.0):  # the first that is long enough for a turn to begin here
        session = await slow.create(contract={"budget": {"deadline_s": seconds}})
        answer = await slow.turn(session, HI, stream=stream, **ENDLESS)
        if answer.status == 200:
            break
    await gone(slow)
    assert finish_of(answer, stream=stream) == "abort"
    (sample,) = await slow.samples(session)
    assert (sample["status"], sample["metadata"]["end_reason"]) == ("aborted", "deadline")
    exactly(sample, slow.log[-1].generation)
    count = len(slow.log)
    assert (await slow.turn(session, HI)).json()["error"]["reason"] == "deadline"
    assert len(slow.log) == count


# A session that is deleted


async def test_a_group_s_turns_end_at_their_engine_and_stay(slow: SessionTrial) -> None:
    wrong: Any = ("", True, ["g"], 1.5)
    for group in wrong:
        answer = await slow.ask("POST", "/abort_request", {"group": group})
        assert (answer.status, answer.error_type) == (400, "invalid_request"), group
    named: list[dict[str, Any]] = [{"contract": {"group": "g"}}, {"metadata": {"group": "g"}}]
    for number, (fields, stream) in enumerate(itertools.product(named, (False, True)), 1):
        with case(fields, stream):
            slow.worker.log.clear()
            session, idle = await slow.create(**fields), await slow.create(**fields)
            async with under_way(slow.turn(session, HI, stream=stream, **ENDLESS)) as turn:
                await it_samples(slow)
                assert (await slow.ask("POST", "/abort_request", {"group": "g"})).status == 200
                await gone(slow)
                assert finish_of(await turn, stream=stream) == "abort"
            await the_partial_sample_stays(slow, session, "aborted", 2 * number)
            assert (await slow.turn(idle, HI)).status == 400, "a member without a turn begins none"
            assert len(slow.log) == 1
            for each in (session, idle):
                await slow.ask("DELETE", f"/sessions/{each}")


async def test_a_session_deleted_with_abort_leaves_no_work_behind(slow: SessionTrial) -> None:
    for stream in (False, True):
        slow.worker.log.clear()
        session = await slow.create()
        assert (await slow.ask("DELETE", f"/sessions/{session}?abort=yes")).status == 400, "no flag deletes nothing"
        async with under_way(whole_or_cut(slow.turn(session, HI, stream=stream, **ENDLESS))) as turn:
            await it_samples(slow)
            assert (await slow.ask("DELETE", f"/sessions/{session}?abort=true")).status == 204
            await gone(slow)
            answer = await turn
            if stream:
                assert (answer.status, b"[DONE]" in answer.body) == (200, False), "it does not look complete"
            else:
                assert (answer.status, answer.error_type) == (404, "not_found")
        told = {exchange.json()["rid"] for exchange in slow.worker.log.at("/abort_request")}
        assert told == {slow.log[0].json()["rid"]}, "an engine looks only now and then whether its client is there"
    assert slow.statistics()["ended"] == {"deleted": 2}
    session = await slow.create()
    async with under_way(slow.turn(session, HI, ignore_eos=True, max_tokens=300)) as turn:
        await it_samples(slow)
        assert (await slow.ask("DELETE", f"/sessions/{session}")).status == 204
        assert (await turn).json()["usage"]["completion_tokens"] == 300, "without abort it finishes"


# In every API


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
