"""Each turn says whether its message is all that was sampled, in records, samples and metrics."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.bare_calls import DATED, NAMES, UNKNOWN, a_trial
from tests.support.scripted_chat import able, answering, chat_reply
from tests.support.scripted_worker import script
from tests.support.session_apis import BOTH, COMPLETIONS, TALKS, Api, case
from tests.support.session_trial import IM_END, qwen3, simulated_sessions, user
from tests.support.stage import Stage


def made(arguments: str) -> Any:
    return {"id": "c0", "index": 0, "type": "function", "function": {"name": "get_date", "arguments": arguments}}


#: What was sampled, the text and the calls that the engine shows of it, and the account.
TURNS: list[tuple[str, str, list[Any], Any]] = [
    ("It is 42.", "It is 42.", [], "whole"),
    (DATED, "", [made('{"zone": "UTC"}')], "whole"),
    ("<tool_call>\nno json\n</tool_call> too", "", [], ["text_left_over"]),
    (DATED, "", [made('{"zone": "CET"}')], ["argument_altered"]),
    (f"So.\n{UNKNOWN}", "So.", [], ["unknown_tool"]),
    (DATED.replace('"UTC"', "UTC"), "", [made('{"zone": UTC}')], ["invalid_json"]),
    (f"So.\n{DATED}", f"So.\n{DATED}", [], ["call_in_text"]),
    (f"{DATED}\n{UNKNOWN} too", "", [made("{}")], ["text_left_over", "argument_altered", "unknown_tool"]),
]


async def test_each_turn_tells_whether_its_message_is_all_that_was_sampled(stage: Stage) -> None:
    worker = able(await stage.worker(), parser="hermes")  # which the router has no parser for
    trial = await a_trial(stage, worker)
    for api, stream in itertools.product(TALKS, BOTH):
        for text, shown, calls, account in TURNS:
            with case(api, stream, text):
                worker.next(answering([*qwen3().encode(text), IM_END], shown, calls=calls))
                session = await trial.create()
                await api.turn(trial, session, [user("When?")], stream=stream, tools=api.tools(*NAMES))
                (record,) = await trial.records(session)
                (sample,) = await trial.samples(session)
                assert record["parsed"] == account
                assert [turn["parsed"] for turn in sample["metadata"]["turns"]] == [account]
                episode = (await trial.ask("GET", f"/router/episodes/{session}")).json()
                assert [turn["parsed"] for turn in episode["turns"]] == [account]
    times = 2 * len(TALKS)
    reasons = ("argument_altered", "unknown_tool", "text_left_over", "whole")
    assert trial.statistics()["parsed"] == {
        **dict.fromkeys(reasons, 2 * times),
        **dict.fromkeys(("invalid_json", "call_in_text"), times),
    }


async def test_a_token_that_stopped_a_turn_is_not_part_of_its_message(stage: Stage) -> None:
    worker = able(await stage.worker(), parser="hermes")
    trial = await a_trial(stage, worker)
    ids = qwen3().encode("So.\nEnd")
    said = {"role": "assistant", "content": "So."}
    worker.next(script(chat_reply(ids, message=said, finish_reason="stop", matched_stop=ids[-1])))
    session = await trial.create()
    await trial.chat(session, [user("When?")], stop_token_ids=ids[-1:])
    (record,) = await trial.records(session)
    assert record["parsed"] == "whole"


async def test_completions_are_not_parsed(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        await Api(COMPLETIONS).turn(trial, session, "Hi", 4)
        (record,) = await trial.records(session)
        assert "parsed" not in record
