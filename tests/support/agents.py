"""Tool agents over the official clients that know a `base_url` and nothing else, in all the ways in which agents treat
a conversation: they retry, take back, compact, call sub-agents, change their tools, leave in the middle.

On a real engine constrained sampling makes random weights call tools in the family's own format, in whatever tokens. A
simulated worker has a script for that (`Improvised`): what is constrained cannot be carried on.

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

from miles_router.testing import Tokenizer
from miles_router.testing.worker.model.constrained import spelled, stop_id, text_matching
from miles_router.testing.worker.model.script import Script
from tests.support.agent_apis import APIS, AgentApi, Message
from tests.support.tiers import size
from tests.support.tokenizers import tokenizer

AGENTS, TURNS = size(heavy=(32, 20), otherwise=(8, 10))
EVENTS_AT = size(heavy=(5, 10, 15), otherwise=(3, 5, 8))  # turns at which something happens
SUB_AGENT_TURNS = 3

#: Qwen3 ids: <|endoftext|>, <|im_start|>, <|im_end|>, <think>.
END_OF_TEXT, *_ = MARKERS = (151643, 151644, 151645, 151667)
LIKELY = 9.5  # a bias that makes each of them come up once in some fifteen tokens
LONG, ENDLESS = ({"max_tokens": most, "extra_body": {"ignore_eos": True}} for most in (200, 4000))


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
    left: set[str] = field(default_factory=set)  # ids of requests whose agent left in the middle
    repeated: int = 0  # requests without an answer of their own: the turn had been answered, or was asked for again


@functools.cache
def usual_tokens() -> dict[str, float]:
    """A bias towards the tokens that a call is usually made of, which still leaves many others: short calls."""
    written = tokenizer("qwen3").encode('<tool_call>\n{"name": "go", "arguments": {"n": "a"}}\n</tool_call>')
    return dict.fromkeys(map(str, written), 4.0)


def arguments_for(kind: str) -> Mapping[str, Any]:
    """The arguments of `create` that make an answer of a kind."""
    if kind == "long":
        return LONG
    return TEXTS[kind] if kind in TEXTS else {"extra_body": {"regex": CALLS[kind]}, "logit_bias": usual_tokens()}


class Improvised(Script):
    """What a simulated worker says that is asked for kinds of answers, by the name of a model: each time something
    else, in tokens that encoding it would not give."""

    PATTERNS: Mapping[str, str] = {
        "words": "[a-zé]{2}[a-zé ]{3,20}",
        "thought": r"<think>\n[a-z]{2}[a-z ]{3,8}\n</think>\n\n[a-z]{2}[a-z ]{3,8}",
        "cut by length": "[a-z]{60}",
        "stop string": "[a-z]{3,8}#[a-z]{9}",
        "stop token of its own": "[a-z]{3,8}",
        "special tokens": "[a-z]{3,8}",
        **CALLS,
    }

    def __init__(self) -> None:
        super().__init__([])
        self._dice = random.Random(0)

    def play(
        self, request: Mapping[str, Any], input_ids: Sequence[int], tokenizer: Tokenizer, *, thinks: bool = False
    ) -> list[int] | None:
        """An answer of the kind that is named; a long one, where none is."""
        kind = request["model"]
        text = text_matching(self.PATTERNS[kind], self._dice) if kind in self.PATTERNS else "word " * 4000
        nothing = "<think></think>" if thinks and not text.startswith("<think>") else ""
        ids = spelled(nothing + text, tokenizer, self._dice)
        if kind == "special tokens":
            ids += [self._dice.choice(MARKERS[1:2]), *tokenizer.encode("b")]
        return [*ids, END_OF_TEXT if kind == "stop token of its own" else stop_id(tokenizer)]


def improvised_for(kind: str) -> Mapping[str, Any]:
    if kind == "long":
        return LONG
    asked = dict(TEXTS.get(kind, {}))
    own = {name: value for name, value in asked.pop("extra_body", {}).items() if name != "regex"}
    asked.pop("logit_bias", None)
    return {**asked, "model": kind, **({"extra_body": own} if own else {})}


class Agent:
    """One episode. `streaming`: always, never, or (None) now and then. It speaks the first of its APIs, its sub-agents
    the next one."""

    def __init__(
        self,
        apis: Sequence[AgentApi],
        session: str,
        dice: random.Random,
        log: Log,
        *,
        streaming: bool | None,
        arguments: Callable[[str], Mapping[str, Any]],
        role: str = "an agent",
        tools: list[Any] | None = TOOLS,
        reason: str | None = None,
    ) -> None:
        self._apis = apis
        self._api = apis[0]
        self._arguments_for = arguments
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
        for turn in range(turns):
            event = EVENTS[events[turn]] if turn in events else Agent._ask
            answer = await event(self, self._kind())
            self._log.turns += 1
            self._sent.append(len(self._history))
            self._history += [answer, *self._replies(answer)]

    def _kind(self) -> str:
        if self._tools and self._dice.random() < 0.4:
            return self._dice.choice(["call", "call", *CALLS])
        return self._dice.choice([kind for kind in TEXTS if kind not in self._api.lacks])

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
            [*self._apis[1:], self._api],
            self._session,
            self._dice,
            self._log,
            streaming=self._streaming,
            arguments=self._arguments_for,
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
        self._log.left.add(asked["extra_headers"]["X-Request-Id"])
        await self._api.leave(asked)
        return await self._ask(kind)

    async def dropped_connection(self, kind: str) -> Message:
        """The connection is lost in the middle of an answer, and the agent asks again for the same turn: it may have
        been recorded, or not."""
        turn_id = f"turn-{self._count}"
        asked = self._arguments(LONG, self._history, turn_id)
        request_id = asked["extra_headers"]["X-Request-Id"]
        self._log.left.add(request_id)
        await self._api.leave(asked)
        (answer,) = await self._answers("long", reasons=(None,), turn_id=turn_id, stream=True)
        self._log.asked[request_id] = Asked(kind, tuple(self._history), self._tools, (answer,))
        self._log.repeated += 1
        return answer

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
        asked = self._arguments(self._arguments_for(kind), sent, turn_id) | ({"n": n} if n > 1 else {})
        answers = await self._api.answers(asked, stream=self._streams() if stream is None else stream)
        assert len(answers) == n
        request_id = asked["extra_headers"]["X-Request-Id"]
        self._log.asked[request_id] = Asked(kind, sent, self._tools, tuple(answers))
        self._log.reasons.update((self._session, reason) for reason in reasons)
        return answers


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
    "dropped connection": Agent.dropped_connection,
    "two choices": Agent.two_choices,
    "parallel": Agent.parallel,
}


@dataclass
class Agents:
    """`await Agents(url).run()`: all of them at once, each in a session of its own.

    Attributes:
        events_at: turns at which something happens.
        without: names of `EVENTS` that do not happen.
        apis: names of `APIS`; an agent speaks one, the next agent the next.
        arguments: of `create`, for a kind of answer.
    """

    url: str
    count: int = AGENTS
    turns: int = TURNS
    seed: int = 0
    events_at: Sequence[int] = EVENTS_AT
    without: frozenset[str] = frozenset()
    apis: Sequence[str] = ("chat",)
    arguments: Callable[[str], Mapping[str, Any]] = arguments_for
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
            address = (await reply.json())["anthropic_base_url"]
        dice = random.Random(f"{self.seed}/{number}")
        streaming = {0: True, 1: False}.get(number % 4)
        first = number % len(self.apis)
        apis = [APIS[name](address) for name in (*self.apis[first:], *self.apis[:first])]
        try:
            agent = Agent(apis, session, dice, self.log, streaming=streaming, arguments=self.arguments)
            names = [name for name in EVENTS if name not in apis[0].lacks | self.without]
            events = {turn: names[(number + 4 * place) % len(names)] for place, turn in enumerate(self.events_at)}
            await agent.run(self.turns, events)
        finally:
            for api in apis:
                await api.close()
