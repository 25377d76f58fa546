"""Halves of surrogate pairs, which JavaScript makes of cut texts: each is read as U+FFFD, the same in every turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.bare_calls import DATED, MESSAGES, RESPONSES, a_trial, lossy, request, seen_calls
from tests.support.cache_trial import simulated_trial
from tests.support.scripted_chat import able, chat_reply, failed_stream
from tests.support.scripted_worker import reply, script
from tests.support.session_trial import CHAT, IM_END, SessionTrial, qwen3, simulated_sessions, user
from tests.support.stage import Stage

COMPLETIONS = "/v1/completions"
HALF = rb"\ud83d"
#: What a body has in a text, and what is read of it.
SPELLINGS = {
    HALF: "\ufffd",
    rb"\uDE00 b": "\ufffd b",
    rb"\ud83d\ud83d\ude00": "\ufffd\U0001f600",
    rb"\ude00\ud83d": "\ufffd\ufffd",
    rb"\ud83d\\ude00": "\ufffd\\ude00",
    rb"\\ud83d\\\ud83d": "\\ud83d\\\ufffd",
    b"\xed\xa0\xbd": "\ufffd",
    b"a\xffb": "a\ufffdb",
    b"\xf0\x9f\x98": "\ufffd",
}
MARK = "@@"


def with_raw(body: Any, raw: bytes) -> bytes:
    """A body with these bytes in place of each mark."""
    return json.dumps(body).encode().replace(MARK.encode(), raw)


async def posted(trial: SessionTrial, session: str, path: str, body: bytes) -> Any:
    reply = await trial.ask("POST", f"/sessions/{session}{path}", body)
    assert reply.status == 200, reply.body
    return reply.json()


def body_of(path: str, items: list[Any], **more: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"model": "m", "prompt": items[0]["content"], "max_tokens": 4, **more}
    return {**request(path, items, stream=False), **more}


async def prompt_of(trial: SessionTrial, session: str) -> str:
    """The prompt of the only sample's last turn, as text."""
    (sample,) = await trial.samples(session)
    tokens = [token for token, own in zip(sample["tokens"], sample["loss_mask"], strict=True) if not own]
    return qwen3().decode(tokens)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
@pytest.mark.parametrize("raw", SPELLINGS, ids=repr)
async def test_a_lone_surrogate_is_read_as_a_replacement(stage: Stage, path: str, raw: bytes) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        more: Any = {} if path == COMPLETIONS else {"metadata": {MARK: MARK}}
        await posted(trial, session, path, with_raw(body_of(path, [user(f"So: {MARK}.")], **more), raw))
        assert f"So: {SPELLINGS[raw]}." in await prompt_of(trial, session)


def history(path: str, answer: Any) -> list[Any]:
    """A question and its answer as they come back, with a result; a mark stands in both of the client's texts."""
    asked, found = user(f"When? {MARK}"), f"now {MARK}"
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return [asked, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": found}]
    if path == RESPONSES:
        output = {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": found}
        return [asked, *answer["output"], output]
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": found}
    return [asked, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_turns_with_lone_surrogates_are_one_segment(stage: Stage, path: str) -> None:
    script = [{"calls": [{"name": "get_date", "arguments": {"zone": "UTC"}}]}, {"text": "Fine."}]
    async with simulated_sessions(stage, script=script) as trial:
        session = await trial.create()
        answer = await posted(trial, session, path, with_raw(body_of(path, [user(f"When? {MARK}")]), HALF))
        await posted(trial, session, path, with_raw(body_of(path, history(path, answer)), HALF))
        assert await trial.reasons(session) == [None, None]
        prompt = await prompt_of(trial, session)
        assert "When? \ufffd" in prompt
        assert "now \ufffd" in prompt


def spoiled(path: str, zone: str) -> list[Any]:
    """A history of no session's, whose call has this in its arguments."""
    arguments = f'{{"zone": "{zone}"}}'
    if path == CHAT:
        call = {"id": "c1", "type": "function", "function": {"name": "get_date", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "c1", "content": "now"}
        return [user("When?"), {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    if path == RESPONSES:
        item = {"type": "function_call", "call_id": "c1", "name": "get_date", "arguments": arguments}
        return [user("When?"), item, {"type": "function_call_output", "call_id": "c1", "output": "now"}]
    block = {"type": "tool_use", "id": "c1", "name": "get_date", "input": {"zone": zone}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "now"}
    return [user("When?"), {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_escapes_within_arguments_reach_the_engine_replaced(stage: Stage, path: str) -> None:
    async with simulated_sessions(stage, script=[{"text": "Fine."}, {"text": "Good."}]) as trial:
        session = await trial.create()
        items = spoiled(path, MARK)
        raw = HALF if path == MESSAGES else HALF.replace(b"\\", b"\\\\")
        await posted(trial, session, path, with_raw(body_of(path, items), raw))
        assert '{"zone": "\ufffd"}' in await prompt_of(trial, session)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_sampled_escape_comes_back_as_the_held_call(stage: Stage, path: str) -> None:
    """From an engine whose parser shows arguments as they were sampled."""
    function = {"name": "get_date", "arguments": r'{"zone": "\ud83d"}'}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    ids = [*qwen3().encode(DATED.replace("UTC", r"\ud83d")), IM_END]
    worker = able(await stage.worker()).always(lossy("Now.", root=False))
    worker.next(script(chat_reply(ids, message=message, finish_reason="tool_calls")))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    answer = await posted(trial, session, path, with_raw(body_of(path, [user(f"When? {MARK}")]), HALF))
    again = with_raw({**body_of(path, history(path, answer)), "stream": True}, HALF)
    reply = await trial.ask("POST", f"/sessions/{session}{path}", again)
    assert reply.status == 200, reply.body
    assert await trial.reasons(session) == [None, None]
    assert [each["parent"] for each in await trial.records(session)] == [None, 0]


@pytest.mark.parametrize("raw", SPELLINGS, ids=repr)
async def test_texts_with_lone_surrogates_are_recorded_and_found(stage: Stage, raw: bytes) -> None:
    async with simulated_trial(stage) as trial:
        asked = {"text": f"one {MARK}", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        reply = await trial.post("/generate", with_raw(asked, raw))
        assert reply.status == 200, reply.body
        again = {**asked, "text": asked["text"] + reply.json()["text"]}
        assert (await trial.post("/generate", with_raw(again, raw))).status == 200
        (first,), (second,) = [each.generations for each in trial.door]
        assert second.input_ids == [*first.input_ids, *first.output_ids]
        found = await trial.post("/retrieve_from_text", with_raw({"text": again["text"]}, raw))
        assert found.status == 200, found.body
        assert found.json()["tokens"] == second.input_ids


FAILED = script(reply(b"Internal Server Error", status=500, headers=[("Content-Type", "text/plain; charset=utf-8")]))
SPOILED = DATED.replace("UTC", r"\ud83d")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_sampled_escape_that_ends_the_engines_answer_is_recorded(stage: Stage, path: str) -> None:
    """SGLang answers 500 where its parser makes half of a surrogate pair of an escape."""
    ids = [*qwen3().encode(SPOILED), IM_END]
    worker = able(await stage.worker()).always(lossy("Now.", root=False))
    worker.next(FAILED).next(script(chat_reply([1], "x"))).next(script(chat_reply(ids, SPOILED, finish_reason="stop")))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    answer = await posted(trial, session, path, json.dumps(body_of(path, [user("When?")])).encode())
    assert "get_date" in json.dumps(answer)
    assert "\ufffd" in json.dumps(answer, ensure_ascii=False)
    (sample,) = await trial.samples(session)
    assert sample["tokens"] == [1, 2, 3, *ids]
    items = json.loads(json.dumps(history(path, answer)).replace(f" {MARK}", ""))
    again = await trial.ask("POST", f"/sessions/{session}{path}", {**body_of(path, items), "stream": True})
    assert again.status == 200, again.body
    assert await trial.reasons(session) == [None, None]
    raw = json.loads(worker.requests[2].body)
    assert (raw["tool_choice"], raw["input_ids"]) == ("none", [1, 2, 3])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_stream_that_failed_at_an_escape_may_be_repeated(stage: Stage, path: str) -> None:
    ids = [*qwen3().encode(SPOILED), IM_END]
    worker = able(await stage.worker()).always(failed_stream("surrogates not allowed"))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    body = {**body_of(path, [user("When?")]), "stream": True}
    await trial.ask("POST", f"/sessions/{session}{path}", body)
    assert await trial.records(session) == []
    worker.next(FAILED).next(script(chat_reply([1], "x"))).next(script(chat_reply(ids, SPOILED, finish_reason="stop")))
    reply_ = await trial.ask("POST", f"/sessions/{session}{path}", body)
    assert seen_calls(path, reply_)[0][1] == "get_date"
    (sample,) = await trial.samples(session)
    assert sample["tokens"] == [1, 2, 3, *ids]


async def test_an_engine_that_fails_for_another_reason_is_heard(stage: Stage) -> None:
    worker = able(await stage.worker()).always(FAILED)
    trial = await a_trial(stage, worker)
    session = await trial.create()
    answer = await trial.ask("POST", f"/sessions/{session}{CHAT}", body_of(CHAT, [user("When?")]))
    assert (answer.status, answer.body) == (500, b"Internal Server Error")
    assert await trial.records(session) == []
