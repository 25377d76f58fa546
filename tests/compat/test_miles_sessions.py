"""miles' calls to its session server, in its order (`OpenAIEndpointTracer`, `agentic_tool_call.generate`): what it
reads is what our own client reads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles_router.client import RouterClient
from miles_router.compat import POSITIONS
from miles_router.testing import IndexerShape
from miles_router.testing.worker.model.indexer import choose
from tests.compat.miles_client import GetSessionResponse, MilesSample, MilesSession, decode
from tests.support.experts_trial import simulated_experts, truth
from tests.support.http import request
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_trial import (
    SESSIONS,
    Message,
    SessionTrial,
    message_of,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage, staged
from tests.support.tiers import size
from tests.support.waiting import until

AGENTS = size(heavy=96, otherwise=32)
TURNS = 10
INDEXER = IndexerShape(2, 5)
HI: list[Message] = [{"role": "system", "content": "Be brief."}, user("Hi")]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage) as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.log.clear()
    return shared


async def turns(session: MilesSession, count: int, seed: int = 0, **fields: Any) -> list[Message]:
    dice, history = random.Random(seed), [*HI, user(f"I am {seed}")]
    for _ in range(count):
        answer = await session.chat(history, max_tokens=dice.randrange(2, 9), **fields)
        history += [message_of(answer), user(f"Go on {dice.randrange(99)}")]
    return history


def same(ours: Any, theirs: MilesSample) -> None:
    """Element for element, theirs over the response alone."""
    theirs.check()
    start = ours.prompt_length
    assert theirs.tokens == ours.tokens.tolist()
    assert theirs.loss_mask == ours.loss_mask[start:].tolist()
    assert theirs.rollout_log_probs == ours.logprobs[start:].tolist()
    assert (theirs.response, theirs.response_length) == (ours.response, ours.response_length)
    assert theirs.status == ours.status
    assert theirs.weight_versions == [run.version for run in ours.weight_versions]
    told = {"routed_experts": theirs.rollout_routed_experts, "indexer_topk": theirs.rollout_indexer_topk}
    assert {name for name, rows in told.items() if rows is not None} == ours.rows.keys()
    for name, rows in ours.rows.items():
        assert np.array_equal(told[name], rows)  # type: ignore[arg-type]


# The proof


async def test_many_agents_through_its_calls_give_what_our_own_client_gives(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    around = (SESSIONS, (POSITIONS, {"indexer_shape": "2x5"}))
    async with (
        simulated_experts(stage, around=around, indexer=INDEXER) as trial,
        RouterClient(trial.router.url) as ours,
    ):

        async def episode(number: int) -> None:
            session = await MilesSession.create(http, trial.router.url)
            await turns(session, TURNS, seed=number)
            (own,) = await ours.session(session.id).collect()
            reply = await session.collect()
            (sample,) = reply.samples
            same(own, sample)
            assert len(sample.weight_versions) == TURNS
            assert np.array_equal(sample.rollout_routed_experts, truth(sample.tokens))  # type: ignore[arg-type]
            assert np.array_equal(sample.rollout_indexer_topk, choose(INDEXER, sample.tokens))  # type: ignore[arg-type]
            assert reply.empty_reason is None

        await asyncio.gather(*(episode(number) for number in range(AGENTS)))
        assert await ours.sessions() == [], "each was deleted"


@pytest.mark.parametrize(
    "want",
    [{"build": "last_step"}, {"mask": "last_turn"}, {"build": "last_step", "mask": ["last_turn", "newest_weights"]}],
)
async def test_builds_and_masks_are_the_same_in_every_form(
    trial: SessionTrial, http: aiohttp.ClientSession, want: dict[str, Any]
) -> None:
    session = await MilesSession.create(http, trial.router.url)
    await turns(session, 3)
    reply = await trial.ask("POST", f"/sessions/{session.id}/samples", {"format": "miles", **want})
    (theirs,) = decode(reply.body).samples
    async with RouterClient(trial.router.url) as client:
        for form in ("json", "safetensors"):
            (ours,) = await client.session(session.id).collect(format=form, **want)
            same(ours, theirs)
            assert ours.metadata["build"] == want.get("build", "concat")
        (whole,) = await client.session(session.id).collect()
    assert ours.tokens.tolist() == whole.tokens.tolist()
    assert 0 < ours.loss_mask.sum() == (theirs.loss_mask or []).count(1)
    assert (ours.prompt_length > whole.prompt_length) == ("build" in want and "mask" in want)
    assert (ours.loss_mask.sum() < whole.loss_mask.sum()) == ("mask" in want)


# Sessions


async def test_a_session_validates_in_its_type_and_keeps_our_fields(
    trial: SessionTrial, http: aiohttp.ClientSession
) -> None:
    session = await MilesSession.create(http, trial.router.url)
    await turns(session, 2)
    found = await session.read()
    read = GetSessionResponse.model_validate(found)
    assert read.session_id == session.id
    assert [each.path for each in read.records] == ["/v1/chat/completions"] * 2
    for record, told in zip(read.records, found["records"], strict=True):
        assert record.request_timestamp is not None
        assert record.request_timestamp <= record.timestamp
        assert (record.method, record.status_code) == ("POST", 200)
        assert record.response["choices"][0]["message"]["role"] == "assistant"
        assert told["span"][1] > told["span"][0]
    assert [each.request["messages_before"] for each in read.records] == [0, 4]
    assert read.metadata["turns"] == 2


# Samples


async def test_its_metrics_are_there(trial: SessionTrial, http: aiohttp.ClientSession) -> None:
    session = await MilesSession.create(http, trial.router.url)
    await turns(session, 3)
    records = (await session.read())["records"]
    reply = await session.collect()
    (sample,) = reply.samples
    assert sample.prefix_cache_info == {
        "cached_tokens": sum(each["cached_tokens"] for each in records),
        "total_prompt_tokens": sum(each["prompt_tokens"] for each in records),
    }
    assert sample.prefix_cache_info["cached_tokens"] > 0
    assert [each["turn"] for each in sample.metadata["lifecycle"]] == [1, 2, 3]
    assert all(each["t0"] <= each["t1"] for each in sample.metadata["lifecycle"])
    assert sample.metadata["leaf"]["path_node_ids"] == [0, 1, 2]
    assert sample.metadata["leaf"]["response_id"] == records[-1]["rid"]
    assert isinstance(sample.metadata["tito_session_mismatch"], list)
    assert reply.session_metadata["tito_session_mismatch"] == sample.metadata["tito_session_mismatch"]
    assert sample.metadata["router"]["session_id"] == session.id
    assert sample.metadata["router"]["unrecorded_history"] is False
    merged = {**sample.metadata, **reply.session_metadata}  # as the driver of its first version does
    assert {name: merged[name] for name in sample.metadata} == sample.metadata, "nothing said of a sample is lost"
    assert merged["router_session"]["turns"] == 3
    assert "messages" not in sample.metadata, "which only a run that dumps them wants"


async def test_a_named_family_is_compared_by_its_own_rules(stage: Stage, http: aiohttp.ClientSession) -> None:
    async with simulated_sessions(stage, options={"tito_model": "qwen3"}) as trial:
        session = await MilesSession.create(http, trial.router.url)
        trial.worker.say("<think>\n\n</think>\n\nIt is 42.")
        await session.chat(HI, max_tokens=99)
        (sample,) = (await session.collect()).samples
        assert sample.metadata["tito_session_mismatch"] == []


async def test_an_answer_that_the_template_would_change_is_a_mismatch_of_its_text(
    trial: SessionTrial, http: aiohttp.ClientSession
) -> None:
    session = await MilesSession.create(http, trial.router.url)
    trial.worker.say("\n\n It is 42.")  # the template trims it
    await session.chat(HI, max_tokens=99)
    (sample,) = (await session.collect()).samples
    assert [each["type"] for each in sample.metadata["tito_session_mismatch"]] == ["assistant_text"]


async def test_what_is_too_long_to_be_compared_says_nothing_of_mismatches_and_is_counted(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    async with simulated_sessions(stage, settings={"max_text_chars": 2000}) as trial:
        for words, compared in (("short", True), ("long " * 500, False)):
            session = await MilesSession.create(http, trial.router.url)
            await session.chat([user(words)], max_tokens=4)
            (sample,) = (await session.collect()).samples
            assert ("tito_session_mismatch" in sample.metadata) is compared
        assert trial.statistics()["uncompared"] == 1


async def test_reasons_take_the_place_of_refusals(trial: SessionTrial, http: aiohttp.ClientSession) -> None:
    session = await MilesSession.create(http, trial.router.url)
    assert (await session.collect()).empty_reason == "no_records"
    session = await MilesSession.create(http, trial.router.url)
    body = {"model": "m", "max_tokens": 4, "prompt": "a", "echo": True}
    assert (await trial.ask("POST", f"/sessions/{session.id}/v1/completions", body)).status == 200
    assert (await session.collect()).empty_reason == "untraced"
    session = await MilesSession.create(http, trial.router.url)
    await turns(session, 1)
    prompt = (await session.read())["records"][0]["prompt_tokens"]
    reply = await session.collect(max_seq_len=prompt)
    assert (reply.samples, reply.empty_reason) == ([], "all_truncated")
    session = await MilesSession.create(http, trial.router.url)
    await turns(session, 1)
    reply = await session.collect(max_seq_len=prompt + 1)
    assert [(len(each.tokens), each.status) for each in reply.samples] == [(prompt + 1, "truncated")]


async def test_an_abort_before_the_first_token_is_no_sample_and_no_refusal(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    worker = able(await stage.worker()).always(script(chat_reply([], finish="abort")))
    trial = await session_trial(stage, worker)
    session = await MilesSession.create(http, trial.router.url)
    await session.chat(HI)
    reply = await session.collect(max_seq_len=99)
    assert (reply.samples, reply.empty_reason) == ([], "nothing_sampled")


async def branched(session: MilesSession) -> None:
    """Turns 0 and 1 in a line, turn 1 asked again as turn 2, and a line of its own, turn 3."""
    history = await turns(session, 1)
    await session.chat(history)
    await session.chat(history)
    await session.chat([user("Something else")])


async def test_its_first_version_has_one_sample_of_the_branch_that_came_last(
    trial: SessionTrial, http: aiohttp.ClientSession
) -> None:
    session = await MilesSession.create(http, trial.router.url)
    await branched(session)
    reply = await session.collect()
    assert [each.metadata["leaf"]["node_id"] for each in reply.samples] == [3]
    assert reply.session_metadata["router_session"]["branches_left_out"] == 2


async def test_samples_of_version_2_have_every_branch_except_retries(
    trial: SessionTrial, http: aiohttp.ClientSession
) -> None:
    session = await MilesSession.create(http, trial.router.url, version=2)
    await branched(session)
    reply = await session.collect(metadata={"reward": 0.5, "task": "sums", "leaf": "not the agent's"})
    assert [each.metadata["leaf"]["node_id"] for each in reply.samples] == [2, 3]
    assert [each.metadata["leaf"]["parent"] for each in reply.samples] == [0, None]
    assert [(each.reward, each.metadata["task"], each.metadata["reward"]) for each in reply.samples] == [
        (0.5, "sums", 0.5)
    ] * 2
    assert reply.session_metadata["agent"]["task"] == "sums"


@pytest.mark.parametrize(
    ("body", "accept", "theirs"),
    [
        ({"max_seq_len": None}, "*/*", True),
        ({"max_seq_len": 99, "metadata": {}}, "*/*", True),
        ({"format": "miles", "branches": "all"}, "application/json", True),
        ({}, "application/octet-stream", True),
        ({}, "*/*", False),
        ({"max_seq_len": 99}, "application/json", False),
        ({"max_seq_len": 99, "branches": "all"}, "*/*", False),
        ({"max_seq_len": 99, "format": "json"}, "*/*", False),
        ({"max_seq_len": 99, "format": "safetensors"}, "application/octet-stream", False),
    ],
    ids=str,
)
async def test_its_form_is_given_to_who_sends_what_its_client_sends(
    trial: SessionTrial, body: dict[str, Any], accept: str, theirs: bool
) -> None:
    session = await trial.create()
    await trial.chat(session, HI)
    answer = await trial.ask("POST", f"/sessions/{session}/samples", body, [("Accept", accept)])
    assert answer.status == 200, answer.body
    assert (b"_samples_meta" in answer.body) is theirs
    if theirs:
        assert len(decode(answer.body).samples) == 1


async def test_a_session_with_sampling_masks_has_them_in_its_form(trial: SessionTrial) -> None:
    session = await trial.create(contract={"sampling": {"top_k": 5, "return_sampling_mask": True}})
    answer = await trial.chat(session, HI, max_tokens=8, ignore_eos=True)
    await trial.chat(session, [*HI, message_of(answer), user("More")], max_tokens=8, ignore_eos=True)
    (ours,) = await trial.samples(session)
    reply = await trial.ask("POST", f"/sessions/{session}/samples", {"max_seq_len": None})
    (theirs,) = decode(reply.body, masks=True).samples
    theirs.check()
    start = len(ours["tokens"]) - ours["response_length"]
    assert theirs.rollout_log_probs == np.float32(ours["sampling_logprobs"][start:]).tolist()
    assert [span["version"] for call in theirs.weight_versions for span in call] == ["1", "1"]
    assert theirs.rollout_sampling_mask is not None
    (ids, offsets), whole = theirs.rollout_sampling_mask.values(), ours["sampling_mask"]
    begin = whole["offsets"][start]
    assert (ids.tolist(), (offsets + begin).tolist()) == (whole["ids"][begin:], whole["offsets"][start:])


async def test_a_request_in_its_form_that_is_wrong_is_refused(trial: SessionTrial) -> None:
    session = await trial.create()
    for body in ({"max_seq_len": -1}, {"max_seq_len": None, "metadata": "text"}, {"format": "miles", "what": 1}):
        answer = await trial.ask("POST", f"/sessions/{session}/samples", body)
        assert (answer.status, answer.error_type) == (400, "invalid_request")


async def test_a_client_that_leaves_inside_a_large_file_leaves_nothing_behind(stage: Stage) -> None:
    async with simulated_experts(stage, around=(SESSIONS,), context_len=100_000) as trial:
        session = await trial.create()
        await trial.chat(session, [user("word " * 20_000)], max_tokens=4)
        client = await stage.client(trial.router, receive_buffer=4096)
        body = b'{"max_seq_len": null}'
        await client.send(request("POST", f"/sessions/{session}/samples", (), body))
        head = await client.read_head("POST")
        assert head.status == 200
        assert int(head.value("content-length") or b"") > 2 << 20
        await client.read_part()
        client.reset()
        await until(lambda: not trial.router.leftovers(), "the router has noticed")
        assert len(await trial.samples(session)) == 1


# What a run puts into every turn


@pytest.mark.parametrize("stream", [False, True])
async def test_the_runs_adapter_answers_every_turn(stage: Stage, stream: bool) -> None:
    async with simulated_sessions(stage, options={"lora_path": "miles_lora"}, enable_lora=True) as trial:
        await trial.ask("POST", "/load_lora_adapter", {"lora_name": "miles_lora", "lora_path": "/adapter"})
        session = await trial.create()
        answer = await trial.turn(session, HI, stream=stream, lora_path="the agent's")
        assert answer.status == 200, answer.body
        assert [each.json()["lora_path"] for each in trial.log] == ["miles_lora"]
        assert len(await trial.records(session)) == 1


async def test_the_runs_template_settings_are_in_every_turn_and_the_agents_count_more(stage: Stage) -> None:
    options = {"chat_template_kwargs": {"enable_thinking": False, "a": 1}}
    async with simulated_sessions(stage, options=options) as trial:
        session = await trial.create()
        first = message_of(await trial.chat(session, HI))
        await trial.chat(session, [*HI, first, user("Go on")], chat_template_kwargs={"a": 2})
        sent = [each.json()["chat_template_kwargs"] for each in trial.log]
        assert sent == [{"enable_thinking": False, "a": 1}, {"enable_thinking": False, "a": 2}]
        assert await trial.reasons(session) == [None, "changed_tools"]
