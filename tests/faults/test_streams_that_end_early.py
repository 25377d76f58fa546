"""A worker's stream that ends, in order, before its answer does: no client takes what it got for the whole answer, gets
what is internal, and nothing is learned from it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest

from miles_router.settings.config import MiddlewareSpec
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.http import CutReply, RawReply
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, chat_answer, chat_events, delta, event
from tests.support.scripted_worker import LAST_CHUNK, ScriptedWorker, chunk, chunked_head, reply, script
from tests.support.session_apis import FIELDS, RESPONSES, Api, case
from tests.support.session_trial import CHAT, SessionTrial, user
from tests.support.stage import Stage

APIS = [Api(path) for path in FIELDS]
apis = pytest.mark.parametrize("api", APIS, ids=str)
#: Bytes that are missing at the end of the last event.
MISSING = (1, 2, 3, 20, 60)
#: What stands in the engine's events alone.
INTERNAL = (b"sglext", b"input_ids", b"output_ids", b"token_ids", b'logprob"')
MARKS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")
#: What a stream ends with, where its answer has not ended.
ENDS = {"without [DONE]": (), "with [DONE]": (DONE,)}


def completion(text: str, token: int, finish: str | None = None, index: int = 0) -> bytes:
    ids = {"token_ids": [token], "prompt_token_ids": [1, 2, 3], "logprobs": {"token_logprobs": [-0.5]}}
    return event([{"index": index, "text": text, "finish_reason": finish, "matched_stop": None, **ids}])


def hello(api: Api) -> list[bytes]:
    """All events of a good stream but `[DONE]`."""
    if api.path == "/v1/completions":
        return [completion("Hel", 7), completion("lo", 8, "length")]
    return chat_events([7, 8], ["Hel", "lo"])[:-1]


def given(*events: bytes) -> Any:
    return script(chunked_head(EVENT_STREAM), *map(chunk, events), LAST_CHUNK)


async def nothing_is_held(trial: SessionTrial, session: str) -> None:
    found = await trial.read(session)
    assert (found["records"], found["metadata"]["in_flight"], found["metadata"]["untraced"]) == ([], 0, [])


def cut_streams(api: Api) -> list[Sequence[bytes]]:
    """The beginnings of a stream in front of its finish reason, that of no event among them."""
    events = hello(api)
    return [events[:count] for count in range(len(events) - 1 - (api.path != "/v1/completions"))]


@apis
@pytest.mark.parametrize("end", ENDS)
async def test_a_stream_that_ends_before_its_answer_is_broken_off(
    worker: ScriptedWorker, trial: SessionTrial, api: Api, end: str
) -> None:
    for begun in cut_streams(api):
        worker.next(given(*begun, *ENDS[end]))
        session = await trial.create()
        with pytest.raises(CutReply) as broken:
            await api.ask(trial, session, 8, stream=True)
        told = broken.value.reply.body
        assert b"without a finish reason" in told
        assert api.path != RESPONSES or b'"type":"response.failed"' in told, "as its clients know it"
        assert not any(mark in told for mark in (b"[DONE]", b"message_stop", b"response.completed"))
        await nothing_is_held(trial, session)


@apis
async def test_a_turn_whose_stream_ended_early_may_be_asked_again(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    worker.next(given(*hello(api)[:1], DONE), given(*hello(api), DONE))
    session = await trial.create()
    same = [("X-Turn-Id", "1")]
    said, length = FIELDS[api.path]
    body = {"model": "m", said: [user("Hi")] if said == "messages" else "Hi", length: 8, "stream": True}
    with pytest.raises(CutReply):
        await trial.ask("POST", f"/sessions/{session}{api.path}", body, same)
    again = await trial.ask("POST", f"/sessions/{session}{api.path}", body, same)
    assert again.status == 200
    assert len(await trial.records(session)) == 1


@apis
async def test_an_answer_whose_stream_lacks_its_last_event_is_whole(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    worker.next(given(*hello(api)))
    session = await trial.create()
    answer = await api.ask(trial, session, 2, stream=True)
    assert api.end(answer, stream=True) is not None
    assert any(mark in answer.body[-60:] for mark in (b"[DONE]", b"message_stop", b"response.incomplete"))
    assert len(await trial.records(session)) == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("end", ENDS)
async def test_a_choice_that_does_not_end_cuts_the_stream(
    worker: ScriptedWorker, trial: SessionTrial, path: str, end: str
) -> None:
    events = hello(Api(path))
    second = [completion("H", 9, index=1)] if path != CHAT else [event([delta("H", index=1)])]
    for begun in (events, [*events[:1], *second, *events[1:]]):
        worker.next(given(*begun, *ENDS[end]))
        session = await trial.create()
        with pytest.raises(CutReply):
            await Api(path).ask(trial, session, 8, stream=True, n=2)
        await nothing_is_held(trial, session)


@apis
async def test_an_error_that_the_engine_tells_is_the_end(worker: ScriptedWorker, trial: SessionTrial, api: Api) -> None:
    error = b"data: %b\n\n" % json.dumps({"error": {"message": "out of memory", "code": 500}}).encode()
    worker.next(given(*hello(api)[:1], error, DONE))
    session = await trial.create()
    answer = await api.ask(trial, session, 8, stream=True)
    assert b"out of memory" in answer.body
    assert (await trial.read(session))["records"] == []


async def test_official_clients_raise(worker: ScriptedWorker, trial: SessionTrial) -> None:
    worker.always(given(*hello(Api(CHAT))[:2], DONE))
    session = await trial.create()
    url = f"{trial.router.url}/sessions/{session}"
    hi: Any = [{"role": "user", "content": "Hi"}]
    async with trial.agent(session) as client:
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="m", messages=hi, stream=True):
                pass
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client_of_messages:
        with pytest.raises(anthropic.APIError):
            async with client_of_messages.messages.stream(model="m", max_tokens=8, messages=hi) as stream:
                await stream.get_final_message()


# Inside an event


async def is_broken_off(trial: SessionTrial, api: Api) -> None:
    """A turn whose client learns that its stream has broken off, and gets nothing internal."""
    session = await trial.create()
    with pytest.raises(CutReply) as broken:
        await api.ask(trial, session, 8, stream=True)
    told = broken.value.reply.body
    assert b"error" in told
    assert not any(mark in told for mark in (*INTERNAL, *MARKS)), told
    await nothing_is_held(trial, session)


@apis
async def test_a_stream_that_ends_inside_its_last_event_is_broken_off(
    worker: ScriptedWorker, trial: SessionTrial, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is learned of its engine."""
    for last, missing in itertools.product(("the ids", "the finish reason"), MISSING):
        with case(last, missing):
            *begun, cut = hello(api)[: None if last == "the ids" else -1]
            worker.next(given(*begun, cut[:-missing]))
            await is_broken_off(trial, api)
    assert "streams_are_buffered" not in [each.message for each in caplog.records]
    worker.next(given(*hello(api), DONE))
    session = await trial.create()
    assert (await api.ask(trial, session, 8, stream=True)).status == 200
    assert len(await trial.records(session)) == 1


@pytest.mark.parametrize("api", [Api(CHAT), Api("/v1/messages"), Api("/v1/responses")], ids=str)
async def test_a_stream_that_ends_in_front_of_its_ids_is_broken_off(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    worker.next(given(*hello(api)[:-1])).always(given(*hello(api), DONE))
    await is_broken_off(trial, api)
    session = await trial.create()
    assert (await api.ask(trial, session, 8, stream=True)).status == 200, "as a stream"
    assert len(await trial.records(session)) == 1


@apis
async def test_a_last_line_without_its_empty_line_ends_the_stream(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    for end in (DONE[:-1], DONE[:-2], b"\n", DONE + b"\n"):
        worker.next(given(*hello(api), end))
        session = await trial.create()
        answer = await api.ask(trial, session, 2, stream=True)
        assert any(mark in answer.body[-60:] for mark in (b"[DONE]\n\n", b"message_stop", b"response.incomplete"))
        assert len(await trial.records(session)) == 1


@apis
async def test_what_comes_behind_the_end_is_not_given_to_the_client(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    worker.next(given(*hello(api), DONE)).next(given(*hello(api), DONE, event([], sglext={"output_ids": [[7]]})[:-2]))
    session, other = await trial.create(), await trial.create()
    good = await api.ask(trial, session, 2, stream=True)
    longer = await api.ask(trial, other, 2, stream=True)
    assert longer.body.count(b"data:") == good.body.count(b"data:")
    assert not any(mark in longer.body for mark in INTERNAL)


# Whole answers


@apis
async def test_a_whole_answer_without_its_choices_is_an_error(
    worker: ScriptedWorker, trial: SessionTrial, api: Api
) -> None:
    for odd in ("none", "null", "missing", "no finish", "half"):
        with case(odd):
            answer = chat_answer([7, 8])
            if odd == "missing":
                del answer["choices"]
            else:
                (choice,) = answer["choices"]
                unfinished = {**choice, "finish_reason": None}
                answer["choices"] = {"none": [], "null": None, "no finish": [unfinished], "half": [{"index": 0}]}[odd]
            worker.next(script(reply(json.dumps(answer).encode(), headers=JSON)))
            session = await trial.create()
            refused = await api.ask(trial, session, 8)
            assert refused.status == 502, refused.body
            await nothing_is_held(trial, session)


async def test_a_whole_answer_with_fewer_choices_than_asked_is_an_error(
    worker: ScriptedWorker, trial: SessionTrial
) -> None:
    worker.next(script(reply(json.dumps(chat_answer([7, 8])).encode(), headers=JSON)))
    session = await trial.create()
    refused = await Api(CHAT).ask(trial, session, 8, n=2)
    assert (refused.status, "1 of 2 choices" in refused.json()["error"]["message"]) == (502, True)
    await nothing_is_held(trial, session)


# `/generate`, and what passes


def generated(finish: str | None) -> bytes:
    meta = {
        "id": "r1",
        "finish_reason": finish and {"type": finish, "length": 1},
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
        "weight_version": "1",
    }
    return b"data: " + json.dumps({"text": "a", "output_ids": [7], "meta_info": meta}).encode() + b"\n\n"


async def ask_generate(stage: Stage, worker: ScriptedWorker, *, traced: bool) -> RawReply:
    layers = {"middlewares": (MiddlewareSpec(CACHE),), "hf_checkpoint": checkpoint()} if traced else {}
    router = await stage.router(worker, **layers)
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}, "stream": True}).encode()
    return await router.ask("POST", "/generate", JSON, body)


@pytest.mark.parametrize("traced", [False, True], ids=["untraced", "traced"])
async def test_a_stream_of_generate_without_its_end_is_broken_off(
    stage: Stage, worker: ScriptedWorker, traced: bool
) -> None:
    for events, end in itertools.product(([], [generated(None)], [generated(None)] * 3), [(), *([(DONE,)] * traced)]):
        worker.next(given(*events, *end))
        with pytest.raises(CutReply):
            await ask_generate(stage, worker, traced=traced)
    for missing in MISSING if traced else ():
        with case(missing):
            worker.next(given(generated(None), generated("length")[:-missing]))
            with pytest.raises(CutReply) as broken:
                await ask_generate(stage, worker, traced=True)
            assert b"output_token_logprobs" not in broken.value.reply.body


def untraced(api: Api) -> list[bytes]:
    """All events of a good stream as the engine itself writes it, but `[DONE]`."""
    if api.path == "/v1/messages":
        kinds = ["message_start", "content_block_delta", "message_delta", "message_stop"]
    elif api.path == RESPONSES:
        kinds = ["response.created", "response.output_text.delta", "response.completed"]
    else:
        return hello(api)
    return [
        b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, "said": '"type":"error"'}).encode())
        for kind in kinds
    ]


async def ask_untraced(stage: Stage, worker: ScriptedWorker, api: Api) -> RawReply:
    router = await stage.router(worker)
    return await router.ask("POST", api.path, JSON, json.dumps({"model": "m", "stream": True}).encode())


@apis
@pytest.mark.parametrize("end", ENDS)
async def test_an_untraced_stream_without_its_end_is_broken_off(
    stage: Stage, worker: ScriptedWorker, api: Api, end: str
) -> None:
    *begun, last = untraced(api)
    for count in range(len(begun)):
        worker.next(given(*begun[:count], *ENDS[end]))
        with pytest.raises(CutReply):
            await ask_untraced(stage, worker, api)
    worker.next(given(*begun, last[:-9]))
    with pytest.raises(CutReply):
        await ask_untraced(stage, worker, api)


@apis
async def test_an_untraced_stream_passes_as_it_comes(stage: Stage, worker: ScriptedWorker, api: Api) -> None:
    whole = b"".join([*untraced(api), DONE])
    for size in (len(whole), 7, 1):
        worker.next(given(*[whole[start : start + size] for start in range(0, len(whole), size)]))
        assert (await ask_untraced(stage, worker, api)).body == whole


@apis
async def test_an_untraced_error_is_the_end(stage: Stage, worker: ScriptedWorker, api: Api) -> None:
    error = b'data: {"type": "error", "error": {"message": "out of memory"}}\n\n'
    worker.next(given(*untraced(api)[:1], error, DONE))
    assert b"out of memory" in (await ask_untraced(stage, worker, api)).body
