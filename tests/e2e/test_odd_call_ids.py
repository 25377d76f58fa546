"""Agents with a loop of their own, whose calls have numbers as ids, or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.e2e.test_renamed_call_ids import MISTRAL
from tests.e2e.test_session_media import prompt_of
from tests.support.bare_calls import MESSAGES, RESPONSES, request
from tests.support.session_trial import CHAT, SessionTrial, session_trial, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

APIS = (CHAT, MESSAGES, RESPONSES)
apis = pytest.mark.parametrize("path", APIS)
CALL: Any = {"name": "get_time", "arguments": {"zone": "UTC"}}
OTHER: Any = {"name": "get_date", "arguments": {}}
SCRIPT: Any = [{"calls": [CALL]}, {"calls": [CALL]}, {"text": "Done."}]
#: What stands in place of the id of a turn's call: in the call, and in its result.
IDS: dict[str, Any] = {
    "integers": lambda turn: (turn, turn),
    "an integer and its text": lambda turn: (turn, str(turn)),
    "the same integer": lambda turn: (0, 0),
    "negative": lambda turn: (-turn - 1, -turn - 1),
    "large": lambda turn: (2**63 + turn, 2**63 + turn),
    "missing": lambda turn: (..., ...),
    "null": lambda turn: (None, None),
    "empty": lambda turn: ("", ""),
    "missing in the result": lambda turn: (turn, ...),
    "missing in the call": lambda turn: (..., None),
}
#: What no id is.
NO_IDS: dict[str, Any] = {"true": True, "a fraction": 1.5, "a list": ["a"], "an object": {"id": "a"}}


def given(holder: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """An object with a field of this value; without the field where it is `...`."""
    kept = {each: held for each, held in holder.items() if each != name}
    return kept if value is ... else {**kept, name: value}


def called(path: str, ids: list[Any], calls: tuple[Any, ...] = (CALL,)) -> list[Any]:
    """An answer with calls under these ids, as an agent writes it."""
    pairs = [*zip(calls, ids, strict=True)]
    if path == MESSAGES:
        blocks = [
            given({"type": "tool_use", "name": call["name"], "input": call["arguments"]}, "id", each)
            for call, each in pairs
        ]
        return [{"role": "assistant", "content": blocks}]
    functions = [{**call, "arguments": orjson.dumps(call["arguments"]).decode()} for call in calls]
    if path == RESPONSES:
        return [
            given({"type": "function_call", **function}, "call_id", each)
            for function, each in zip(functions, ids, strict=True)
        ]
    made = [
        given({"type": "function", "function": function}, "id", each)
        for function, each in zip(functions, ids, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": made}]


def results(path: str, ids: list[Any], texts: list[str]) -> list[Any]:
    """Results under these ids."""
    pairs = [*zip(ids, texts, strict=True)]
    if path == MESSAGES:
        blocks = [given({"type": "tool_result", "content": text}, "tool_use_id", each) for each, text in pairs]
        return [{"role": "user", "content": blocks}]
    if path == RESPONSES:
        return [given({"type": "function_call_output", "output": text}, "call_id", each) for each, text in pairs]
    return [given({"role": "tool", "content": text}, "tool_call_id", each) for each, text in pairs]


async def ask(trial: SessionTrial, session: str, path: str, items: list[Any], *, stream: bool = False) -> Any:
    return await trial.ask("POST", f"/sessions/{session}{path}", request(path, items, stream=stream))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@apis
@pytest.mark.parametrize("kind", IDS)
async def test_an_episode_is_one_segment(stage: Stage, path: str, kind: str, *, stream: bool) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session, items = await trial.create(), [user("When?")]
        for turn in range(3):
            reply = await ask(trial, session, path, items, stream=stream)
            assert reply.status == 200, reply.body
            call_id, result_id = IDS[kind](turn)
            items += called(path, [call_id]) + results(path, [result_id], [f"result {turn}"])
        records = await trial.records(session)
        assert [record["parent"] for record in records] == [None, 0, 1]
        ids = [call["id"] for record in records[:2] for call in record["response"]["tool_calls"]]
        assert [record["messages"][0]["tool_call_id"] for record in records[1:]] == ids
        prompt = await prompt_of(trial, session)
        assert [prompt.count(f"result {turn}") for turn in range(3)] == [1, 1, 0]


@apis
@pytest.mark.parametrize("kind", IDS)
async def test_a_history_that_no_turn_holds_is_read(stage: Stage, path: str, kind: str) -> None:
    call_id, result_id = IDS[kind](7)
    items = [user("When?"), *called(path, [call_id]), *results(path, [result_id], ["noon"])]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for _ in range(2):
            reply = await ask(trial, session, path, items)
            assert reply.status == 200, reply.body
            items = [*items, {"role": "assistant", "content": said(path, reply.json())}, user("And now?")]
        assert await trial.reasons(session) == [None, None]
        assert "<tool_response>\nnoon\n</tool_response>" in await prompt_of(trial, session)


def said(path: str, answer: Any) -> Any:
    """The text of an answer."""
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    return answer["content"] if path == MESSAGES else answer["output"][-1]["content"]


@apis
@pytest.mark.parametrize("where", ["call", "result"])
@pytest.mark.parametrize("kind", NO_IDS)
async def test_an_id_that_is_none_is_refused_by_its_place(stage: Stage, path: str, where: str, kind: str) -> None:
    bad = NO_IDS[kind]
    ids = (bad, "a") if where == "call" else ("a", bad)
    items = [user("When?"), *called(path, [ids[0]]), *results(path, [ids[1]], ["noon"])]
    place = 1 if where == "call" else 2
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, path, items)
        assert reply.status == 400
        error = reply.json()["error"]
        assert any(f"{name}{place}" in str(error) for name in ("messages[", "messages.", "input["))
        assert "integer" in error["message"]
        assert not trial.door
        assert await trial.records(session) == []


@apis
async def test_integers_say_which_of_two_calls_a_result_is_of(stage: Stage, path: str) -> None:
    """In Messages results are put into the order of their calls; the others go as they came."""
    items = [user("When?"), *called(path, [1, 2], (CALL, OTHER)), *results(path, [2, 1], ["second", "first"])]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        assert (await ask(trial, session, path, items)).status == 200
        (record,) = await trial.records(session)
        assert {each["tool_call_id"]: each["content"] for each in record["messages"] if each["role"] == "tool"} == {
            "1": "first",
            "2": "second",
        }


@apis
async def test_a_result_of_one_of_two_calls_must_say_of_which(stage: Stage, path: str) -> None:
    items = [user("When?"), *called(path, [1, 2], (CALL, OTHER)), *results(path, [...], ["noon"])]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, path, items)
        assert reply.status == 400
        assert not trial.door


@apis
async def test_the_result_without_an_id_is_of_the_call_that_is_left(stage: Stage, path: str) -> None:
    items = [user("When?"), *called(path, ["a", ...], (CALL, OTHER)), *results(path, ["a", ...], ["noon", "today"])]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await ask(trial, session, path, items)
        assert reply.status == 200, reply.body
        (record,) = await trial.records(session)
        ids = [call["id"] for each in record["messages"] for call in each.get("tool_calls") or ()]
        assert [each["tool_call_id"] for each in record["messages"] if each["role"] == "tool"] == ids


@pytest.mark.parametrize("named", [False, True], ids=["in order", "by name"])
async def test_results_without_ids_of_two_calls_in_chat(stage: Stage, *, named: bool) -> None:
    texts = ["second", "first"] if named else ["first", "second"]
    answers = results(CHAT, [..., ...], texts)
    if named:
        answers = [{**each, "name": name} for each, name in zip(answers, ["get_date", "get_time"], strict=True)]
    items = [user("When?"), *called(CHAT, ["a", "b"], (CALL, OTHER)), *answers]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        assert (await ask(trial, session, CHAT, items)).status == 200
        (record,) = await trial.records(session)
        found = {each["tool_call_id"]: each["content"] for each in record["messages"] if each["role"] == "tool"}
        assert found == {"a": "first", "b": "second"}


async def test_a_session_goes_on_where_a_result_does_not_say_of_which_call_it_is(stage: Stage) -> None:
    """Qwen3's template writes no ids: the prompt is the same whatever they are."""
    async with simulated_sessions(stage, script=[{"calls": [CALL, OTHER]}, {"text": "Done."}]) as trial:
        session, items = await trial.create(), [user("When?")]
        answer = (await ask(trial, session, CHAT, items)).json()
        items += [answer["choices"][0]["message"], *results(CHAT, [...], ["noon"])]
        reply = await ask(trial, session, CHAT, items)
        assert reply.status == 200, reply.body
        assert await trial.reasons(session) == [None, None]


@apis
@pytest.mark.parametrize("kind", ["integers", "missing", "null"])
async def test_templates_that_write_ids_take_them(stage: Stage, tmp_path: Path, path: str, kind: str) -> None:
    checkpoint = shutil.copytree(tokenizer_directory("qwen3"), tmp_path / "mistral")
    config = checkpoint / "tokenizer_config.json"
    config.write_bytes(orjson.dumps({**orjson.loads(config.read_bytes()), "chat_template": MISTRAL}))
    tokenizer = DirectoryTokenizer(str(checkpoint))
    async with SimulatedWorker(tokenizer=tokenizer, weight_version="1", script=SCRIPT) as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=str(checkpoint))
        session, items = await trial.create(), [user("When?")]
        for turn in range(3):
            reply = await ask(trial, session, path, items)
            assert reply.status == 200, reply.body
            call_id, result_id = IDS[kind](turn)
            items += called(path, [call_id]) + results(path, [result_id], [f"result {turn}"])
        if kind != "integers":
            assert [record["parent"] for record in await trial.records(session)] == [None, 0, 1]
