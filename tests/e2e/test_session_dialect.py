"""The header-addressed dialect: clients that name their session in headers, finalize it, and read trajectories. These
are the sessions of `/sessions`, and either kind of client sees its own contract. `X-Session-Id` alone may
be an agent's own name: that is affinity."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, NotFoundError

from middleware_hub.openai_session.agent_apis import AGENT_APIS
from miles_router.testing import SimulatedWorker
from tests.support.http import Pairs, RawReply
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import ScriptedWorker, script
from tests.support.session_apis import RESPONSES, case
from tests.support.session_trial import (
    CHAT,
    SessionTrial,
    exactly,
    message_of,
    qwen3,
    said,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage

HI: list[Any] = [user("Hi")]


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as made:
        yield made


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker()).always(script(chat_reply([7, 8])))


@pytest.fixture
async def scripted(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    return await session_trial(stage, worker)


async def turn(trial: SessionTrial, headers: dict[str, str], messages: Any = HI, **fields: Any) -> RawReply:
    body = {"model": "m", "messages": messages, "max_tokens": 8, **fields}
    return await trial.ask("POST", CHAT, body, list(headers.items()))


async def good(reply: RawReply) -> Any:
    assert reply.status == 200, reply.body
    return reply.json()


async def post(trial: SessionTrial, path: str, body: Any = None, headers: Pairs = ()) -> Any:
    return await good(await trial.ask("POST", path, body if body is not None else {}, headers))


async def stats(trial: SessionTrial) -> Any:
    return await good(await trial.ask("GET", "/trajectory/stats"))


def named(session: str, instance: str | None = None, turn_id: str | None = None) -> dict[str, str]:
    headers = {"X-Session-Id": session, "X-Instance-Id": instance, "X-Turn-Id": turn_id}
    return {name: value for name, value in headers.items() if value is not None}


# Turns


async def test_every_api_is_spoken_to_a_session_that_a_header_names(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        headers, url = {"X-Session-Id": "s"}, trial.router.url
        fields: Any = {"model": "m", "max_tokens": 4}
        question: Any = [user("Hi")]
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, default_headers=headers) as client:
            said: Any = await client.messages.create(messages=question, **fields)
            going_on = [*question, {"role": "assistant", "content": said.content}, user("Go on")]
            counted = await client.messages.count_tokens(model="m", messages=going_on)
            async with client.messages.stream(messages=going_on, **fields) as stream:
                usage = (await stream.get_final_message()).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers=headers) as openai:
            first = await openai.responses.create(model="m", input="Hello", max_output_tokens=4)
            await openai.responses.create(model="m", input="Go on", previous_response_id=first.id, max_output_tokens=4)
            assert (await openai.responses.retrieve(first.id)).output_text == first.output_text
            await openai.responses.delete(first.id)
            with pytest.raises(NotFoundError):
                await openai.responses.retrieve(first.id)
            await openai.completions.create(prompt="Once", **fields)
        records = await trial.records("s")
        assert [(each["path"], each["parent"]) for each in records] == [
            ("/v1/messages", None),
            ("/v1/messages", 0),
            ("/v1/responses", None),
            ("/v1/responses", 2),
            ("/v1/completions", None),
        ]
        assert {CHAT, *(each["path"] for each in records)} == {api.path for api in AGENT_APIS}
        assert len(trial.worker.log.generations) == 5, "nobody else was asked for tokens, or for a response"


# Finalized


async def test_a_finalized_session_takes_no_turns_and_can_be_read(trial: SessionTrial) -> None:
    first = await good(await turn(trial, named("s", "task-7")))
    await turn(trial, named("s"), [*HI, message_of(first), user("Go on")])
    await turn(trial, named("s"), [*HI, said("I take that back."), user("Go on")])
    told = await post(trial, "/session/finalize", {"session_id": "s", "label": "42", "reward": 0.5})
    assert told == {
        "success": True,
        "session_id": "s",
        "trajectory_id": "s",
        "instance_id": "task-7",
        "num_steps": 3,
        "num_turns": 3,
        "num_segments": 2,
        "history_rewritten": True,
    }
    for path in (CHAT, f"/sessions/s{CHAT}"):
        refused = await trial.ask("POST", path, {"model": "m", "messages": HI}, list(named("s").items()))
        assert (refused.status, refused.error_type) == (409, "conflict")
    read = await post(trial, "/trajectory/read", {"session_id": "s"})
    assert (read["success"], read["mode"], read["drained"]) == (True, "trajectory", False)
    segments = read["data"]
    assert [(each["trajectory_id"], each["instance_id"]) for each in segments] == [("s", "task-7")] * 2
    assert [(each["segment_index"], each["segment_count"]) for each in segments] == [(0, 2), (1, 2)]
    assert [(each["reward"], each["label"]) for each in segments] == [(0.5, "42")] * 2
    samples = await trial.samples("s", reward=0.5, label="42")
    assert [{name: each[name] for name in sample} for each, sample in zip(segments, samples, strict=True)] == samples
    exactly(segments[0], *(each.generation for each in trial.log[:2]))


async def test_a_last_step_is_one_segment_of_a_rewritten_session(trial: SessionTrial) -> None:
    await turn(trial, named("s"))
    await turn(trial, named("s"), [*HI, said("I take that back."), user("Go on")])
    for bad in ({"token_build_mode": "whole"}, {"token_build_mode": 1}, {"mask": "none"}, {"side_calls": 1}):
        refused = await trial.ask("POST", "/session/finalize", {"session_id": "s", **bad})
        assert (refused.status, refused.error_type) == (400, "invalid_request")
    await post(trial, "/session/finalize", {"session_id": "s", "token_build_mode": "last_step"})
    (segment,) = (await post(trial, "/trajectory/read", {"session_id": "s"}))["data"]
    last = trial.log[-1].generation
    assert segment["tokens"] == [*last.input_ids, *last.output_ids]
    assert segment["response_length"] == len(last.output_ids)


async def test_a_session_of_one_weight_version_is_not_gone_on_with_by_another(stage: Stage) -> None:
    async with simulated_sessions(stage, options={"one_weight_version": True}) as trial:
        first = await good(await turn(trial, named("s", "task-7")))
        await post(trial, "/v1/rollout/pause")
        await post(trial, "/v1/rollout/resume", {"version": 2})
        refused = await turn(trial, named("s"), [*HI, message_of(first), user("Go on")])
        assert (refused.status, refused.error_type) == (502, "upstream_error")
        detail = refused.json()["detail"]
        assert (detail["error"], detail["previous_versions"], detail["new_versions"]) == (
            "trajectory_version_changed",
            ["1"],
            ["2"],
        )
        assert (detail["session_id"], detail["instance_id"]) == ("s", "task-7")
        assert len(trial.log) == 1, "before it is generated"
        assert (await turn(trial, named("new"))).status == 200
        (sample,) = await trial.samples("s")
        exactly(sample, trial.log[0].generation)


# Read


async def finalized(trial: SessionTrial, *sessions: tuple[str, str | None]) -> None:
    for session, instance in sessions:
        assert (await turn(trial, named(session, instance))).status == 200
        await post(trial, "/session/finalize", {"session_id": session})


async def read(trial: SessionTrial, **want: Any) -> list[str]:
    return [each["trajectory_id"] for each in (await post(trial, "/trajectory/read", want))["data"]]


@pytest.mark.alone("it reads trajectories without naming a session")
async def test_all_finalized_sessions_are_read_in_groups(scripted: SessionTrial) -> None:
    await finalized(scripted, ("a1", "a"), ("b1", "b"), ("a2", "a"), ("c", None))
    await turn(scripted, named("unfinished", "a"))
    assert await read(scripted) == ["a1", "a2", "b1", "c"]
    assert await read(scripted, instance_id="a") == ["a1", "a2"]
    assert await read(scripted, max_groups=2) == ["a1", "a2", "b1"]
    assert await read(scripted, instance_id="nobody") == []
    told = await stats(scripted)
    assert (told["trajectories"], told["groups"], told["active_sessions"]) == (4, 3, 1)


@pytest.mark.alone("it reads trajectories without naming a session")
async def test_what_is_drained_is_forgotten_and_nothing_else(scripted: SessionTrial) -> None:
    await finalized(scripted, ("a1", "a"), ("b1", "b"))
    await turn(scripted, named("unfinished", "a"))
    answer = await post(scripted, "/trajectory/read", {"max_groups": 1, "drain": True})
    assert ([each["trajectory_id"] for each in answer["data"]], answer["drained"]) == (["a1"], True)
    assert answer["meta_info"]["trajectories"] == 1
    assert (await scripted.ask("GET", "/sessions/a1")).status == 404
    assert await read(scripted, drain=True) == ["b1"]
    assert (await post(scripted, "/trajectory/read"))["success"] is False
    assert len(await scripted.records("unfinished")) == 1
    assert (await stats(scripted))["active_sessions"] == 1


# Rollouts


async def test_a_worker_that_does_not_pause_is_told(scripted: SessionTrial, worker: ScriptedWorker) -> None:
    worker.always(script(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"))
    answer = await scripted.ask("POST", "/v1/rollout/pause", {})
    assert answer.status == 502
    assert worker.url in answer.json()["workers"]


async def test_rollouts_are_paused_with_the_key_of_administration(stage: Stage, worker: ScriptedWorker) -> None:
    trial = await session_trial(stage, worker, api_key="data", admin_api_key="admin")
    data, admin = ("Authorization", "Bearer data"), ("X-Api-Key", "admin")
    for headers in ([], [data], [("Authorization", "Bearer wrong"), data]):
        answer = await trial.ask("POST", "/v1/rollout/pause", {}, headers)
        assert (answer.status, answer.error_type) == (401, "unauthorized"), headers
    assert worker.requests == []
    for headers in ([data, admin], [admin], [("Authorization", "Bearer admin")]):
        assert (await trial.ask("POST", "/v1/rollout/pause", {}, headers)).status == 200
    assert not any(b"admin" in request.head or b"Bearer" in request.head for request in worker.requests)
    for path in ("/session/finalize", "/session/discard", "/trajectory/read"):
        assert (await trial.ask("POST", path, {})).status == 401
        assert (await trial.ask("POST", path, {}, [data])).status in (200, 400)


# Odd requests, and what a restart leaves


async def test_a_session_begun_anew_says_that_its_history_was_not_recorded(trial: SessionTrial) -> None:
    """As after a restart, which forgets sessions."""
    before = message_of(await good(await turn(trial, named("s"))))
    await trial.ask("DELETE", "/sessions/s")
    after = message_of(await good(await turn(trial, named("s"), [*HI, before, user("Go on")])))
    await good(await turn(trial, named("s"), [*HI, before, user("Go on"), after, user("And?")]))
    assert [record["unrecorded_history"] for record in await trial.records("s")] == [True, False]
    (sample,) = await trial.samples("s")
    assert sample["metadata"]["unrecorded_history"] is True
    assert trial.statistics()["unrecorded_history"] == 1
    await good(await turn(trial, named("other")))
    assert [each["metadata"]["unrecorded_history"] for each in await trial.samples("other")] == [False]


async def test_which_headers_name_a_session(scripted: SessionTrial, worker: ScriptedWorker) -> None:
    cases: list[tuple[dict[str, str], bool]] = [
        ({"X-Session-Id": "s"}, True),
        ({"X-SMG-Routing-Key": "s", "X-Turn-Id": "1"}, True),
        ({"X-SMG-Routing-Key": "s", "X-Instance-Id": "i"}, True),
        ({"X-Session-Id": "s", "X-SMG-Routing-Key": "elsewhere", "X-Turn-Id": "1"}, True),
        *((headers, False) for headers in ({"X-SMG-Routing-Key": "s"}, {"X-Instance-Id": "i"}, {"X-Turn-Id": "1"}, {})),
        ({"X-Session-Id": ""}, False),
    ]
    for headers, made in cases:
        with case(headers):
            assert (await turn(scripted, headers)).status == 200
            sessions = [each["session_id"] for each in (await scripted.ask("GET", "/sessions")).json()["sessions"]]
            assert sessions == (["s"] if made else [])
            assert ("return_meta_info" in json.loads(worker.requests[-1].body)) is made
            await scripted.ask("DELETE", "/sessions/s")


@pytest.mark.alone("it reads trajectories without naming a session")
async def test_odd_fields_are_refused_and_change_nothing(trial: SessionTrial) -> None:
    await good(await turn(trial, named("s", "task-7")))
    await trial.create("empty")
    before = await stats(trial)
    names: list[Any] = [["i"], "i" * 257]
    odd: dict[str, list[Any]] = {
        "/session/discard": [{}, {"session_id": ["s"]}],
        "/session/finalize": [
            *({}, [], b"{", {"session_id": "empty"}, {"session_id": "s", "label": "x" * (1 << 20)}),
            *({"session_id": "s", "instance_id": each} for each in names),
        ],
        "/trajectory/read": [
            *({"max_groups": 0}, {"session_id": 7}, [], {"instance_id": {}}, {"drain": "false"}, {"segment_view": 1}),
        ],
        "/v1/rollout/pause": [{"mode": []}, {"mode": "gently"}],
        "/v1/rollout/resume": [{"version": [2]}],
    }
    for path, body in ((path, body) for path, bodies in odd.items() for body in bodies):
        answer = await trial.ask("POST", path, body)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), (path, body)
    missing = await trial.ask("POST", "/session/finalize", {"session_id": "nobody"})
    assert (missing.status, missing.error_type) == (404, "not_found")
    assert await stats(trial) == before
    assert trial.worker.engine.paused is None
    assert (await post(trial, "/session/finalize", {"trajectory_id": "s", "instance_id": "i"}))["instance_id"] == "i"
    assert len((await post(trial, "/trajectory/read", {"trajectory_id": "s"}))["data"]) == 1


NAMES = ("chan42/thread-7", "a b", "née", "x" * 129, "..", ".", "{uuid}", "1,2", "agent#3", '"quoted"')
SAID, SHORT = [user("Hi")], {"max_new_tokens": 4}
TWO: dict[str, Any] = {"options": {"max_sessions": 2}, "token_latency_s": 0.0}


@pytest.fixture
async def workers() -> AsyncIterator[list[SimulatedWorker]]:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1", token_latency_s=0.0) as one,
        SimulatedWorker(tokenizer=qwen3(), weight_version="1", token_latency_s=0.0) as other,
    ):
        yield [one, other]


async def ask(trial: SessionTrial, name: str, path: str = CHAT, *headers: tuple[str, str], **fields: Any) -> int:
    """One turn under a header; gives its status."""
    given, most = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    body = {"model": "m", given: SAID, most: 4, **fields}
    return (await trial.ask("POST", path, body, [("X-Session-Id", name), *headers])).status


async def held(trial: SessionTrial) -> set[str]:
    return {each["session_id"] for each in (await trial.ask("GET", "/sessions")).json()["sessions"]}


async def test_a_name_that_no_session_can_have_is_affinity(stage: Stage, workers: list[SimulatedWorker]) -> None:
    trial = await session_trial(stage, *workers)
    for name, (path, stream) in itertools.product(NAMES, ((CHAT, True), (CHAT, False), ("/generate", True))):
        homes = set()
        for _ in range(3):
            for worker in workers:
                worker.log.clear()
            body = {"model": "m", "messages": SAID, "max_tokens": 4, "text": "Hi", "sampling_params": SHORT}
            answer = await trial.ask("POST", path, {**body, "stream": stream}, [("X-Session-Id", name)])
            assert answer.status == 200, name
            homes.add(next(worker.url for worker in workers if worker.log.at(path)))
        assert len(homes) == 1, name
    assert await held(trial) == set()


async def test_beside_the_headers_of_a_trainer_such_a_name_is_refused(stage: Stage) -> None:
    async with simulated_sessions(stage, **TWO) as trial:
        for header in ("X-Turn-Id", "X-Instance-Id"):
            assert await ask(trial, "chan42/thread-7", CHAT, (header, "1")) == 400
        assert await held(trial) == set()


@pytest.mark.alone("what is in memory is bounded in each process")
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_bare_headers_never_block_a_session_that_is_made(
    stage: Stage, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with simulated_sessions(stage, **TWO) as trial:
        for name in ("old", "new"):
            assert await ask(trial, name, path) == 200
        assert await ask(trial, "old", path) == 200
        with caplog.at_level(logging.WARNING):
            await trial.create("mine")
        assert await held(trial) == {"old", "mine"}, "the least recently used one is forgotten"
        assert any(record.message == "header_session_evicted" for record in caplog.records)
        assert await ask(trial, "next", path) == 200
        await trial.create("too")
        assert await held(trial) == {"mine", "too"}
        assert trial.statistics()["evicted"] == 3
        assert (await trial.ask("POST", "/sessions")).status == 503, "what was made is never forgotten for another"
        assert await ask(trial, "late", path) == 503
        assert await held(trial) == {"mine", "too"}


@pytest.mark.alone("what is in memory is bounded in each process")
async def test_what_a_trainer_named_or_finalized_is_not_forgotten(stage: Stage) -> None:
    async with simulated_sessions(stage, **TWO) as trial:
        assert await ask(trial, "turn", CHAT, ("X-Turn-Id", "1")) == 200
        assert await ask(trial, "done") == 200
        assert (await trial.ask("POST", "/session/finalize", {"session_id": "done"})).status == 200
        assert (await trial.ask("POST", "/sessions")).status == 503
        assert await held(trial) == {"turn", "done"}
