"""A call whose JSON is not closed comes back repaired: the session goes on in the same segment, in every API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bare_calls import MESSAGES, RESPONSES, a_trial, ask, grown, lossy, named, request, returned, says
from tests.support.scripted_chat import able, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_trial import CHAT, IM_END, qwen3
from tests.support.stage import Stage

OPEN = '{"zone": "UTC", "days": [1, 2'
TEXT = f'<tool_call>\n{{"name": "get_date", "arguments": {OPEN}\n</tool_call>'
QUESTION: Any = {"role": "user", "content": "When?"}
apis = pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])


async def turns(stage: Stage, path: str, arguments: Any, *, live: bool = True) -> list[Any]:
    """The records of a turn with an open call, and of two that follow with the call as the agent has it."""
    worker = able(await stage.worker())
    made = {"id": "call_a", "index": 0, "type": "function", "function": {"name": "get_date", "arguments": OPEN}}
    message = {"role": "assistant", "content": "", "tool_calls": [made]}
    whole = script(chat_reply([*qwen3().encode(TEXT), IM_END], message=message, finish_reason="tool_calls"))
    worker.next(lossy(TEXT, named("get_date"), grown(OPEN)) if live else whole)
    worker.always(says("Now."))
    trial = await a_trial(stage, worker)
    session = await trial.create()
    await trial.ask("POST", f"/sessions/{session}{path}", request(path, [QUESTION], stream=live))
    (record,) = await trial.records(session)
    (call,) = record["response"]["tool_calls"]
    assert call["function"]["arguments"] == OPEN
    items = returned(path, call["id"], arguments)
    answer = await ask(trial, session, path, items)
    assert answer.status == 200, answer.body
    said: Any = {"role": "assistant", "content": "Now."}
    answer = await ask(trial, session, path, [*items, said, {"role": "user", "content": "And then?"}])
    assert answer.status == 200, answer.body
    return list(await trial.records(session))


@apis
@pytest.mark.parametrize("live", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "arguments",
    [{"zone": "UTC", "days": [1, 2]}, {"zone": "UTC", "days": [1]}, {"zone": "UTC"}, {}, OPEN],
    ids=["closed", "shorter", "dropped", "none", "as it was"],
)
async def test_a_repaired_call_is_the_held_one(stage: Stage, path: str, live: bool, arguments: Any) -> None:
    records = await turns(stage, path, arguments, live=live)
    assert [(each["parent"], each["edit"]) for each in records] == [(None, None), (0, None), (1, None)]


@apis
async def test_a_broken_call_that_comes_back_changed_is_an_edit(stage: Stage, path: str) -> None:
    *_, edited, _ = await turns(stage, path, {"zone": "CET", "days": [1, 2]})
    assert (edited["parent"], edited["edit"]["field"]) == (None, "tool_calls[0].function.arguments")


async def test_the_turn_says_that_its_text_has_no_such_call(stage: Stage) -> None:
    first, *_ = await turns(stage, CHAT, {})
    assert "a call was shown that the whole text does not have" in first["shown_otherwise"]
