"""The main line of an agent with tools and without a system prompt: the whole episode decides, in every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.restarts import StateDirectories
from tests.support.session_apis import MESSAGES, RESPONSES
from tests.support.session_trial import ADD, CHAT, SESSIONS, SessionTrial, chunks_of, qwen3, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

LIST = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
LENGTH = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
TOOLS: dict[str, Any] = {
    CHAT: ADD,
    MESSAGES: {"name": "add", "input_schema": ADD["function"]["parameters"]},
    RESPONSES: {"type": "function", **ADD["function"]},
}
History = list[dict[str, Any]]


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage, token_latency_s=0.0) as made:
        yield made


class Agent:
    """Asks one API of one session, and keeps its history."""

    def __init__(self, trial: SessionTrial, session: str, path: str, *, stream: bool = False) -> None:
        self.trial, self.session, self.path, self.stream = trial, session, path, stream

    async def ask(self, history: History, most: int = 8, *, tools: bool = True) -> History:
        """One turn; gives the history with its answer."""
        body = {"model": "m", LIST[self.path]: history, LENGTH[self.path]: most, "stream": self.stream}
        if tools:
            body["tools"] = [TOOLS[self.path]]
        reply = await self.trial.ask("POST", f"/sessions/{self.session}{self.path}", body)
        assert reply.status == 200, reply.body
        return [*history, *self._answer(reply)]

    def _answer(self, reply: Any) -> History:
        if not self.stream:
            said = reply.json()
            if self.path == RESPONSES:
                return list(said["output"])
            if self.path == MESSAGES:
                return [{"role": "assistant", "content": said["content"]}]
            return [said["choices"][0]["message"]]
        if self.path == CHAT:
            deltas = [each["delta"] for chunk in chunks_of(reply.body) for each in chunk["choices"]]
            return [{"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}]
        events = [json.loads(line[6:]) for line in reply.body.split(b"\n") if line.startswith(b"data: {")]
        if self.path == RESPONSES:
            return list(events[-1]["response"]["output"])
        texts = [each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta"]
        return [{"role": "assistant", "content": "".join(texts)}]


def remark(history: History) -> History:
    """The first question with a remark behind it, as a harness adds one."""
    return [user(f"{history[0]['content']}\n\nBe brief."), *history[1:]]


def without_the_first_answer(history: History) -> History:
    """The first answer was empty: the harness drops it, and puts both questions into one message."""
    return [user(f"{history[0]['content']}\n{history[2]['content']}"), *history[3:]]


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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", LIST)
async def test_a_warm_up_request_is_not_the_main_line(trial: SessionTrial, path: str, stream: bool) -> None:
    session = await trial.create()
    agent = Agent(trial, session, path, stream=stream)
    await agent.ask([user("ping")], 1)
    history = await agent.ask([user("What is 17 plus 25?")])
    await agent.ask([*history, user("And now?")])
    assert await main_turns(trial, session) == [[1, 2]]


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no tools"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", LIST)
async def test_a_remark_at_the_first_question_keeps_all_turns(
    trial: SessionTrial, path: str, stream: bool, tools: bool
) -> None:
    session = await trial.create()
    agent = Agent(trial, session, path, stream=stream)
    history = await agent.ask([user("What is 17 plus 25?")], tools=tools)
    history = await agent.ask([*history, user("And now?")], tools=tools)
    history = await agent.ask(remark([*history, user("Go on")]), tools=tools)
    await agent.ask([*history, user("Again")], tools=tools)
    await agent.ask([user("Write a title.")], 2, tools=False)
    assert await trial.reasons(session) == [None, None, "edited_history", None, "sub_agent"]
    assert await main_turns(trial, session) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("path", LIST)
async def test_an_answer_that_the_agent_drops_leaves_the_rest(trial: SessionTrial, path: str) -> None:
    session = await trial.create()
    agent = Agent(trial, session, path)
    history = await agent.ask([user("What is 17 plus 25?")], 1)
    history = await agent.ask(without_the_first_answer([*history, user("Well?")]))
    await agent.ask([*history, user("Again")])
    assert await main_turns(trial, session) == [[1, 2]]


@pytest.mark.parametrize("change", [remark, without_the_first_answer])
async def test_the_main_line_is_the_same_after_a_restart(tmp_path: Path, change: Callable[[History], History]) -> None:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1", token_latency_s=0.0) as worker:
        directories = StateDirectories(worker, tmp_path)
        layer, model = MiddlewareSpec(SESSIONS, {}), tokenizer_directory("qwen3")
        async with directories.router(layer, hf_checkpoint=model) as router:
            trial = SessionTrial(router, [worker])
            agent = Agent(trial, await trial.create("s"), CHAT)
            history = await agent.ask([user("What is 17 plus 25?")], 1)
            history = await agent.ask(change([*history, user("Well?")]))
            before = await main_turns(trial, "s")
        async with directories.router(layer, hf_checkpoint=model) as router:
            trial = SessionTrial(router, [worker])
            assert await main_turns(trial, "s") == before
            await Agent(trial, "s", CHAT).ask([*history, user("Again")])
            kept = await main_turns(trial, "s")
            assert kept == [*before[:-1], [*before[-1], 2]]
