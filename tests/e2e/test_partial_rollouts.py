"""Generations that are carried on, where a simulated worker has no such case: a test writes down what a worker says."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.engine import PauseMode
from tests.support.fleet import post
from tests.support.resuming import (
    ABORT,
    DONE,
    END,
    EOS,
    EVENTS,
    IN_THE_QUEUE,
    a_stream,
    answer,
    engine,
    engine_and_router,
    event,
    events,
    generate,
    going_on,
    in_json,
    length,
    one_piece,
    pause,
    streamed,
    told,
)
from tests.support.scripted_worker import HANG, RESET, Behaviour, Step, chunk, reply, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import soon, until

# What is asked of the next worker


async def test_what_workers_assume_counts_where_the_request_is_silent(stage: Stage) -> None:
    one = await engine(stage)
    preferred = {"preferred_sampling_params": {"max_new_tokens": 3, "top_p": 0.5, "temperature": 1}}
    one.worker.model_info = script(reply(orjson.dumps(preferred)))
    router = await stage.router(one.worker, partial_rollout="resume")
    asking = lambda: generate(router, sampling_params={"temperature": 0})  # noqa: E731
    generating = await pause(router, one, one_piece(answer([5], ABORT)), asking)
    one.goes.append(told(answer([6, 7], length(2), prompt=3)))
    assert (await going_on(router, generating)).json()["meta_info"]["finish_reason"] == length(3)
    assert one.asked[1]["sampling_params"] == {"temperature": 0, "top_p": 0.5, "max_new_tokens": 2}


async def test_the_clients_key_goes_with_every_question(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    key = ("Authorization", "Bearer mine")
    generating = await pause(router, one, one_piece(answer([5], ABORT)), lambda: generate(router, key, text="Hi"))
    one.goes.append(told(answer([6], length(1), prompt=3)))
    await going_on(router, generating)
    assert one.keys == [b"Bearer mine"]


# The cut fell on the end


@pytest.mark.alone("each process asks engines for itself")
async def test_a_cut_at_the_token_that_the_model_ends_with_is_its_end(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    for _ in range(2):
        generating = await pause(router, one, one_piece(answer([5, EOS], ABORT)), lambda: generate(router))
        came = (await going_on(router, generating)).json()
        assert came["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        assert (came["output_ids"], came["text"]) == ([5, EOS], "x")
    assert len(one.asked) == 2, "there was nothing to carry on"
    assert one.probed == [EOS], "what is known is not asked again"


async def test_what_ends_a_grammar_does_not_end_the_model(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    one.goes.append(told(answer([6, 7], {"type": "stop", "matched": 7})))
    await generate(router, sampling_params={"regex": "xx"})
    generating = await pause(router, one, one_piece(answer([5, 7], ABORT)), lambda: generate(router))
    one.goes.append(told(answer([8], length(1), prompt=4)))
    assert (await going_on(router, generating)).json()["output_ids"] == [5, 7, 8]


@pytest.mark.parametrize(
    ("sampling", "ids", "text", "finish"),
    [
        ({"max_new_tokens": 2}, [5, 6], "xx", length(2)),
        ({"stop_token_ids": [6]}, [5, 6], "x", {"type": "stop", "matched": 6}),
        ({"stop_token_ids": [6], "no_stop_trim": True}, [5, 6], "xx", {"type": "stop", "matched": 6}),
        ({"stop_token_ids": [6], "max_new_tokens": 1}, [5], "x", length(1)),
        ({"stop_token_ids": [6], "ignore_eos": True, "max_new_tokens": 3}, [5, 6, 7], "xxx", length(3)),
    ],
)
async def test_tokens_that_came_with_the_end_and_behind_it_are_dropped(
    stage: Stage, sampling: dict[str, Any], ids: list[int], text: str, finish: object
) -> None:
    """An engine that guesses ahead adds several at once, and looks for an abort before it looks for an end."""
    one, router = await engine_and_router(stage, partial_rollout="resume")
    first = answer([5, 6, 7, 8], ABORT, output_token_logprobs=[[-1.0, token, None] for token in (5, 6, 7, 8)])
    generating = await pause(router, one, one_piece(first), lambda: generate(router, sampling_params=sampling))
    came = (await going_on(router, generating)).json()
    assert (came["output_ids"], came["text"], came["meta_info"]["finish_reason"]) == (ids, text, finish)
    assert [token for _, token, _ in came["meta_info"]["output_token_logprobs"]] == ids
    assert came["meta_info"]["completion_tokens"] == len(ids)
    assert len(one.asked) == 1


@pytest.mark.parametrize("aborted", [{"output_ids": [7], "finish": ABORT}, {"output_ids": [], "finish": IN_THE_QUEUE}])
async def test_a_question_that_a_pause_cuts_is_asked_again(stage: Stage, aborted: dict[str, Any]) -> None:
    """A stream that is stopped across the cut has not brought its experts: a worker is asked for them, as its adapter
    routes."""
    one, router = await engine_and_router(stage, partial_rollout="resume")
    cut = a_stream(answer([5], ABORT, routed_experts="AAAA"))
    wanted: dict[str, Any] = {"return_routed_experts": True, "sampling_params": {"stop": "xx"}, "lora_path": "one"}
    asking = lambda: generate(router, stream=True, **wanted)  # noqa: E731
    generating = await pause(router, one, cut, asking)
    one.goes.append(script(EVENTS, event(answer([6], prompt=3)), HANG))
    wrong = answer(aborted["output_ids"], aborted["finish"], prompt=4, routed_experts="CCCC")
    one.experts.extend([told(wrong), told(answer([], length(0), prompt=4, routed_experts="BBBB"))])
    said = events(await going_on(router, generating))[-1]
    assert (said["output_ids"], said["text"]) == ([5, 6], "")
    assert said["meta_info"]["finish_reason"] == {"type": "stop", "matched": "xx"}
    assert said["meta_info"]["routed_experts"] == "AAAABBBB"
    assert one.routed_by == ["one", "one"]


# What is not carried on

REFUSALS: dict[str, Behaviour] = {
    "too long": script(in_json(b'{"error": {"message": "too long"}}', 400)),
    "no JSON": script(in_json(b"{")),
    "no object": told(7),
    "no answer": script(in_json(b"[]")),
    "no ids": told({"text": "x", "meta_info": {}}),
    "no meta_info": told({"text": "x", "output_ids": [7]}),
    "other types": told({"text": 7, "output_ids": "7", "meta_info": []}),
    "other spans": told(answer([6], length(1), prompt=3, weight_versions=["1"])),
    "two answers": told(answer([6], length(1), prompt=3), answer([6], length(1), prompt=3)),
    "a prompt that was cut": told(answer([6], length(1), prompt=2)),
}
REFUSED_STREAMS: dict[str, Behaviour] = {
    "too long": script(in_json(b'{"error": {"message": "too long"}}', 400)),
    "too long, as an event": streamed({"error": {"message": "too long", "code": 400}}),
    "no stream": told(answer([6], length(1), prompt=3)),
    "no JSON": script(EVENTS, chunk(b"data: {\n\n"), *END),
    "no meta_info": streamed({"text": "x", "output_ids": [6]}),
    "no end": streamed(),
    "a prompt that was cut": streamed(answer([6], prompt=2), answer([6, 7], length(2), prompt=2)),
    "lost": script(EVENTS, RESET),
}


async def test_what_no_worker_carries_on_is_returned_as_the_engine_gave_it(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    for returned, (name, refusal) in enumerate(REFUSALS.items(), 1):
        with case(name):
            generating = await pause(router, one, one_piece(answer([5], ABORT)), lambda: generate(router))
            one.goes.append(refusal)
            assert (await going_on(router, generating)).json() == answer([5], ABORT)
            assert router.app.router.statistics["partial_rollouts"]() == {"resumed": 0, "returned": returned}


async def test_so_is_a_stream(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    for name, refusal in REFUSED_STREAMS.items():
        with case(name):
            cut = a_stream(answer([5]), answer([5, 6], ABORT))
            generating = await pause(router, one, cut, lambda: generate(router, stream=True))
            one.goes.append(refusal)
            assert events(await going_on(router, generating)) == [answer([5]), answer([5, 6], ABORT)]


@pytest.mark.parametrize("ending", [(RESET,), (event({"error": {}}), *END), END], ids=["lost", "error", "no end"])
@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_that_cannot_go_on_takes_nothing_back(
    stage: Stage, ending: tuple[Step, ...], incremental: bool
) -> None:
    one = await engine(stage)
    one.worker.standing["/server_info"] = script(reply(orjson.dumps({"incremental_streaming_output": incremental})))
    router = await stage.router(one.worker, partial_rollout="resume")
    generating = await pause(router, one, a_stream(answer([5], ABORT)), lambda: generate(router, stream=True))
    one.goes.append(script(EVENTS, event(answer([6], prompt=3)), *ending))
    said = events(await going_on(router, generating))
    assert [each["meta_info"]["finish_reason"] for each in said] == [None, ABORT]
    assert said[-1]["meta_info"]["completion_tokens"] == 2
    told_it = said if incremental else said[-1:]
    assert [token for each in told_it for token in each["output_ids"]] == [5, 6]
    assert "".join(each["text"] for each in told_it) == "xx"


# Streams that nobody cuts

PLAIN = [b"data: %b\n\n" % orjson.dumps(answer([5, 6][:n], None if n < 2 else length(2))) for n in (1, 2)]


async def test_a_stream_that_nobody_cuts_passes_byte_for_byte(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume", resume_on_worker_loss=True)
    for body, piece in itertools.product(
        [
            b"".join([*PLAIN, DONE]),
            b"".join([b": comment\n\n", *PLAIN, b"data:[DONE]\n\n"]),
            b"".join([*PLAIN, b"rest"]),
            b'data: {"error": {"message": "no"}}\n\n' + DONE,
            PLAIN[0] + DONE,
            b"data: {}\n\ndata: 7\n\n",
            b"",
            b"\n\n",
        ],
        [7, 10_000],
    ):
        with case(body, piece):
            pieces = [chunk(body[at : at + piece]) for at in range(0, len(body), piece)]
            one.goes.append(script(EVENTS, *pieces, chunk(b"")))
            assert (await soon(generate(router, stream=True))).body == body
            assert len(one.asked) == 1
            one.asked.clear()


# What is a cut


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_abort_in_a_pause_that_cuts_nothing_is_somebodys_wish(stage: Stage, mode: str) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    aborted = asyncio.Event()
    one.goes.append(one_piece(answer([5], ABORT))(aborted))
    generating = generate(router)
    await until(lambda: one.asked, "it runs")
    await post(router, "/pause_generation", mode=mode)
    aborted.set()  # by an update with `abort_all_requests`, say
    assert (await soon(generating)).json() == answer([5], ABORT)


@pytest.mark.alone("two processes may choose alike within a tenth of a second")
async def test_what_somebody_else_paused_is_carried_on_by_another_worker(stage: Stage) -> None:
    async with SimulatedWorker(token_latency_s=0.002) as one, SimulatedWorker(token_latency_s=0.002) as two:
        router = await stage.router(one.url, two.url, partial_rollout="resume", health_check_timeout=0.2)
        sampling = {"max_new_tokens": 60, "ignore_eos": True}
        generating = [generate(router, text="Hi", sampling_params=sampling, stream=stream) for stream in (True, False)]
        await until(lambda: one.running and two.running, "both run")
        one.engine.pause(PauseMode.ABORT)
        came = [await soon(each) for each in generating]
        answers = [events(came[0])[-1], came[1].json()]
        assert [each["meta_info"]["finish_reason"] for each in answers] == [length(60)] * 2
        assert sorted(each["meta_info"].get("resumed", 0) for each in answers) == [0, 1]
        assert router.pool.get(one.url).state.value == "paused"
