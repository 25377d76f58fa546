"""Tool agents over the official `openai` client that know a `base_url` and nothing else, in all the ways in which
agents treat a conversation: they retry, take back, compact, call sub-agents, change their tools, leave in the middle.

Constrained sampling makes random weights call tools in the family's own format, in whatever tokens.

    agents = Agents(router.url)
    await agents.run()
    agents.log                                     what each request was, as its agent knows it
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from tests.support.tiers import size
from tests.support.tokenizers import tokenizer
from tests.support.waiting import PATIENCE

AGENTS, TURNS = size(heavy=(32, 20), otherwise=(8, 10))
EVENTS_AT = size(heavy=(5, 10, 15), otherwise=(3, 5, 8))  # turns at which something happens
SUB_AGENT_TURNS = 3

Message = Mapping[str, Any]
#: Qwen3 ids: <|endoftext|>, <|im_start|>, <|im_end|>, <think>.
END_OF_TEXT, *_ = MARKERS = (151643, 151644, 151645, 151667)
LIKELY = 9.5  # a bias that makes each of them come up once in some fifteen tokens
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
    return {"type": "function", "function": {"name": name, "description": name.title(), "parameters": parameters}}


TOOLS = [tool("go")]
MORE_TOOLS = [tool("go"), tool("look")]
CALL = r'<tool_call>\n\{"name": "go", "arguments": \{"n": "[a-zé ]{1,3}"\}\}\n</tool_call>'
SPACED = r'<tool_call>\n\{"name":"go", "arguments":\{ "n":"[a-zé ]{1,3}"\}\}\n</tool_call>'
#: What a turn is asked for: by its name, arguments of `create`.
TEXTS: Mapping[str, Mapping[str, Any]] = {
    "words": {"extra_body": {"regex": "[a-zé ]{3,20}"}},
    "thought": {"extra_body": {"regex": r"<think>\n[a-z ]{3,8}\n</think>\n\n[a-z ]{3,8}"}},
    "cut by length": {"max_tokens": 8},
    "stop string": {"stop": ["#"], "extra_body": {"regex": "[a-z]{3,8}#[a-z]{9}"}},
    "stop token of its own": {
        "max_tokens": 10,
        "extra_body": {"stop_token_ids": [END_OF_TEXT]},
        "logit_bias": {str(END_OF_TEXT): LIKELY},
    },
    "special tokens": {"max_tokens": 10, "logit_bias": dict.fromkeys(map(str, MARKERS), LIKELY)},
}
CALLS: Mapping[str, str] = {
    "call": CALL,
    "call spelled otherwise": SPACED,
    "two calls": rf"{CALL}\n{CALL}",
    "words and a call": rf"[a-z ]{{2,6}}\n{CALL}",
}
RESULTS = ("done", '{"ok": true, "n": 3}', "  spaced \n", "naïve 混合 🚀", "a\n\nb", "")
QUESTIONS = ("Go on", "Why?", "And\nthen", "Weiter, bitte – größer!", "继续", " ok ")


@dataclass(frozen=True)
class Asked:
    """One request that was answered, as its agent knows it."""

    kind: str
    messages: tuple[Message, ...]
    tools: Sequence[Any] | None
    answers: tuple[Message, ...]  # one for each choice


@dataclass
class Log:
    """What the agents of a run did."""

    asked: dict[str, Asked] = field(default_factory=dict)  # by request id
    reasons: Counter[tuple[str, str | None]] = field(default_factory=Counter)  # of each session's turns
    requests: int = 0
    turns: int = 0  # without what happens beside them
    broken_off: int = 0
    repeated: int = 0  # answers that came from the router, since the turn had been answered


@functools.cache
def usual_tokens() -> dict[str, float]:
    """A bias towards the tokens that a call is usually made of, which still leaves many others: short calls."""
    written = tokenizer("qwen3").encode('<tool_call>\n{"name": "go", "arguments": {"n": "a"}}\n</tool_call>')
    return dict.fromkeys(map(str, written), 4.0)


def arguments_for(kind: str) -> Mapping[str, Any]:
    """The arguments of `create` that make an answer of a kind."""
    return TEXTS[kind] if kind in TEXTS else {"extra_body": {"regex": CALLS[kind]}, "logit_bias": usual_tokens()}


class Agent:
    """One episode. `streaming`: always, never, or (None) now and then."""

    def __init__(
        self,
        client: AsyncOpenAI,
        session: str,
        dice: random.Random,
        log: Log,
        *,
        streaming: bool | None,
        role: str = "an agent",
        tools: list[Any] | None = TOOLS,
        reason: str | None = None,
    ) -> None:
        self._client = client
        self._session = session
        self._dice = dice
        self._log = log
        self._streaming = streaming
        self._tools = tools
        self._reason = reason  # of its next turn
        self._count = 0
        self._history: list[Message] = [
            {"role": "system", "content": f"You are {role}."},
            {"role": "user", "content": f"Go {dice.randint(1, 9)} steps."},
        ]
        self._sent: list[int] = []  # how many messages each turn of this history was sent with

    async def run(self, turns: int, events: Mapping[int, str]) -> None:
        """The whole episode."""
        for turn in range(turns):
            answer = await EVENTS[events[turn]](self, self._kind()) if turn in events else await self._ask(self._kind())
            self._log.turns += 1
            self._sent.append(len(self._history))
            self._history += [answer, *self._replies(answer)]

    def _kind(self) -> str:
        if self._tools and self._dice.random() < 0.4:
            return self._dice.choice(["call", "call", *CALLS])
        return self._dice.choice([*TEXTS])

    def _replies(self, answer: Message) -> list[Message]:
        """What the agent says behind an answer: results of the tools it called, or a question. Never twice the same."""
        self._count += 1
        calls = answer.get("tool_calls") or []
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{self._dice.choice(RESULTS)}{self._count}"}
            for call in calls
        ]
        return results or [{"role": "user", "content": f"{self._count} {self._dice.choice(QUESTIONS)}"}]

    async def _ask(self, kind: str) -> Message:
        reason, self._reason = self._reason, None
        return (await self._answers(kind, reasons=(reason,)))[0]

    # What happens

    async def same_turn_id(self, kind: str) -> Message:
        turn_id, stream = f"turn-{self._count}", self._streams()
        (first,) = await self._answers(kind, reasons=(None,), turn_id=turn_id, stream=stream)
        (second,) = await self._answers(kind, reasons=(), turn_id=turn_id, stream=stream)
        self._log.repeated += 1
        assert first == second
        return second

    async def same_turn_id_at_once(self, kind: str) -> Message:
        turn_id, stream = f"turn-{self._count}", self._streams()
        both = await asyncio.gather(
            self._answers(kind, reasons=(None,), turn_id=turn_id, stream=stream),
            self._answers(kind, reasons=(), turn_id=turn_id, stream=stream),
        )
        self._log.repeated += 1
        assert both[0] == both[1]
        return both[0][0]

    async def retry(self, kind: str) -> Message:
        await self._answers(kind, reasons=(None,))
        return (await self._answers(kind, reasons=("retry",)))[0]

    async def edited_question(self, kind: str) -> Message:
        """Something else is said behind the answer before the last; half of the time the agent goes on from there."""
        answered = self._sent[-2] + 1
        edited = [*self._history[:answered], *self._replies(self._history[answered - 1])]
        (answer,) = await self._answers(kind, messages=edited, reasons=("edited_history",))
        if self._dice.random() < 0.5:
            return await self._ask(self._kind())
        self._history, self._sent = edited, self._sent[:-1]
        return answer

    async def edited_answer(self, kind: str) -> Message:
        """The last answer is replaced by words of the agent's."""
        words = {"role": "assistant", "content": f"I take that back, {self._count}."}
        self._history = [*self._history[: self._sent[-1]], words, *self._replies(words)]
        return (await self._answers(kind, reasons=("edited_history",)))[0]

    async def compaction(self, kind: str) -> Message:
        summary = {"role": "user", "content": f"So far: {self._count} steps. Go on."}
        self._history, self._sent = [self._history[0], summary], []
        return (await self._answers(kind, reasons=("compaction",)))[0]

    async def sub_agent(self, kind: str) -> Message:
        critic = Agent(
            self._client,
            self._session,
            self._dice,
            self._log,
            streaming=self._streaming,
            role="a critic",
            tools=None,
            reason="sub_agent",
        )
        await critic.run(SUB_AGENT_TURNS, {})
        return await self._ask(kind)

    async def changed_tools(self, kind: str) -> Message:
        self._tools = MORE_TOOLS
        return (await self._answers(kind, reasons=("changed_tools",)))[0]

    async def broken_off(self, kind: str) -> Message:
        """The agent leaves in the middle of an answer and asks again."""
        asked = self._arguments(ENDLESS, self._history, turn_id=None)
        async with await self._client.chat.completions.create(**asked, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        self._log.broken_off += 1
        return await self._ask(kind)

    async def two_choices(self, kind: str) -> Message:
        return self._dice.choice(await self._answers(kind, reasons=(None, "choice"), n=2))

    async def parallel(self, kind: str) -> Message:
        """Two questions at once; the agent goes on with the first."""
        other = [*self._history[:-1], {**self._history[-1], "content": f"Or else {self._count}?"}]
        first, _ = await asyncio.gather(
            self._answers(kind, reasons=(None,)),
            self._answers(self._kind(), messages=other, reasons=("parallel",)),
        )
        return first[0]

    # Requests

    def _streams(self) -> bool:
        return self._streaming if self._streaming is not None else self._dice.random() < 0.5

    def _arguments(self, kind: Mapping[str, Any], messages: Sequence[Message], turn_id: str | None) -> dict[str, Any]:
        self._log.requests += 1
        headers = {"X-Request-Id": f"{self._session}.{self._log.requests}"}
        if turn_id is not None:
            headers["X-Turn-Id"] = turn_id
        given = {"tools": self._tools} if self._tools else {}
        common: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 200, "extra_headers": headers}
        return {**common, **given, **kind}

    async def _answers(
        self,
        kind: str,
        *,
        reasons: Sequence[str | None],
        messages: Sequence[Message] | None = None,
        turn_id: str | None = None,
        n: int = 1,
        stream: bool | None = None,
    ) -> list[Message]:
        """The answers to one request, one a choice; `reasons` are those of the turns that it makes."""
        sent = tuple(self._history if messages is None else messages)
        read = self._streamed if (self._streams() if stream is None else stream) else self._whole
        asked = self._arguments(arguments_for(kind), sent, turn_id) | ({"n": n} if n > 1 else {})
        answers = await read(asked)
        assert len(answers) == n
        request_id = asked["extra_headers"]["X-Request-Id"]
        self._log.asked[request_id] = Asked(kind, sent, self._tools, tuple(answers))
        self._log.reasons.update((self._session, reason) for reason in reasons)
        return answers

    async def _whole(self, asked: Mapping[str, Any]) -> list[Message]:
        answer = await self._client.chat.completions.create(**asked)
        return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]

    async def _streamed(self, asked: Mapping[str, Any]) -> list[Message]:
        messages: dict[int, dict[str, Any]] = {}
        async with await self._client.chat.completions.create(**asked, stream=True) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    message = messages.setdefault(choice.index, {"role": "assistant", "content": ""})
                    message["content"] += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or ():
                        _take_call(message.setdefault("tool_calls", []), piece)
        return [message for _, message in sorted(messages.items())]


#: What happens at a turn, in place of an ordinary question.
EVENTS: Mapping[str, Callable[[Agent, str], Awaitable[Message]]] = {
    "same turn id": Agent.same_turn_id,
    "same turn id at once": Agent.same_turn_id_at_once,
    "retry": Agent.retry,
    "edited question": Agent.edited_question,
    "edited answer": Agent.edited_answer,
    "compaction": Agent.compaction,
    "sub-agent": Agent.sub_agent,
    "changed tools": Agent.changed_tools,
    "broken off": Agent.broken_off,
    "two choices": Agent.two_choices,
    "parallel": Agent.parallel,
}


def _take_call(calls: list[dict[str, Any]], piece: Any) -> None:
    if piece.index == len(calls):
        calls.append({"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}})
    calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""


@dataclass
class Agents:
    """`await Agents(url).run()`: all of them at once, each in a session of its own."""

    url: str
    count: int = AGENTS
    turns: int = TURNS
    seed: int = 0
    log: Log = field(default_factory=Log)
    sessions: list[str] = field(default_factory=list)

    async def run(self) -> None:
        self.sessions = [f"agent-{number}" for number in range(self.count)]
        await asyncio.gather(*(self._episode(number, name) for number, name in enumerate(self.sessions)))

    async def _episode(self, number: int, session: str) -> None:
        async with (
            aiohttp.ClientSession(self.url) as http,
            http.post("/sessions", json={"session_id": session}) as reply,
        ):
            assert reply.status == 200
            base_url = (await reply.json())["base_url"]
        dice = random.Random(f"{self.seed}/{number}")
        streaming = {0: True, 1: False}.get(number % 4)
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=10 * PATIENCE) as client:
            agent = Agent(client, session, dice, self.log, streaming=streaming)
            names = [*EVENTS]
            events = {turn: names[(number + 4 * place) % len(names)] for place, turn in enumerate(EVENTS_AT)}
            await agent.run(self.turns, events)
