"""The main line of an agent with tools and without a system prompt: the whole episode decides, in every API."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.session_apis import BOTH, TALKS, Api, case
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage

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
