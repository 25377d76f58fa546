"""Sessions as the client sees them, against the HTTP contract: a scripted server stands for the router."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import save

from miles_router.client import InvalidSample, Retries, RouterClient, agentic
from tests.support.scripted_worker import RESET, ScriptedWorker, reply, script
from tests.support.session_trial import simulated_sessions
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE

AT_ONCE = Retries(attempts=1, first_delay=0.0, longest_delay=0.0)
MADE = reply(b'{"session_id": "made", "base_url": "/sessions/made/v1"}', 201)
DELETED = b"HTTP/1.1 204 No Content\r\n\r\n"
FACTS: dict[str, Any] = {
    "weight_versions": [{"version": "1", "start": 1, "end": 3}],
    "response": "42",
    "response_length": 2,
    "status": "completed",
    "reward": 1.0,
    "label": "42",
    "metadata": {"session_id": "made", "leaf": 0, "turns": [{"turn": 0, "start": 1, "end": 3}], "reason": None},
}
ARRAYS: dict[str, list[Any]] = {"tokens": [7, 8, 9], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.5, -0.25]}
EXPERTS = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
FILE = save(
    {
        "0.tokens": np.array(ARRAYS["tokens"], dtype=np.int32),
        "0.loss_mask": np.array(ARRAYS["loss_mask"], dtype=np.uint8),
        "0.logprobs": np.array(ARRAYS["logprobs"], dtype=np.float32),
        "0.routed_experts": EXPERTS,
    },
    {"samples": json.dumps([FACTS]), "metadata": json.dumps({"session_id": "made"})},
)
SAMPLES = reply(FILE, headers=[("Content-Type", "application/octet-stream")])
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}],
}
CHAT = reply(json.dumps(COMPLETION).encode(), headers=[("Content-Type", "application/json")])
QUESTION = [{"role": "user", "content": "What is 17 plus 25?"}]


def error(status: int, kind: str, message: str = "so it is") -> bytes:
    described = {"type": kind, "message": message, "request_id": "mr-1"}
    return reply(json.dumps({"error": described}).encode(), status)


@pytest.fixture
async def server(stage: Stage) -> ScriptedWorker:
    return await stage.worker()


@contextlib.asynccontextmanager
async def connected(server: ScriptedWorker, **options: Any) -> AsyncIterator[RouterClient]:
    async with RouterClient(server.url, **{"retries": AT_ONCE, "timeout": PATIENCE, **options}) as client:
        yield client


def asked(server: ScriptedWorker) -> list[tuple[str, str]]:
    return [(each.method, each.target.decode()) for each in server.requests]


def bodies(server: ScriptedWorker) -> list[Any]:
    return [json.loads(each.body) if each.body else None for each in server.requests]


async def test_a_session_is_made_used_collected_and_deleted(server: ScriptedWorker) -> None:
    server.next(script(MADE), script(CHAT), script(SAMPLES), script(DELETED))
    async with connected(server) as client, await client.create_session("made", {"task": 7}) as session:
        assert (session.id, session.base_url) == ("made", f"{server.url}/sessions/made/v1")
        assert session.anthropic_base_url == f"{server.url}/sessions/made"
        answer = await session.chat(QUESTION, max_tokens=8)
        (sample,) = await session.collect(
            max_seq_len=100, branches="last", reward=1.0, label="42", metadata={"group": 3}
        )
    assert answer["choices"][0]["message"]["content"] == "42"
    assert {name: getattr(sample, name).tolist() for name in ARRAYS} == ARRAYS
    assert (sample.reward, sample.label, sample.metadata) == (1.0, "42", FACTS["metadata"])
    assert sample.routed_experts is not None
    assert sample.routed_experts.tolist() == EXPERTS.tolist()
    assert asked(server) == [
        ("POST", "/sessions"),
        ("POST", "/sessions/made/v1/chat/completions"),
        ("POST", "/sessions/made/samples"),
        ("DELETE", "/sessions/made?abort=true"),
    ]
    assert bodies(server) == [
        {"session_id": "made", "metadata": {"task": 7}},
        {"model": "default", "messages": QUESTION, "max_tokens": 8},
        {
            "format": "safetensors",
            "max_seq_len": 100,
            "branches": "last",
            "reward": 1.0,
            "label": "42",
            "metadata": {"group": 3},
        },
        None,
    ]


async def test_a_session_is_asked_of_its_owner_and_of_the_router_where_that_is_not_there(
    server: ScriptedWorker, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    owner = await stage.worker()
    told = {"session_id": "made", "base_url": "/sessions/made/v1", "owner_url": owner.url}
    server.next(script(reply(json.dumps(told).encode(), 201)), *[script(reply(b'{"records": []}'))] * 2)
    owner.next(script(reply(b'{"records": []}')))
    async with RouterClient(server.url, retries=AT_ONCE) as client:
        session = await client.create_session()
        await session.records()
        assert ([each.path for each in owner.requests], len(server.requests)) == (["/sessions/made"], 1)
        owner.kill()
        for _ in range(2):
            await session.records()
        assert [each.path for each in server.requests] == ["/sessions", "/sessions/made", "/sessions/made"]
        (said,) = [each for each in caplog.messages if "from now on" in each]
        assert server.url in said
        assert session.base_url == f"{server.url}/sessions/made/v1", "what agents are given is the router's"


async def test_an_id_is_one_segment_of_a_path_whatever_is_in_it(server: ScriptedWorker) -> None:
    server.always(script(reply(b"{}")))
    async with connected(server) as client:
        await client.session("a/b c%2F?").records()
    assert asked(server) == [("GET", "/sessions/a%2Fb%20c%252F%3F")]


async def test_a_turn_that_is_asked_again_keeps_its_id_and_turns_have_ids_of_their_own(server: ScriptedWorker) -> None:
    server.next(script(RESET)).always(script(CHAT))
    async with connected(server) as client:
        session = client.session("made")
        await session.chat(QUESTION)
        await session.chat(QUESTION)
        await session.chat(QUESTION, turn_id="mine")
        with pytest.raises(ValueError, match="OpenAI"):
            await session.chat(QUESTION, stream=True)
    ids = [each.values("x-turn-id")[0] for each in server.requests]
    assert ids[0] == ids[1] != ids[2]
    assert (ids[3], len(ids)) == (b"mine", 4)


# What is refused


async def test_a_sample_that_breaks_an_invariant_on_its_way_is_refused(server: ScriptedWorker) -> None:
    broken = {**ARRAYS, **FACTS, "loss_mask": [1, 1, 1]}
    server.always(script(reply(json.dumps({"samples": [broken], "metadata": {}}).encode())))
    async with connected(server) as client:
        with pytest.raises(InvalidSample) as caught:
            await client.session("made").collect(format="json")
    assert (caught.value.invariant, caught.value.status) == ("versions_cover_the_loss", 0)


# The end of a session


@pytest.mark.parametrize("answer", [error(404, "not_found"), error(500, "internal_error")])
async def test_a_session_that_cannot_be_deleted_loses_nothing(
    server: ScriptedWorker, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.next(script(MADE), script(SAMPLES), script(answer))
    async with connected(server) as client:
        with caplog.at_level(logging.WARNING, "miles_router.client"):
            async with await client.create_session() as session:
                samples = await session.collect()
    assert len(samples) == 1
    assert ("was not deleted" in caplog.text) is (b"internal_error" in answer), "one that is gone is no news"


async def test_an_agent_of_which_nothing_was_traced_is_an_error_and_no_empty_episode(stage: Stage) -> None:
    async def agent(base_url: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
            await client.completions.create(model="m", prompt="a", echo=True, max_tokens=3)

    async with simulated_sessions(stage) as trial, RouterClient(trial.router.url) as client:
        with pytest.raises(
            InvalidSample, match=r"an_episode_is_traced: .* untraced: 1, the last to /v1/completions: with echo"
        ):
            await agentic(client, agent)


# An agent


@pytest.mark.parametrize("judge", ["plain", "coroutine", "none"])
async def test_an_agent_that_knows_nothing_but_openai_makes_samples(server: ScriptedWorker, judge: str) -> None:
    server.next(script(MADE), script(CHAT), script(SAMPLES), script(DELETED))

    async def agent(base_url: str) -> str | None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
            answer = await client.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
        return answer.choices[0].message.content

    def plain(outcome: Any) -> float:
        return float(outcome == "42")

    async def coroutine(outcome: Any) -> float:
        return plain(outcome)

    reward: Any = {"plain": plain, "coroutine": coroutine, "none": None}[judge]
    async with connected(server) as client:
        samples = await agentic(client, agent, reward=reward, label="42", metadata={"group": 3}, max_seq_len=9)
    assert [sample.tokens.tolist() for sample in samples] == [ARRAYS["tokens"]]
    assert asked(server) == [
        ("POST", "/sessions"),
        ("POST", "/sessions/made/v1/chat/completions"),
        ("POST", "/sessions/made/samples"),
        ("DELETE", "/sessions/made?abort=true"),
    ]
    expected = {"format": "safetensors", "max_seq_len": 9, "branches": "all", "label": "42", "metadata": {"group": 3}}
    assert bodies(server)[0] == {"metadata": {"group": 3}}
    assert bodies(server)[2] == (expected if judge == "none" else {**expected, "reward": 1.0})
