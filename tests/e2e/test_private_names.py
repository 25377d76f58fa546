"""An engine aborts all generations whose names begin alike: none that a client chooses begins another's."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from miles_router.tasks import cancelled, spawn
from miles_router.testing import SimulatedWorker
from tests.support.events import events_of
from tests.support.fleet import post
from tests.support.http import CutReply
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import BOTH
from tests.support.session_trial import CHAT, JSON, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

HI = [user("Hi")]
ENDLESS_CHAT: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30_000}
PATHS = (CHAT, "/v1/completions", "/generate")
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 30_000}
HEX = "0123456789abcdef"
SHORT: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 3}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
#: Ways to spell a body that names a generation.
SPELLED = {
    "plain": '"rid": "%s"',
    "escaped": '"r\\u0069d": "%s"',
    "escaped value": '"rid": "\\u003%s"',
    "twice": '"rid": "one-of-mine", "rid": "%s"',
    "nested before": '"session_params": {"rid": null}, "rid": "%s"',
}


async def runs(worker: SimulatedWorker, count: int) -> None:
    await until(lambda: worker.running == count, f"{count} generations run, not {worker.running}")


def engine_names(worker: SimulatedWorker) -> list[str]:
    return [each.rid for exchange in worker.log for each in exchange.generations]


async def nothing_ends(worker: SimulatedWorker, left: Sequence[asyncio.Task[Any]]) -> None:
    """Of what others have under way, whatever an engine does later for the streams that have ended."""
    worker.engine.abort_ended_streams()
    worker.engine.abort_left_streams()
    running = list(worker.engine.running.values())
    assert [each.aborted for each in running] == [False] * len(left)
    assert not [each for each in left if each.done()]
    for each in left:
        await cancelled(each)


async def leave(router: Any, path: str, body: bytes, worker: SimulatedWorker, running: int) -> None:
    """A client that asks for a generation and goes while the engine samples it."""
    task = spawn(router.ask("POST", path, JSON, body), name="a client that leaves")
    await runs(worker, running + 1)
    await cancelled(task)
    await runs(worker, running)


@both
async def test_an_agent_that_leaves_ends_no_turn_of_others(stage: Stage, stream: bool) -> None:
    async with simulated_sessions(stage, token_latency_s=0.005) as trial:
        mine, others = await trial.create(), [await trial.create() for _ in range(6)]
        turns = [spawn(trial.turn(each, HI, **ENDLESS_CHAT), name=each) for each in others]
        turns.append(spawn(post(trial.router, CHAT, messages=HI, model="m", **ENDLESS_CHAT), name="untraced"))
        await runs(trial.worker, 7)
        asked = {"messages": HI, "prompt": "Hi", "text": "Hi", "model": "m", **ENDLESS_CHAT, "stream": stream}
        for rid in HEX:
            path = PATHS[HEX.index(rid) % len(PATHS)]
            body = json.dumps({**asked, "sampling_params": ENDLESS, "rid": rid}).encode()
            await leave(trial.router, f"/sessions/{mine}{path}", body, trial.worker, 7)
        await nothing_ends(trial.worker, turns)


async def test_no_engine_sees_an_agent_s_name_and_its_answer_has_it(stage: Stage) -> None:
    """Short names, those of a health check, those like the router's own, and none."""
    async with simulated_sessions(stage) as trial:
        wanted = {"messages": HI, "prompt": "Hi", "text": "Hi", "model": "m", "max_tokens": 3, "sampling_params": SHORT}
        own = ("0", "deadbeef", "HEALTH_CHECK", "a" * 32, "")
        for name, stream, path in itertools.product(own, BOTH, PATHS):
            if path == "/generate" and len(name) == 32:
                continue  # there it passes as it came
            for prefix in [f"/sessions/{await trial.create()}", *([""] if name == "" else [])]:
                answer = await trial.ask("POST", f"{prefix}{path}", {**wanted, "rid": name, "stream": stream})
                assert answer.status == 200, answer.body
                assert name in own[3:] or f'"id":"{name}"'.encode() in answer.body.replace(b'": "', b'":"'), answer.body
        names = engine_names(trial.worker)
        assert not {*names} & {*own}
        assert len({*names}) == len(names)
        assert {len(each) for each in names} == {32}


@both
async def test_short_names_of_generate_end_nobody_else(stage: Stage, stream: bool) -> None:
    async with SimulatedWorker(token_latency_s=0.005) as worker:
        router = await stage.router(worker.url)
        left = [spawn(post(router, "/generate", text="Hi", sampling_params=ENDLESS), name="left") for _ in range(6)]
        await runs(worker, 6)
        wanted = json.dumps({"text": "Hi", "sampling_params": ENDLESS, "stream": stream})
        for number, spelled in enumerate([*SPELLED.values()] * 2):
            body = f"{wanted[:-1]}, {spelled % number}}}".encode()
            await leave(router, "/generate", body, worker, 6)
        await nothing_ends(worker, left)


async def test_a_client_is_shown_its_own_names(stage: Stage) -> None:
    cases: list[Any] = [
        ("Hi", "a", ["a"]),
        (["Hi", "Ho"], "a", ["a_0", "a_1"]),
        (["Hi", "Ho"], ["a", "b2"], ["a", "b2"]),
    ]
    async with SimulatedWorker() as worker:
        router = await stage.router(worker.url)
        for (prompt, rid, shown), stream in itertools.product(cases, BOTH):
            answer = await post(router, "/generate", text=prompt, sampling_params=SHORT, rid=rid, stream=stream)
            assert answer.status == 200, answer.body
            said = events_of(answer.body) if stream else answer.json()
            told = said if isinstance(said, list) else [said]
            assert {each["meta_info"]["id"] for each in told} == {*shown}
            assert not {*engine_names(worker)} & {*shown}
        answers = await asyncio.gather(
            *(post(router, "/generate", text="Hi", sampling_params=SHORT, rid="ab") for _ in range(3))
        )
        assert [each.json()["meta_info"]["id"] for each in answers] == ["ab"] * 3, (
            "used again at once, it is no duplicate"
        )
        body = b'{ "rid":"rollout-7",  "text":"Hi", "sampling_params":{"max_new_tokens":3} }'
        assert (await router.ask("POST", "/generate", JSON, body)).status == 200
        assert worker.log.at("/generate")[-1].body == body, "a long name passes as it came"


@pytest.mark.parametrize("rid", ["a", "task-1"])
async def test_an_abort_by_a_client_s_name_ends_its_own_alone(stage: Stage, rid: str) -> None:
    async with simulated_sessions(stage, token_latency_s=0.005) as trial:
        session, other = await trial.create(), await trial.create()
        left = spawn(trial.turn(other, HI, rid=f"{rid}0", **ENDLESS_CHAT), name="left")
        async with under_way(trial.turn(session, HI, rid=rid, **ENDLESS_CHAT)) as turn:
            await runs(trial.worker, 2)
            assert (await trial.ask("POST", "/abort_request", {"rid": rid})).status == 200
            assert (await turn).json()["choices"][0]["finish_reason"] == "abort"
        await nothing_ends(trial.worker, [left])


async def test_a_cut_stream_of_a_renamed_generation_is_broken_off(stage: Stage) -> None:
    events = b'data: {"meta_info": {"id": "x"}}\n\n'
    worker = (await stage.worker()).always(script(reply(events, 200, [("Content-Type", "text/event-stream")])))
    router = await stage.router(worker)
    body = json.dumps({"text": "Hi", "sampling_params": SHORT, "rid": "a", "stream": True}).encode()
    with pytest.raises(CutReply):
        await router.ask("POST", "/generate", JSON, body)
