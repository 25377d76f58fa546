"""Turns of an agent that are cut anywhere, as often as one likes, are the turns that an uncut one would be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import GenerationRecord
from tests.support.brake import Brake
from tests.support.chat_turns import plain, read_stream
from tests.support.cuts import continue_, pause
from tests.support.session_trial import ADD, ASK_ADD, SessionTrial, qwen3, session_trial, user
from tests.support.stage import Stage
from tests.support.tiers import LEAST, nightly
from tests.support.waiting import soon

HI = [user("What is 17 + 25?")]
THOUGHT = "<think>\nI add < both </ of them, naïve 世界 😀.\n</think>\n\n"
TIGHT = '<tool_call>\n{"name":"add","arguments":{"a":17,"b":25}}\n</tool_call>'
ANSWERS = {
    "text": "It is 42, naïve 世界 😀, is <tool it not?",
    "short": "It is 42#It is not.",
    "reasoning": f"{THOUGHT}It is 42.",
    "one call": f"{THOUGHT}I add.\n{ASK_ADD}",
    "two calls": f"I add twice.\n{ASK_ADD}\n{TIGHT}",
    "no text": f"{THOUGHT}{TIGHT}\n{ASK_ADD}",
    "unopened": f"I think.\n</think>\n\nI add.\n{ASK_ADD}",
}
#: Of one token and of several; in a text and in what was thought.
STOPS = ("#", "42", "naïve 世", "it not", "twice", "I add", "them, n", "is ")
LONGEST = max(len(qwen3().encode(text)) for text in ANSWERS.values())


class Plan(NamedTuple):
    """One turn, and after how many tokens of each of its parts it is cut."""

    answer: str
    stream: bool
    tools: bool
    budget: int
    cuts: tuple[int, ...]
    stop: str | None = None

    @classmethod
    def drawn(cls, source: random.Random) -> Plan:
        """Any."""
        return cls(
            answer=source.choice(list(ANSWERS)),
            stream=source.random() < 0.6,
            tools=source.random() < 0.8,
            budget=source.choice([500, 500, source.randint(2, LONGEST)]),
            cuts=tuple(source.randint(0, LONGEST // 2) for _ in range(source.choice([1, 1, 2, 3]))),
            stop=source.choice([None, None, *STOPS]),
        )


@dataclass
class Turn:
    """A turn that is over: its answer, its only sample, and the generations that it took."""

    plan: Plan
    answer: Any
    sample: Any
    record: Any
    parts: list[GenerationRecord]


@dataclass
class Scene:
    trial: SessionTrial
    brake: Brake
    version: int = 0
    uncut: dict[Plan, Turn] = field(default_factory=dict)

    async def turn(self, plan: Plan) -> Turn:
        """The turn of a plan."""
        trial = self.trial
        trial.worker.say(ANSWERS[plan.answer])
        session, before = await trial.create(), len(trial.log)
        fields: dict[str, Any] = {"max_tokens": plan.budget, **({"tools": [ADD]} if plan.tools else {})}
        if plan.stop is not None:
            fields["stop"] = plan.stop
        asked = asyncio.ensure_future(self._ask(session, plan, fields))
        done = 0
        for tokens in plan.cuts:
            done += await self._cut(tokens, asked)
        self.brake.on = False
        answer = await soon(asked)
        parts = [each for exchange in trial.log[before:] for each in exchange.generations]
        assert 1 <= len(parts) <= done + 1, "a pause may come when it has just ended"
        (sample,), (record,) = await trial.samples(session), await trial.records(session)
        return Turn(plan, answer, sample, record, parts)

    async def _ask(self, session: str, plan: Plan, fields: dict[str, Any]) -> Any:
        if plan.stream:
            return await self.trial.stream(session, HI, stream_options={"include_usage": True}, **fields)
        return await self.trial.chat(session, HI, **fields)

    def _reached(self, tokens: int) -> bool:
        return any(len(each.output_ids) >= tokens for each in self.trial.worker.engine.running.values())

    async def _cut(self, tokens: int, asked: asyncio.Future[Any]) -> bool:
        """Cut the only generation where it has so many tokens, or one more, and give it new weights."""
        while not asked.done() and not self._reached(tokens):  # noqa: ASYNC110 - progress announces no event
            await asyncio.sleep(0)
        if asked.done():
            return False
        self.brake.on = True
        self.version += 1
        await pause(self.trial)
        await continue_(self.trial, str(self.version))
        self.brake.on = False
        return True


@asynccontextmanager
async def scene_of(stage: Stage, *, parsers: str, thinks: bool, incremental: bool) -> AsyncIterator[Scene]:
    kind: dict[str, Any] = {"incremental_streaming_output": incremental, "weight_version": "0"}
    kind |= {"tokenizer": qwen3(), "token_latency_s": 0.0002, "reasoning_parser": "qwen3" if thinks else None}
    async with SimulatedWorker(**kind) as worker:
        options = {"parsers": parsers, "tito_model": "qwen3"}
        trial = await session_trial(stage, worker, options=options, partial_rollout="resume")
        yield Scene(trial, Brake(worker.engine))


def check(turn: Turn, uncut: Turn) -> None:
    """Each token once, as it was sampled, under the weights that sampled it. A stop string that stands across a cut no
    worker knows: what was sampled behind it is nobody's."""
    expected = uncut.parts[0].output_ids
    sampled = [token for part in turn.parts for token in part.output_ids]
    assert sampled[: len(expected)] == expected
    assert len(sampled) == len(expected) or turn.plan.stop is not None
    sampled = expected
    prompt = turn.parts[0].input_ids
    assert turn.sample["tokens"] == [*prompt, *sampled]
    assert turn.sample["loss_mask"] == [0] * len(prompt) + [1] * len(sampled)
    logprobs = [logprob for part in turn.parts for logprob in part.logprobs][: len(sampled)]
    assert np.array_equal(np.array(turn.sample["logprobs"][len(prompt) :], np.float32), np.array(logprobs, np.float32))
    runs, at = list[Any](), len(prompt)
    for part in turn.parts:
        (version,) = {span.version for span in part.weight_versions}
        end = min(at + len(part.output_ids), len(prompt) + len(sampled))
        runs += [{"version": version, "start": at, "end": end}] if end > at else []
        at = end
    assert turn.sample["weight_versions"] == runs


async def play(scene: Scene, plan: Plan) -> None:
    whole = plan._replace(cuts=())
    if whole not in scene.uncut:
        scene.uncut[whole] = await scene.turn(whole)
    uncut, turn = scene.uncut[whole], await scene.turn(plan)
    check(turn, uncut)
    if plan.stream:
        streamed, expected = read_stream(turn.answer), read_stream(uncut.answer)
        assert (streamed.finish, streamed.usage) == (expected.finish, expected.usage)
        assert streamed.message == expected.message or ends_within_a_call(streamed, expected)
        return
    found, other = turn.answer["choices"][0], uncut.answer["choices"][0]
    assert plain(found["message"]) == plain(other["message"])
    for name in ("finish_reason", "matched_stop", "logprobs"):
        assert found[name] == other[name]
    assert turn.answer["usage"] == uncut.answer["usage"]
    assert turn.record["versions"] == "engine"


def ends_within_a_call(found: Any, expected: Any) -> bool:
    """How far the arguments of a call go that nobody has finished, a stream leaves open: it may show less of them. And
    a tag with which one would begin it may show as text, where that is the end."""
    calls, others = found.message.pop("tool_calls"), expected.message.pop("tool_calls")
    for message in (found.message, expected.message):
        message["content"] = message["content"].rstrip().removesuffix("<tool_call>").rstrip()
    assert found.message == expected.message
    assert found.finish == "length"
    assert abs(len(others) - len(calls)) <= 1
    if len(calls) == len(others):
        pair = sorted(each["function"].pop("arguments").replace(" ", "") for each in (calls[-1], others[-1]))
        assert pair[1].startswith(pair[0])
    same = min(len(calls), len(others))
    return bool(calls[:same] == others[:same])


SURE = (
    Plan("one call", True, True, 500, (3, 9, 4)),
    Plan("two calls", True, True, 500, (20, 1)),
    Plan("two calls", True, True, 32, (24,)),  # it ends behind the tag of the second
    Plan("unopened", True, True, 500, (2,)),
    Plan("unopened", False, True, 500, (9,)),
    *(Plan("short", True, False, 500, (tokens,), "#") for tokens in (3, 4, 5, 6)),  # one falls on the stop string
    *(Plan("text", True, False, 500, (tokens, 1), "naïve 世") for tokens in range(4, 9)),
    # Its first text is held back, for it may be the beginning of the stop string.
    *(Plan("text", True, tools, 500, (0, 4), "twice") for tools in (True, False)),
    Plan("reasoning", True, True, 500, (0,), "<think>!"),
)


@pytest.mark.parametrize(
    ("parsers", "thinks", "incremental"),
    [("engine", True, False), ("hybrid", True, True), ("hybrid", False, False), ("local", True, False)],
)
async def test_a_turn_that_was_cut_is_what_an_uncut_one_would_be(
    stage: Stage, parsers: str, thinks: bool, incremental: bool
) -> None:
    source = random.Random() if nightly() else random.Random(parsers)
    async with scene_of(stage, parsers=parsers, thinks=thinks, incremental=incremental) as scene:
        for plan in (*SURE, *(Plan.drawn(source) for _ in range(100 if nightly() else LEAST))):
            try:
                await play(scene, plan)
            except AssertionError as error:
                raise AssertionError(f"{plan}: {error}") from error
