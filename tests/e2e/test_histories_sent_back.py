"""Histories that agents' libraries write anew: other call ids, other numbers, calls without item ids. The episode stays
one segment, and the engine reads what the agent says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import ScriptedWorker, script
from tests.support.session_apis import RESPONSES
from tests.support.session_trial import SessionTrial, session_trial
from tests.support.stage import Stage

USER = {"role": "user", "content": "Go."}
FUNCTION: Any = {"type": "function", "name": "bash", "parameters": {"type": "object"}}


def call(arguments: str, call_id: str = "bash:0", name: str = "bash") -> Any:
    return {"id": call_id, "index": 0, "type": "function", "function": {"name": name, "arguments": arguments}}


def scripted(worker: ScriptedWorker, *answers: Any) -> ScriptedWorker:
    """A worker with these answers' messages, one for each turn."""
    for place, message in enumerate(answers):
        told: dict[str, Any] = {} if place == 0 else {"prompt_token_ids": None}
        said = {"role": "assistant", "content": None, **message}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        worker.next(script(chat_reply([7 + place], message=said, finish_reason=finish, **told)))
    return able(worker)


async def responses_turn(trial: SessionTrial, session: str, given: Sequence[Any]) -> list[Any]:
    """The output of a turn, without the ids of its items."""
    body = {"model": "m", "input": given, "tools": [FUNCTION], "max_output_tokens": 8}
    reply = await trial.ask("POST", f"/sessions/{session}{RESPONSES}", body)
    assert reply.status == 200, reply.body
    return [{name: item[name] for name in item if name != "id"} for item in reply.json()["output"]]


def output(text: str) -> Any:
    return {"type": "function_call_output", "call_id": "bash:0", "output": text}


async def parents(trial: SessionTrial, session: str) -> list[int | None]:
    return [record["parent"] for record in await trial.records(session)]


async def test_the_same_call_in_two_turns_stays_two_turns_without_item_ids(stage: Stage) -> None:
    same = {"tool_calls": [call('{"command": "ls"}')]}
    worker = scripted(await stage.worker(), same, {**same, "content": "Once more."}, same, {"content": "Done."})
    trial = await session_trial(stage, worker)
    session, given = await trial.create(), [USER]
    for turn in range(4):
        said = await responses_turn(trial, session, given)
        calls = [item for item in said if item["type"] == "function_call"]
        text = [item for item in said if item["type"] == "message"]
        given += [*calls, *text, *(output(str(turn)) for _ in calls)]
    assert await parents(trial, session) == [None, 0, 1, 2]


async def test_reasoning_that_comes_back_as_a_message_is_reasoning(stage: Stage) -> None:
    calls = [call('{"command": "ls"}', f"call_{turn}") for turn in range(2)]
    answers = [{"reasoning_content": f"Thought {turn}.\n", "tool_calls": [calls[turn]]} for turn in range(2)]
    done = {"reasoning_content": "Enough.", "content": "Done."}
    worker = scripted(await stage.worker(), *answers, done, {"content": "Bye."})
    trial = await session_trial(stage, worker)
    session, given = await trial.create(), [USER]
    for _ in range(4):
        for item in await responses_turn(trial, session, given):
            if item["type"] == "reasoning":
                text = item["content"][0]["text"].strip()
                item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            given.append(item)
            if item["type"] == "function_call":
                given.append({**output("ok"), "call_id": item["call_id"]})
        if given[-1].get("role") == "assistant":
            given.append(USER)
    assert await parents(trial, session) == [None, 0, 1, 2]
