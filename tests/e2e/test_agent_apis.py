"""What holds for a turn in every API that agents speak, whole and streamed: it is exact, one segment, answered once,
recorded before its agent learns of the end, of the main line where it goes on with that, and told in the words that
clients of that API look for."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from middleware_hub.openai_session.agent_apis import AGENT_APIS
from tests.support.bare_calls import NAMES
from tests.support.http import request, whole_or_cut
from tests.support.scripted_chat import (
    JSON,
    able,
    chat_events,
    chat_reply,
    cut_answer,
    failed_stream,
    streamed,
)
from tests.support.scripted_worker import reply, script
from tests.support.session_apis import BOTH, COMPLETIONS, MESSAGES, PLAIN, RESPONSES, TALKS, Api, Said, case
from tests.support.session_trial import CHAT, SessionTrial, exactly, session_trial, simulated_sessions, user
from tests.support.stage import Stage

SCRIPT: Any = [
    {
        "reasoning": "Two at once.",
        "text": "Let me see.",
        "calls": [
            {"name": "get_date", "arguments": {"zone": "UTC", "b": {"c": "}"}}},
            {"name": "get_time", "arguments": {"zone": "Köln", "n": 1.5}},
        ],
    },
    {"calls": [{"name": "get_time", "arguments": {"zone": "é", "a": [1]}}]},
    {"reasoning": "That is all.", "text": "It is noon."},
]
#: How an answer ends, by API: in order, with calls, and by its length.
ENDS = {
    CHAT: ("stop", "tool_calls", "length"),
    COMPLETIONS: ("stop", "", "length"),
    MESSAGES: ("end_turn", "tool_use", "max_tokens"),
    RESPONSES: ("completed", "completed", "max_output_tokens"),
}
WHEN = user("When?")
#: What is shown in a stream at its end alone.
END_OF_STREAM = {
    CHAT: b'"finish_reason":"length"',
    MESSAGES: b"message_delta",
    RESPONSES: b"response.output_text.done",
}


def scripted(stage: Stage, script: Any = SCRIPT, **worker: Any) -> Any:
    return simulated_sessions(stage, script=script, reasoning_parser="qwen3", **worker)


def results(api: Api, said: Said) -> list[Any]:
    return api.results(*((call_id, f"result {place}") for place, (call_id, *_) in enumerate(said.calls)))


async def test_an_episode_with_tools_is_one_exact_segment(stage: Stage) -> None:
    """Turns are answered whole and streamed by turns; each API shows the same."""
    async with scripted(stage) as trial:
        for api, streams in itertools.product(TALKS, ((False,) * 3, (True,) * 3, (True, False, True))):
            with case(api, streams):
                session, items, told = await trial.create(), [WHEN], []
                for stream in streams:
                    said = await api.turn(trial, session, items, 200, stream=stream, tools=api.tools(*NAMES))
                    items += [*said.items, *results(api, said)] if said.calls else said.items
                    told.append(said)
                stop, calls, _ = ENDS[api.path]
                assert [said.end for said in told] == [calls, calls, stop]
                assert [said.reasoning.strip() for said in told] == ["Two at once.", "", "That is all."]
                assert [said.text.strip() for said in told] == ["Let me see.", "", "It is noon."]
                shown = [[(name, json.loads(arguments)) for _, name, arguments in said.calls] for said in told]
                assert shown == [
                    [(call["name"], call["arguments"]) for call in step.get("calls", ())] for step in SCRIPT
                ]
                records, made = await trial.records(session), trial.log[-3:]
                assert [(each["path"], each["reason"]) for each in records] == [(api.path, None)] * 3
                assert [each["streamed"] for each in records] == [*streams]
                (sample,) = await trial.samples(session)
                exactly(sample, *(exchange.generation for exchange in made))
                assert ["input_ids" in exchange.json() for exchange in made] == [False, True, True]


async def test_the_apis_of_a_session_share_its_turns(stage: Stage) -> None:
    async with scripted(stage) as trial:
        for order in (TALKS, TALKS[::-1]):
            session = await trial.create()
            for place, api in enumerate(order):
                items = [WHEN]
                for record in await trial.records(session):
                    answer = record["response"]
                    calls = [(call["id"], *call["function"].values()) for call in answer["tool_calls"]]
                    said = {"role": "assistant", "content": answer["content"] or ""}
                    called = api.called(*((each, name, api.arguments(text)) for each, name, text in calls))
                    if api.path == CHAT:
                        called = [answer]
                    elif api.path == MESSAGES:
                        text = [{"type": "text", "text": said["content"]}] if said["content"] else []
                        called[0]["content"] = [*text, *called[0]["content"]]
                    elif said["content"]:
                        called = [said, *called]
                    items += [*called, *api.results(*((call_id, "now") for call_id, *_ in calls))]
                await api.turn(trial, session, items, 200, stream=bool(place % 2), tools=api.tools(*NAMES))
            assert [record["parent"] for record in await trial.records(session)] == [None, 0, 1], order


async def test_a_turn_that_is_asked_for_again_is_answered_once(stage: Stage) -> None:
    async with scripted(stage) as trial:
        for api, stream in itertools.product(PLAIN, BOTH):
            with case(api, stream):
                session = await trial.create()
                body = api.body("Hi" if api.path == COMPLETIONS else [WHEN], 8, stream=stream)
                made = len(trial.worker.log.generations)
                one, other = [await api.post(trial, session, body, [("X-Turn-Id", "1")]) for _ in range(2)]
                assert (one.status, one.body) == (200, other.body)
                assert one.value("content-type") == other.value("content-type")
                assert one.value("x-request-id") != other.value("x-request-id")
                assert [record["turn_id"] for record in await trial.records(session)] == ["1"]
                assert len(trial.worker.log.generations) == made + 1
                assert (await api.post(trial, session, body, [("X-Turn-Id", "2")])).body != one.body
                assert len(await trial.records(session)) == 2


async def test_why_an_answer_ended_is_told(stage: Stage) -> None:
    async with simulated_sessions(stage, script=["one # two # three"]) as trial:
        for api, stream in itertools.product(TALKS, BOTH):
            with case(api, stream):
                session = await trial.create()
                cut = await api.turn(trial, session, [WHEN], 2, stream=stream)
                assert cut.end == ENDS[api.path][2]
                whole = await api.turn(trial, session, [WHEN], stream=stream)
                assert (whole.text, whole.end) == ("one # two # three", ENDS[api.path][0])
                if api.path != RESPONSES:
                    stops = "stop" if api.path == CHAT else "stop_sequences"
                    asked: Any = {stops: ["?", "#"]}
                    stopped = await api.turn(trial, session, [WHEN], stream=stream, **asked)
                    end = "stop" if api.path == CHAT else "stop_sequence"
                    assert (stopped.text, stopped.end) == ("one ", end)


async def test_a_call_that_was_cut_never_looks_complete(stage: Stage) -> None:
    calls = [{"name": "get_date", "arguments": {"zone": "UTC"}}]
    async with scripted(stage, [{"text": "Now.", "calls": calls}]) as trial:
        for api, stream in itertools.product(TALKS, BOTH):
            session, tools = await trial.create(), api.tools(*NAMES)
            full = await api.turn(trial, session, [WHEN], 200, stream=stream, tools=tools)
            assert json.loads(full.calls[0][2]) == {"zone": "UTC"}
            closed = 2 if api.path == CHAT else 1  # chat shows a call whose JSON is whole
            for most in range(1, len(trial.log[-1].generation.output_ids) - closed):
                with case(api, stream, most):
                    cut = await api.turn(trial, session, [WHEN], most, stream=stream, tools=tools)
                    assert cut.end == ENDS[api.path][2]
                    assert not [call for call in cut.calls if call[2].rstrip().endswith("}") and call[2] != "{}"]
            assert None not in {record["finish_reason"] for record in await trial.records(session)}


# Errors


async def test_errors_are_told_in_the_api_s_words(stage: Stage) -> None:
    """A prompt that is too long for the engine, a session that is not there, and an answer that would be too long."""
    words = {
        CHAT: "context length",
        COMPLETIONS: "",
        MESSAGES: "prompt is too long: ",
        RESPONSES: "exceeds the context",
    }
    missing: dict[str, Any] = {
        MESSAGES: ("not_found_error", "error_code"),
        RESPONSES: ("invalid_request_error", "code"),
    }
    async with scripted(stage, context_len=300) as trial:
        session = await trial.create()
        for api, stream in itertools.product(PLAIN, BOTH):
            with case(api, stream):
                refused = await api.ask(trial, session, 8, "word " * 900, stream=stream)
                assert (refused.status, words[api.path] in refused.body.decode()) != (200, False)
                if api.path == RESPONSES:
                    code, message = api.refusal(refused, stream=stream)
                    assert (code, words[api.path] in message) == ("context_length_exceeded", True), "as Codex wants it"
                longer = await api.ask(trial, session, 9000, stream=stream)
                if api.path == MESSAGES:
                    assert "exceed context limit: " in longer.json()["error"]["message"], "as Claude Code wants it"
                assert longer.status == (200 if api.path == RESPONSES and stream else 400)
                nowhere = await api.ask(trial, "nobody", 8, stream=stream)
                error = nowhere.json()["error"]
                assert nowhere.status == 404
                kind, code = missing.get(api.path, ("not_found", ""))
                assert error["type"] == kind
                assert not code or error.get("details", error)[code] == "not_found"
        counting = {"model": "m", "messages": [WHEN], "chat_template_kwargs": {"tools": 1}}
        refused = await trial.ask("POST", f"/sessions/{session}{MESSAGES}/count_tokens", counting)
        assert (refused.status, b"template" in refused.body) == (400, True)
        assert await trial.records(session) == []


async def test_a_stream_that_fails_says_so_and_is_no_turn(stage: Stage) -> None:
    worker = able(await stage.worker()).always(failed_stream("CUDA out of memory"))
    trial = await session_trial(stage, worker)
    for api in TALKS:
        session = await trial.create()
        answer = await whole_or_cut(api.ask(trial, session, 2, stream=True))
        assert b"CUDA out of memory" in answer.body, api
        last = answer.body.rstrip().split(b"\n\n")[-1]
        if api.path == MESSAGES:
            assert (b"event: error" in last, b"api_error" in last) == (True, True), "a stream without an end"
        if api.path == RESPONSES:
            assert (b"response.failed" in last, b"server_error" in last) == (True, True)
        assert (await trial.read(session))["records"] == []


async def test_an_answer_that_was_cut_off_stays_recorded_and_never_looks_whole(stage: Stage) -> None:
    worker = able(await stage.worker())
    trial = await session_trial(stage, worker)
    for api, stream in itertools.product(TALKS, BOTH):
        with case(api, stream):
            worker.always(cut_answer(stream=stream))
            session = await trial.create()
            answer = await whole_or_cut(api.ask(trial, session, 2, stream=stream))
            (record,) = await trial.records(session)
            assert record["finish_reason"] == "abort"
            if api.path == CHAT:
                assert api.end(answer, stream=stream) == "abort"
            elif api.path == MESSAGES:
                assert b"overloaded_error" in answer.body
            elif stream:
                failed = api.answers(answer, stream=True)[-1]
                assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "server_error")
                assert failed["response"]["output"][0]["status"] == "incomplete"
            else:
                error = answer.json()["error"]
                assert (answer.status, error["code"], error["type"]) == (503, "unavailable", "server_error")
            if api.path == RESPONSES:
                stored = await trial.ask("GET", f"/sessions/{session}{RESPONSES}/{record['response_id']}")
                assert stored.json()["status"] == "failed"


async def test_an_engine_s_refusal_is_no_turn(stage: Stage) -> None:
    worker = able(await stage.worker()).always(script(reply(b'{"object":"error","message":"odd"}', 400, JSON)))
    trial = await session_trial(stage, worker)
    for api, stream in itertools.product(TALKS, BOTH):
        with case(api, stream):
            session = await trial.create()
            refused = await api.ask(trial, session, 8, stream=stream)
            assert (refused.status, b"odd" in refused.body) == (400, True)
            found = await trial.read(session)
            assert (found["records"], found["metadata"]["untraced"]) == ([], [])


# Streams


@pytest.mark.parametrize("api", TALKS, ids=str)
async def test_text_streams_at_once_and_the_end_waits_for_the_record(stage: Stage, api: Api) -> None:
    first, last = asyncio.Event(), asyncio.Event()
    role, one, two, finish, ids, done = chat_events([7, 8], ["Hel", "lo"])
    worker = able(await stage.worker()).always(streamed(role, one, first, two, finish, last, ids, done))
    trial = await session_trial(stage, worker)
    session = await trial.create()
    client = await stage.client(trial.router)
    body = json.dumps(api.body([WHEN], 2, stream=True)).encode()
    await client.send(request("POST", f"/sessions/{session}{api.path}", JSON, body))
    await client.read_head("POST")
    seen = b""
    for text, gate in ((b'"Hel"', first), (b'"lo"', last)):
        while text not in seen.replace(b'": "', b'":"'):
            seen += await client.read_part()
        assert (await trial.records(session), END_OF_STREAM[api.path] in seen) == ([], False)
        gate.set()
    while END_OF_STREAM[api.path] not in seen.replace(b'": "', b'":"'):
        seen += await client.read_part()
    assert len(await trial.records(session)) == 1
    await client.read_body()


async def test_an_engine_that_cannot_stream_ids_serves_a_buffered_stream(stage: Stage) -> None:
    worker = able(await stage.worker(), "messages").always(script(chat_reply([7, 8], "Hello")))
    trial = await session_trial(stage, worker)
    for api in TALKS:
        session = await trial.create()
        said = await api.turn(trial, session, [WHEN], 2, stream=True)
        assert (said.text, said.end) == ("Hello", ENDS[api.path][2]), api
        (record,) = await trial.records(session)
        assert (record["streamed"], record["versions"]) == (True, "engine")
        assert "stream" not in json.loads(worker.requests[-1].body)


async def test_what_was_cached_is_told_as_each_api_tells_it(stage: Stage) -> None:
    async with scripted(stage) as trial:
        for api, stream in itertools.product(TALKS[1:], BOTH):
            with case(api, stream):
                session, items = await trial.create(), [WHEN]
                for _ in range(2):
                    body = api.body(items, 200, stream=stream, tools=api.tools(*NAMES))
                    answer = await api.post(trial, session, body)
                    said = api.read(answer, stream=stream)
                    items += [*said.items, *results(api, said)]
                usage: dict[str, Any] = {}
                for each in api.answers(answer, stream=stream):
                    usage |= each.get("response", each.get("message", each)).get("usage") or {}
                record = (await trial.records(session))[-1]
                if api.path == RESPONSES:
                    told = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
                else:
                    cached = usage["cache_read_input_tokens"]
                    told = usage["input_tokens"] + cached, cached
                assert told == (record["prompt_tokens"], record["cached_tokens"])
                assert told[1] > 0


async def test_a_key_comes_as_each_api_s_clients_send_it(stage: Stage) -> None:
    """Clients send a key in the header that their API has for it."""
    async with simulated_sessions(stage, settings={"api_key": "secret"}) as trial:
        made = await trial.ask("POST", "/sessions", {}, [("Authorization", "Bearer secret")])
        session = made.json()["session_id"]
        for api in TALKS:
            for key, status in (("secret", 200), ("wrong", 401)):
                header = ("X-Api-Key", key) if api.path == MESSAGES else ("Authorization", f"Bearer {key}")
                answer = await api.post(trial, session, api.body([WHEN], 4), [header])
                assert answer.status == status, api
        heads = b"".join(value for each in trial.log for _, value in each.headers)
        assert b"secret" not in heads, "no worker sees it"


async def test_a_request_refused_before_its_session_is_told_in_the_api_s_form(stage: Stage) -> None:
    """A wrong key, a body whose announced size is too large, and a page of another origin."""
    kinds = {
        MESSAGES: ("authentication_error", "request_too_large", "permission_error"),
        RESPONSES: ("invalid_request_error",) * 3,
    }
    plain, key = ("unauthorized", "invalid_request", "unauthorized"), ("Authorization", "Bearer secret")
    elsewhere = ("Origin", "http://elsewhere.example")
    small = {"max_request_bytes": 1000}
    async with (
        simulated_sessions(stage, settings={"api_key": "secret", **small}) as keyed,
        simulated_sessions(stage, settings=small) as open_to_all,
    ):
        made = await keyed.ask("POST", "/sessions", {"session_id": "s"}, [key])
        assert (made.status, await open_to_all.create("s")) == (200, "s")
        for api, stream in itertools.product(TALKS, BOTH):
            short, long = (api.body([user(text)], 4, stream=stream) for text in ("Hi", "word " * 300))
            refused = (
                await api.post(keyed, "s", short, [("Authorization", "Bearer wrong")]),
                await api.post(keyed, "s", long, [key]),
                await open_to_all.ask("DELETE", f"/sessions/s{api.path}/r", headers=[elsewhere]),
            )
            for answer, status, kind, own in zip(
                refused, (401, 413, 403), kinds.get(api.path, plain), plain, strict=True
            ):
                with case(api, stream, status):
                    error = answer.json()["error"]
                    assert (answer.status, error["type"]) == (status, kind), answer.body
                    assert api.path not in kinds or error.get("details", {}).get("error_code", error.get("code")) == own


def test_the_table_has_every_api() -> None:
    assert {api.path for api in PLAIN} == {api.path for api in AGENT_APIS}


History = list[dict[str, Any]]
ASKED = user("What is 17 plus 25?")


def remark(history: History) -> History:
    """The first question with a remark behind it, as a harness adds one."""
    return [user(f"{history[0]['content']}\n\nBe brief."), *history[1:]]


def without_the_first_answer(history: History) -> History:
    """The first answer was empty: the harness drops it, and puts both questions into one message."""
    return [user(f"{history[0]['content']}\n{history[2]['content']}"), *history[3:]]


class Agent:
    """Asks one API of one session."""

    def __init__(self, trial: SessionTrial, session: str, api: Api, *, stream: bool = False) -> None:
        self.trial, self.session, self.api, self.stream = trial, session, api, stream

    async def ask(self, history: History, most: int = 8, *, tools: bool = True) -> History:
        """One turn; gives the history with its answer."""
        fields: dict[str, Any] = {"tools": self.api.tools("add")} if tools else {}
        said = await self.api.turn(self.trial, self.session, history, most, stream=self.stream, **fields)
        return [*history, *said.items]


async def main_turns(trial: SessionTrial, session: str) -> list[list[int]]:
    """The turns of each sample without side calls; records, labels and the dashboard must say the same."""
    samples = await trial.samples(session, side_calls=False)
    kept = [[turn["turn"] for turn in sample["metadata"]["turns"]] for sample in samples]
    told = await trial.ask("GET", f"/router/episodes/{session}")
    assert told.status == 200, told.body
    main = {turn for line in kept for turn in line}
    assert {turn["turn"] for turn in told.json()["turns"] if not turn["side_call"]} == main
    for sample in await trial.samples(session):
        assert sample["metadata"]["side_call"] == (sample["metadata"]["leaf"] not in main)
    return kept


async def test_a_warm_up_request_or_a_dropped_answer_is_not_the_main_line(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api, stream in itertools.product(TALKS, BOTH):
            with case(api, stream):
                session = await trial.create()
                agent = Agent(trial, session, api, stream=stream)
                await agent.ask([user("ping")], 1)
                history = await agent.ask([ASKED])
                await agent.ask([*history, user("And now?")])
                assert await main_turns(trial, session) == [[1, 2]]
        for api in TALKS:
            with case(api):
                session = await trial.create()
                agent = Agent(trial, session, api)
                history = await agent.ask([ASKED], 1)
                history = await agent.ask(without_the_first_answer([*history, user("Well?")]))
                await agent.ask([*history, user("Again")])
                assert await main_turns(trial, session) == [[1, 2]]


async def test_a_remark_at_the_first_question_keeps_all_turns(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for api, stream, tools in itertools.product(TALKS, BOTH, BOTH):
            with case(api, stream, tools):
                session = await trial.create()
                agent = Agent(trial, session, api, stream=stream)
                history = await agent.ask([ASKED], tools=tools)
                history = await agent.ask([*history, user("And now?")], tools=tools)
                history = await agent.ask(remark([*history, user("Go on")]), tools=tools)
                await agent.ask([*history, user("Again")], tools=tools)
                await agent.ask([user("Write a title.")], 2, tools=False)
                assert await trial.reasons(session) == [None, None, "edited_history", None, "sub_agent"]
                assert await main_turns(trial, session) == [[0, 1], [2, 3]]
