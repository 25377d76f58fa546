"""What the client does about connections: it asks again what is safe, says what was lost, and leaves nothing open;
and sessions as it sees them.

A scripted server stands for the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import save

from miles_router.client import (
    ConnectionLost,
    ErrorReply,
    InvalidReply,
    InvalidSample,
    NotConnected,
    Retries,
    RouterClient,
    TimedOut,
    agentic,
)
from tests.support.scripted_worker import (
    CLOSE,
    HANG,
    RESET,
    ScriptedWorker,
    chunk,
    chunked_head,
    head,
    reply,
    script,
)
from tests.support.session_apis import case
from tests.support.session_trial import simulated_sessions
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import PATIENCE, until

AT_ONCE = Retries(attempts=3, first_delay=0.0, longest_delay=0.0)
STREAM = [("Content-Type", "text/event-stream")]
META = {"id": "r", "prompt_tokens": 1, "finish_reason": {"type": "stop"}}
ANSWER = {"text": "ab", "output_ids": [4, 5], "meta_info": META}
GOOD = reply(json.dumps(ANSWER).encode())
PAUSED = {"error": {"type": "unavailable", "message": "held too long", "request_id": "mr-1"}}
BUSY = reply(json.dumps(PAUSED).encode(), 503, [("Retry-After", "1")])
UNREACHABLE = {"error": {"type": "upstream_unreachable", "message": "all gone", "request_id": "mr-1"}}
Asked = Callable[[RouterClient], Awaitable[Any]]


@pytest.fixture
async def server(stage: Stage) -> ScriptedWorker:
    return await stage.worker()


@contextlib.asynccontextmanager
async def connected(server: ScriptedWorker, **options: Any) -> AsyncIterator[RouterClient]:
    async with RouterClient(server.url, **{"retries": AT_ONCE, "timeout": PATIENCE, **options}) as client:
        yield client


def event(**fields: Any) -> bytes:
    return chunk(b"data: " + json.dumps({**ANSWER, **fields}).encode() + b"\n\n")


DONE = chunk(b"data: [DONE]\n\n")


async def texts(client: RouterClient) -> list[str]:
    return [each.text async for each in client.generate_stream("a")]


# Asked again


@pytest.mark.parametrize("again", [BUSY, reply(json.dumps(UNREACHABLE).encode(), 502)], ids=["503", "502"])
async def test_what_the_router_could_not_begin_is_asked_again(server: ScriptedWorker, again: bytes) -> None:
    async with connected(server) as client:
        server.next(script(again), script(again)).always(script(GOOD))
        assert (await client.generate("a")).text == "ab"
        assert [json.loads(each.body) for each in server.requests] == [{"text": "a"}] * 3
        server.next(script(again)).always(script(chunked_head(STREAM), event(), DONE, b"0\r\n\r\n"))
        assert await texts(client) == ["ab"]


async def test_asking_again_has_an_end(server: ScriptedWorker) -> None:
    server.always(script(BUSY))
    async with connected(server) as client:
        with pytest.raises(ErrorReply, match="held too long") as caught:
            await client.generate("a")
    assert (caught.value.type, caught.value.retryable) == ("unavailable", True)
    assert len(server.requests) == 1 + AT_ONCE.attempts


async def test_a_router_that_is_not_there_yet_is_waited_for(server: ScriptedWorker, caplog: Any) -> None:
    server.refuse()
    server.always(script(GOOD))
    persistent = Retries(attempts=10**6, first_delay=0.001, longest_delay=0.001)
    async with connected(server, retries=persistent) as client, under_way(client.generate("a")) as asking:
        with caplog.at_level(logging.WARNING, "miles_router.client"):
            await until(lambda: "retrying" in caplog.text, "it was refused")
        await server.listen()
        assert (await asking).text == "ab"
    assert len(server.requests) == 1


async def test_a_router_that_never_comes_is_an_error_that_says_nothing_was_sent(server: ScriptedWorker) -> None:
    server.refuse()
    async with connected(server) as client:
        with pytest.raises(NotConnected, match="POST /generate") as caught:
            await client.generate("a")
    assert (caught.value.status, caught.value.retryable) == (0, True)


REPEATABLE: list[Asked] = [
    lambda client: client.workers(),
    lambda client: client.info(),
    lambda client: client.pause(),
    lambda client: client.continue_(),
    lambda client: client.abort("r"),
    lambda client: client.add_worker("http://a"),
    lambda client: client.sessions(),
    lambda client: client.session("s").records(),
    lambda client: client.session("s").collect(format="json"),
    lambda client: client.session("s").chat([]),
]
NOT_REPEATABLE: list[Asked] = [
    lambda client: client.generate("a"),
    texts,
    lambda client: client.create_session(),
    lambda client: client.update_weight_version("2"),
    lambda client: client.flush_cache(),
    lambda client: client.request("POST", "/v1/embeddings", {}),
]


async def test_what_may_be_carried_out_twice_is_asked_again_when_no_reply_began(server: ScriptedWorker) -> None:
    for ask in REPEATABLE:
        with case(ask):
            server.next(script(RESET), script(CLOSE))
            server.always(script(reply(b'{"workers": [], "sessions": [], "samples": []}')))
            async with connected(server) as client:
                await ask(client)
            first, *others = server.requests
            assert [(each.method, each.target, each.body) for each in others] == [
                (first.method, first.target, first.body)
            ] * 2
            assert {bytes(each.values("x-turn-id")[0]) if each.values("x-turn-id") else b"" for each in others} == {
                bytes(first.values("x-turn-id")[0]) if first.values("x-turn-id") else b""
            }
            server.requests.clear()


async def test_what_was_carried_out_or_has_begun_a_reply_is_not_asked_again(server: ScriptedWorker) -> None:
    unanswered = itertools.product(NOT_REPEATABLE, [script(RESET), script(CLOSE)])
    begun = itertools.product([*REPEATABLE, *NOT_REPEATABLE], [script(chunked_head(STREAM), event(), CLOSE)])
    for ask, behaviour in [*unanswered, *begun]:
        with case(ask):
            server.always(behaviour)
            async with connected(server) as client:
                with pytest.raises(ConnectionLost):
                    await ask(client)
            assert len(server.requests) == 1
            server.requests.clear()


async def test_a_workers_error_is_not_asked_again(server: ScriptedWorker) -> None:
    async with connected(server) as client:
        for number, status in enumerate((400, 404, 500, 502, 503), 1):
            server.next(script(reply(b'{"error": {"message": "no"}}', status, [("Retry-After", "0")])))
            with pytest.raises(ErrorReply, match="no") as caught:
                await client.workers()
            assert (caught.value.status, len(server.requests)) == (status, number)


# Time


@pytest.mark.parametrize("status", [None, 200, 503])
async def test_a_request_ends_with_its_connection_when_its_time_is_up(
    server: ScriptedWorker, status: int | None
) -> None:
    begun = b"" if status is None else head(status, [("Content-Length", "5")]) + b"12"
    server.always(script(begun, HANG))
    async with connected(server, timeout=0.2) as client:
        with pytest.raises(TimedOut):
            await client.workers()
        await until(lambda: not server.links, "the server sees it go")
    assert len(server.requests) <= 1, "what took too long is not asked for again"


async def test_control_needs_no_connection_of_the_generations_that_wait_for_it(server: ScriptedWorker) -> None:
    released = asyncio.Event()
    server.always(script(released, GOOD))
    server.standing["/continue_generation"] = script(reply())
    async with connected(server, max_connections=1) as client, under_way(client.generate("a")) as generating:
        await until(lambda: server.busy == 1, "it waits")
        await client.continue_()
        assert not generating.done()
        released.set()
        assert (await generating).text == "ab"


# Streams


async def test_a_stream_without_its_end_mark_is_lost_however_neatly_it_ends(server: ScriptedWorker) -> None:
    server.always(script(chunked_head(STREAM), event(), b"0\r\n\r\n"))
    async with connected(server) as client:
        with pytest.raises(ConnectionLost, match="DONE"):
            await texts(client)


async def test_a_refusal_inside_a_stream_is_an_error(server: ScriptedWorker) -> None:
    refusal = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}
    said = chunk(b"data: " + json.dumps(refusal).encode() + b"\n\n")
    server.always(script(chunked_head(STREAM), said, DONE, b"0\r\n\r\n"))
    async with connected(server) as client:
        with pytest.raises(ErrorReply, match="too long") as caught:
            await texts(client)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


@pytest.mark.parametrize("said", [b"data: {\n\n", b": a comment\n\n", b"data: 7\n\n"])
async def test_an_event_that_is_none_of_the_engines_is_an_error(server: ScriptedWorker, said: bytes) -> None:
    server.always(script(chunked_head(STREAM), chunk(said), DONE, b"0\r\n\r\n"))
    async with connected(server) as client:
        with pytest.raises(InvalidReply):
            await texts(client)


async def test_leaving_a_stream_breaks_its_connection(server: ScriptedWorker) -> None:
    server.always(script(chunked_head(STREAM), event(), HANG))
    async with connected(server) as client:
        async with contextlib.aclosing(client.generate_stream("a")) as stream:
            async for _ in stream:
                break
        await until(lambda: not server.links, "the server sees it go")


# The rest


ANSWERED: list[Asked] = [
    lambda client: client.generate("a"),
    lambda client: client.retrieve("a"),
    lambda client: client.workers(),
    lambda client: client.sessions(),
    lambda client: client.create_session(),
    lambda client: client.session("s").collect(),
    lambda client: client.routed_experts(rid="a"),
]


async def test_a_good_reply_of_another_form_is_an_invalid_reply(server: ScriptedWorker) -> None:
    async with connected(server) as client:
        for ask, body in itertools.product(ANSWERED, (b"not JSON", b"null", b"[]", b"{}", b'{"text": "a"}')):
            with case(ask, body):
                server.next(script(reply(body)))
                with pytest.raises(InvalidReply):
                    await ask(client)


async def test_a_closed_client_asks_nothing(server: ScriptedWorker) -> None:
    async with connected(server) as client:
        await client.request("GET", "/anything")
    unused = RouterClient(server.url)
    await unused.close()
    for each in (client, unused):
        with pytest.raises(RuntimeError, match="closed"):
            await each.generate("a")
    assert len(server.requests) == 1


async def test_keys_go_where_they_belong(server: ScriptedWorker) -> None:
    server.always(script(GOOD))
    async with connected(server, api_key="data", admin_api_key="admin") as client:
        await client.generate("a")
        await client.info()
        assert client.session("s").openai["api_key"] == "data"
    async with connected(server, api_key="data") as client:
        await client.info()
    async with connected(server) as client:
        await client.info()
        assert client.session("s").openai["api_key"]
    assert [each.values("authorization") for each in server.requests] == [
        [b"Bearer data"],
        [b"Bearer admin"],
        [b"Bearer data"],
        [],
    ]


# Sessions

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


@pytest.mark.parametrize(
    ("broken", "invariant"),
    [
        ({"loss_mask": [1, 1, 1]}, "versions_cover_the_loss"),
        ({"per_token": {"reward": [1.0]}}, "per_token_fits"),
        ({"per_token": {"reward": ["high", 0.0, 0.0]}}, "per_token_fits"),
        ({"per_token": [1.0]}, "complete"),
    ],
    ids=["loss", "length", "no numbers", "no object"],
)
async def test_a_sample_that_breaks_an_invariant_on_its_way_is_refused(
    server: ScriptedWorker, broken: dict[str, Any], invariant: str
) -> None:
    answer = {"samples": [{**ARRAYS, **FACTS, **broken}], "metadata": {}}
    server.always(script(reply(json.dumps(answer).encode())))
    async with connected(server) as client:
        with pytest.raises(InvalidSample) as caught:
            await client.session("made").collect(format="json")
    assert (caught.value.invariant, caught.value.status) == (invariant, 0)


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
