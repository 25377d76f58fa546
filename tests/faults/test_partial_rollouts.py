"""Generations that are cut, and engines that contradict themselves, write otherwise, compress, or were started anew."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson
import pytest

from tests.support.fleet import post
from tests.support.http import CutReply
from tests.support.resuming import (
    ABORT,
    DONE,
    END,
    EVENTS,
    JSON,
    PROMPT,
    Engine,
    a_stream,
    answer,
    engine,
    engine_and_router,
    event,
    events,
    generate,
    going_on,
    held,
    length,
    one_piece,
    pause,
    streamed,
    streams,
    told,
)
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import RESET, chunk, chunked_head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import soon


def resumed(router: RunningRouter) -> tuple[int, int]:
    """How many generations were carried on, and how many returned."""
    numbers: Any = router.app.router.statistics["partial_rollouts"]()
    return numbers["resumed"], numbers["returned"]


def unread(router: RunningRouter) -> dict[Any, int]:
    return dict(router.app.router.metrics.unread_replies)


def entries(*ids: int) -> list[list[Any]]:
    return [[-1.0, token, None] for token in ids]


def spans(*places: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in places]


# Requests however they are written


@pytest.mark.parametrize("name", ["input_ids", "input_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_batch_is_carried_on_whatever_its_prompts_are_called(stage: Stage, name: str, stream: bool) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    parts = [answer([token], ABORT) | ({"index": index} if stream else {}) for index, token in enumerate((5, 6))]
    cut = streams(*parts) if stream else one_piece(*parts)
    body: dict[str, Any] = {"input_ids": None, name: [[1, 2], [3, 4]], "stream": stream}
    generating = await pause(router, one, cut, lambda: generate(router, **body))
    for _ in range(2):
        last = answer([7], length(1), prompt=3)
        one.goes.append(streamed(last) if stream else told(last))
    came = await going_on(router, generating)
    answers = sorted(events(came), key=lambda each: each["index"]) if stream else came.json()
    assert [each["output_ids"] for each in answers] == [[5, 7], [6, 7]]
    assert sorted(each["input_ids"] for each in one.asked[1:]) == [[1, 2, 5], [3, 4, 6]]
    assert not any("input_tokens" in each for each in one.asked[1:])


async def test_the_answer_to_a_request_that_cannot_be_read_is_counted(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    one.goes.append(told(answer([5], ABORT)))
    assert (await generate(router, input_ids=None, input_embeds=[[0.5]])).json() == answer([5], ABORT)
    assert unread(router) == {("partial_rollouts", "unknown_request"): 1}
    one.goes.append(script(reply(b'{"error": {}}', 400, JSON)))
    assert (await generate(router, input_ids="no")).status == 400
    assert unread(router) == {("partial_rollouts", "unknown_request"): 1}, "what the engine refuses is none"


# Engines that contradict themselves

FIRST: dict[str, Any] = {
    "output_token_logprobs": entries(5, 6),
    "weight_version": "1",
    "weight_versions": spans(("1", 0, 2)),
}
NEXT: dict[str, Any] = {
    "output_token_logprobs": entries(7),
    "weight_version": "2",
    "weight_versions": spans(("2", 0, 1)),
}
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "logprobs of other tokens": {"output_token_logprobs": entries(8)},
    "a logprob too few": {"output_token_logprobs": []},
    "no logprobs": {"output_token_logprobs": None},
    "more tokens than ids": {"completion_tokens": 2},
    "versions with a gap": {"weight_versions": spans(("1", 1, 1))},
    "versions that end elsewhere": {"weight_versions": spans(("1", 0, 2))},
    "no versions": {"weight_version": None, "weight_versions": None},
    "rows that are no text": {"routed_experts": 7},
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_together_is_not_joined_and_the_cut_answer_is_returned(
    stage: Stage, contradiction: dict[str, Any], stream: bool
) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    first = answer([5, 6], ABORT, **FIRST)
    cut = a_stream(first) if stream else one_piece(first)
    asking = lambda: generate(router, stream=stream, return_logprob=True)  # noqa: E731
    generating = await pause(router, one, cut, asking)
    last = answer([7], length(1), prompt=4, **{**NEXT, **contradiction})
    one.goes.append(streamed(last) if stream else told(last))
    came = await going_on(router, generating)
    assert (events(came) if stream else [came.json()]) == [first]
    assert resumed(router) == (0, 1)


@pytest.mark.parametrize("contradiction", [name for name in CONTRADICTIONS if name != "no versions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_that_contradicts_itself_comes_as_the_engine_gave_it(
    stage: Stage, contradiction: str, stream: bool
) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    body = orjson.dumps(answer([7], ABORT, **{**NEXT, **CONTRADICTIONS[contradiction]}))
    paused = asyncio.Event()
    whole = chunk(b"data: %b\n\n" % body)
    one.goes.append(script(EVENTS, paused, whole, *END) if stream else script(paused, reply(body, headers=JSON)))
    generating = generate(router, stream=stream, return_logprob=True)
    await until_asked(one)
    await router.ask("POST", "/pause_generation", JSON, b"{}")
    paused.set()
    came = await soon(generating)
    assert came.body == (b"data: %b\n\n%b" % (body, DONE) if stream else body)
    assert (resumed(router), held(router)) == ((0, 1), 0)


async def until_asked(one: Engine) -> None:
    while not one.asked:  # noqa: ASYNC110 - a worker's visit announces no event
        await asyncio.sleep(0)


async def test_a_stream_that_contradicts_itself_in_the_middle_is_counted_and_passes(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    said = [answer([5]), answer([6, 7]), answer([6, 7, 8], ABORT)]
    generating = generate(router, stream=True)
    paused = asyncio.Event()
    one.goes.append(script(EVENTS, *map(event, said[:2]), paused, event(said[2]), *END))
    await until_asked(one)
    await router.ask("POST", "/pause_generation", JSON, b"{}")
    paused.set()
    assert events(await soon(generating)) == said
    assert unread(router) == {("partial_rollouts", "tokens_taken_back"): 1}


async def test_joined_stream_that_contradicts_itself_ends_with_what_the_client_has(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    asking = lambda: generate(router, stream=True, return_logprob=True)  # noqa: E731
    generating = await pause(router, one, a_stream(answer([5, 6], ABORT, **FIRST)), asking)
    running = {"output_token_logprobs": entries(7), "weight_version": "2"}
    wrong = answer([7, 8], length(2), prompt=4, **{**NEXT, "output_token_logprobs": entries(7, 9)})
    one.goes.append(streamed(answer([7], prompt=4, **running), wrong))
    *_, last = events(await going_on(router, generating))
    assert (last["output_ids"], last["meta_info"]["finish_reason"]) == ([5, 6, 7], ABORT)
    assert [token for _, token, _ in last["meta_info"]["output_token_logprobs"]] == [5, 6, 7]
    assert last["meta_info"]["weight_versions"] == spans(("1", 0, 2), ("2", 2, 3))
    assert resumed(router) == (0, 1)


@pytest.mark.parametrize("middle", [answer([6, 7]), {"error": {"message": "no"}}], ids=["contradiction", "error"])
async def test_a_stream_that_could_not_be_read_and_is_lost_never_looks_complete(
    stage: Stage, middle: dict[str, Any]
) -> None:
    one, router = await engine_and_router(stage, resume_on_worker_loss=True)
    one.goes.append(script(EVENTS, event(answer([5])), event(middle), RESET))
    with pytest.raises(CutReply):
        await generate(router, stream=True)
    assert len(one.asked) == 1


# What engines answer to questions


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/detokenize", {"text": [7]}),
        ("/v1/detokenize", {"text": "x"}),
        ("/v1/tokenize", {"tokens": ["1", "2"]}),
        ("/v1/tokenize", {"tokens": None}),
    ],
)
async def test_an_engine_that_answers_a_question_with_something_else_leaves_the_cut_answer(
    stage: Stage, path: str, said: object
) -> None:
    one = await engine(stage)
    one.worker.standing[path] = script(reply(orjson.dumps(said), headers=JSON))
    router = await stage.router(one.worker, partial_rollout="resume")
    asking = lambda: generate(router, text="Hi", sampling_params={"stop": "never"})  # noqa: E731
    generating = await pause(router, one, one_piece(answer([5], ABORT)), asking)
    assert (await going_on(router, generating)).json() == answer([5], ABORT)
    assert resumed(router) == (0, 1)


@pytest.mark.parametrize("rows", ["QQ=", "QUFB"])
async def test_rows_that_do_not_fit_leave_the_cut_answer(stage: Stage, rows: str) -> None:
    """Tokens behind the end are dropped, and their rows with them."""
    one, router = await engine_and_router(stage, partial_rollout="resume")
    first = answer([5, 6, 7, 8], ABORT, routed_experts=rows)
    sampling = {"stop_token_ids": [6]}
    asking = lambda: generate(router, return_routed_experts=True, sampling_params=sampling)  # noqa: E731
    generating = await pause(router, one, one_piece(first), asking)
    assert (await going_on(router, generating)).json() == first
    assert resumed(router) == (0, 1)


async def test_an_error_behind_the_cut_of_another_generation_does_not_swallow_that_one(stage: Stage) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    first = {**answer([5], ABORT), "index": 0}
    cut = streams(first, {"error": {"message": "the other one"}})
    generating = await pause(router, one, cut, lambda: generate(router, input_ids=[PROMPT, PROMPT], stream=True))
    one.goes.append(streamed(answer([6], length(1), prompt=3)))
    said = events(await going_on(router, generating))
    assert said[0] == {"error": {"message": "the other one"}}
    assert (said[1]["index"], said[1]["output_ids"]) == (0, [5, 6])


# Compressed replies

ZIPPED_JSON = [*JSON, ("Content-Encoding", "gzip")]
ZIPPED_EVENTS = chunked_head([("Content-Type", "text/event-stream"), ("Content-Encoding", "gzip")])


def zipped(stream: bool, said: object) -> tuple[bytes, bytes]:
    """A compressed reply, and its body."""
    data = orjson.dumps(said)
    body = gzip.compress(b"data: %b\n\n%b" % (data, DONE) if stream else data)
    return (ZIPPED_EVENTS + chunk(body) + chunk(b"") if stream else reply(body, headers=ZIPPED_JSON)), body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_reply_passes_as_it_came_and_is_counted(stage: Stage, stream: bool) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    written, body = zipped(stream, answer([5], length(1)))
    one.goes.append(script(written))
    came = await generate(router, ("Accept-Encoding", "gzip"), stream=stream)
    assert (came.body, came.value("content-encoding")) == (body, b"gzip")
    assert unread(router) == {("partial_rollouts", "content_encoding"): 1}
    assert one.encodings == [], "the worker is asked for what can be read"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_reply_carries_nothing_on(stage: Stage, stream: bool) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    cut = a_stream(answer([5], ABORT)) if stream else one_piece(answer([5], ABORT))
    generating = await pause(router, one, cut, lambda: generate(router, stream=stream))
    one.goes.append(script(zipped(stream, answer([6], length(1), prompt=3))[0]))
    came = await going_on(router, generating)
    assert (events(came) if stream else [came.json()]) == [answer([5], ABORT)]
    assert resumed(router) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_the_other_kind_passes_and_is_counted(stage: Stage, stream: bool) -> None:
    one, router = await engine_and_router(stage, partial_rollout="resume")
    said = answer([5], ABORT)
    one.goes.append(told(said) if stream else streamed(said))
    came = await generate(router, stream=stream)
    assert (came.json() if stream else events(came)[0]) == said
    assert unread(router) == {("partial_rollouts", "content_type"): 1}


# Facts belong to a process


def prefers(one: Engine, **sampling: Any) -> None:
    one.worker.model_info = script(reply(orjson.dumps({"preferred_sampling_params": sampling})))


async def cut_and_continued(router: RunningRouter, one: Engine, **body: Any) -> dict[str, Any]:
    """What the worker is asked when a generation that a pause has cut goes on."""
    generating = await pause(router, one, one_piece(answer([5], ABORT)), lambda: generate(router, **body))
    one.goes.append(told(answer([6], length(1), prompt=3)))
    await going_on(router, generating)
    return one.asked[-1]


async def test_what_a_worker_assumed_before_it_was_started_anew_counts_no_more(stage: Stage) -> None:
    one = await engine(stage)
    prefers(one, max_new_tokens=3)
    router = await stage.router(one.worker, partial_rollout="resume")
    assert (await cut_and_continued(router, one))["sampling_params"] == {"max_new_tokens": 2}
    assert one.probed == [5]
    one.worker.kill()
    prefers(one, max_new_tokens=9)
    await one.worker.listen()
    assert (await cut_and_continued(router, one))["sampling_params"] == {"max_new_tokens": 8}
    assert one.probed == [5, 5], "and another process may have another model"


@pytest.mark.parametrize("incremental", [False, True])
async def test_facts_are_those_of_the_worker_that_began_and_of_no_other(stage: Stage, incremental: bool) -> None:
    """No event has shown how the first one streams; the other one, which streams otherwise, has nothing to do."""
    first, other = await engine(stage), await engine(stage)
    for one, style in ((first, incremental), (other, not incremental)):
        one.worker.standing["/server_info"] = script(reply(orjson.dumps({"incremental_streaming_output": style})))
        prefers(one, top_p=0.5 if one is first else 0.25)
        one.goes.extend([streamed(answer([6], prompt=3), answer([6, 7], length(2), prompt=3))])
    first.goes.clear()
    router = await stage.router(first.worker, partial_rollout="resume")
    cut = a_stream(answer([5], ABORT))
    generating = await pause(router, first, cut, lambda: generate(router, stream=True))
    assert (await post(router, f"/add_worker?url={other.worker.url}")).status == 200
    first.goes.extend(other.goes)
    said = events(await going_on(router, generating))
    assert [each["output_ids"] for each in said] == ([[5, 6], [7]] if incremental else [[5, 6], [5, 6, 7]])
    (asked,) = first.asked[1:] + other.asked
    assert asked["sampling_params"]["top_p"] == 0.5
    assert (first.probed, other.probed) == ([5], [])
