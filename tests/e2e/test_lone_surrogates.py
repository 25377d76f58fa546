"""Halves of surrogate pairs, which JavaScript makes of cut texts: each is read as U+FFFD, the same in every turn."""

from __future__ import annotations

import json
from typing import Any

from tests.support.bare_calls import DATED, NAMES, a_trial
from tests.support.cache_trial import simulated_trial
from tests.support.scripted_chat import able, answering, chat_reply, failed_stream
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import MESSAGES, PLAIN, TALKS, Api, Said, case
from tests.support.session_trial import CHAT, IM_END, SessionTrial, prompt_of, qwen3, simulated_sessions, user
from tests.support.stage import Stage

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
WHEN = [user(f"When? {MARK}")]
SPOILED = DATED.replace("UTC", r"\ud83d")
IDS = [*qwen3().encode(SPOILED), IM_END]
FAILED = script(reply(b"Internal Server Error", status=500, headers=[("Content-Type", "text/plain; charset=utf-8")]))


def with_raw(body: Any, raw: bytes) -> bytes:
    """A body with these bytes in place of each mark."""
    return json.dumps(body).encode().replace(MARK.encode(), raw)


async def turn(trial: SessionTrial, session: str, api: Api, items: list[Any], raw: bytes = HALF, **more: Any) -> Said:
    body = api.body(items, **{"tools": api.tools(*NAMES), **more})
    stream = bool(body["stream"])
    return api.read(await api.post(trial, session, with_raw(body, raw)), stream=stream)


def behind(api: Api, said: Said) -> list[Any]:
    """The question, an answer with a call, and its result; a mark stands in both of the client's texts."""
    return [*WHEN, *said.items, *api.results((said.calls[0][0], f"now {MARK}"))]


async def test_a_lone_surrogate_is_read_as_a_replacement(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api in PLAIN:
            for raw, read in SPELLINGS.items():
                with case(api, raw):
                    session, text = await trial.create(), f"So: {MARK}."
                    fields: Any = {"metadata": {MARK: MARK}, "tools": []} if api in TALKS else {}
                    body = api.body([user(text)] if api in TALKS else text, 4, **fields)
                    assert (await api.post(trial, session, with_raw(body, raw))).status == 200
                    assert f"So: {read}." in await prompt_of(trial, session)


async def test_turns_with_lone_surrogates_are_one_segment(stage: Stage) -> None:
    steps = [{"calls": [{"name": "get_date", "arguments": {"zone": "UTC"}}]}, "Fine."]
    async with simulated_sessions(stage, script=steps) as trial:
        for api in TALKS:
            session = await trial.create()
            await turn(trial, session, api, behind(api, await turn(trial, session, api, WHEN)))
            assert await trial.reasons(session) == [None, None], api
            prompt = await prompt_of(trial, session)
            assert "When? \ufffd" in prompt
            assert "now \ufffd" in prompt
            # In the arguments of a call that no session holds
            session = await trial.create()
            call = api.called(("c1", "get_date", api.arguments(f'{{"zone": "{MARK}"}}')))
            raw = HALF if api.path == MESSAGES else HALF.replace(b"\\", b"\\\\")
            await turn(trial, session, api, [user("When?"), *call, *api.results(("c1", "now"))], raw)
            assert '{"zone": "\ufffd"}' in await prompt_of(trial, session), api


async def test_a_sampled_escape_comes_back_as_the_held_call(stage: Stage) -> None:
    """From an engine whose parser shows arguments as they were sampled; and from SGLang, which answers 500 where its
    parser makes half of a surrogate pair of an escape."""
    function = {"name": "get_date", "arguments": r'{"zone": "\ud83d"}'}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    worker = able(await stage.worker()).always(answering([9], "Now."))
    trial = await a_trial(stage, worker)
    raw = script(chat_reply(IDS, SPOILED, finish_reason="stop"))
    for api in TALKS:
        for fails in (False, True):
            with case(api, fails):
                shown = script(chat_reply(IDS, message=message, finish_reason="tool_calls"))
                worker.next(*((FAILED, script(chat_reply([1], "x")), raw) if fails else (shown,)))
                session, before = await trial.create(), len(worker.requests)
                said = await turn(trial, session, api, WHEN)
                assert [name for _, name, _ in said.calls] == ["get_date"]
                (sample,) = await trial.samples(session)
                assert sample["tokens"] == [1, 2, 3, *IDS]
                if fails:
                    assert "\ufffd" in json.dumps(said.items, ensure_ascii=False)
                    again = json.loads(worker.requests[before + 2].body)
                    assert (again["tool_choice"], again["input_ids"]) == ("none", [1, 2, 3])
                await turn(trial, session, api, behind(api, said), stream=True)
                assert await trial.reasons(session) == [None, None]


async def test_a_stream_that_failed_at_an_escape_may_be_repeated(stage: Stage) -> None:
    worker = able(await stage.worker())
    trial = await a_trial(stage, worker)
    for api in TALKS:
        session = await trial.create()
        worker.next(failed_stream("surrogates not allowed"))
        body = api.body(WHEN, stream=True, tools=api.tools(*NAMES))
        await api.post(trial, session, body)
        assert await trial.records(session) == []
        worker.next(FAILED, script(chat_reply([1], "x")), script(chat_reply(IDS, SPOILED, finish_reason="stop")))
        said = api.read(await api.post(trial, session, body), stream=True)
        assert said.calls[0][1] == "get_date", api
        (sample,) = await trial.samples(session)
        assert sample["tokens"] == [1, 2, 3, *IDS]
    worker.always(FAILED)
    answer = await Api(CHAT).post(trial, await trial.create(), Api(CHAT).body(WHEN))
    assert (answer.status, answer.body) == (500, b"Internal Server Error"), "it fails for another reason"


async def test_texts_with_lone_surrogates_are_recorded_and_found(stage: Stage) -> None:
    async with simulated_trial(stage) as trial:
        for raw in SPELLINGS:
            with case(raw):
                asked = {"text": f"one {MARK}", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
                first = await trial.post("/generate", with_raw(asked, raw))
                again = {**asked, "text": asked["text"] + first.json()["text"]}
                assert (await trial.post("/generate", with_raw(again, raw))).status == 200
                (one,), (two,) = [each.generations for each in trial.log[-2:]]
                assert two.input_ids == [*one.input_ids, *one.output_ids]
                found = await trial.post("/retrieve_from_text", with_raw({"text": again["text"]}, raw))
                assert found.json()["tokens"] == two.input_ids
