"""Sessions without a socket: requests placed and answers recorded as the middleware does it, with ids made up here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.session import AgentRequest, PromptIds
from middleware_hub.openai_session.sessions.store import Bounds, SessionStore
from middleware_hub.openai_session.sessions.turn import Classification, Turn, contexts_of
from middleware_hub.openai_session.turns.plan import TurnGrant, TurnPlan
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from miles_router.engines.openai.choices import Choice
from miles_router.engines.paths import CHAT
from miles_router.trajectory import Piece, VersionRun

PLENTY = Bounds(sessions=1000, turns=10_000, session_bytes=1 << 40, total_bytes=1 << 40, idle_timeout=0.0)
#: Ids from here on are special tokens.
SPECIAL = 900_000
STOP = SPECIAL + 1
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def call(name: str = "add", arguments: str = "{}", call_id: str = "call_1") -> Mapping[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text: str, call_id: str = "call_1") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


class Scene:
    """One session. Each turn takes a second; its ids are new ones, so that every position can be told apart."""

    def __init__(self, bounds: Bounds = PLENTY, *, equal: Equality = MEANING) -> None:
        self.time = 1000.0
        self.equal = equal
        self.store = SessionStore(bounds, now=lambda: self.time, clock=lambda: self.time, equal=equal)
        self.session = self.store.create("s")
        self.recorder = TurnRecorder(self.store, lambda token: token >= SPECIAL, lambda ids: "", now=lambda: self.time)
        self._ids = itertools.count(1)

    def ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    def ask(
        self,
        messages: Sequence[Message],
        *,
        given: int = 2,
        dropped: int = 0,
        segment: str | None = None,
        side_call: bool = False,
        turn_id: str | None = None,
        **fields: Any,
    ) -> TurnPlan:
        """A request on its way; behind a held turn it gives `given` new ids, and drops the last `dropped` held ones."""
        parsed = {"messages": list(messages), **fields}
        place = self.session.history.find_parent(messages, [each.key for each in contexts_of(parsed)], self.equal)
        prompt = None
        if place.parent is not None:
            prompt = PromptIds(place.parent, Piece.given(self.ids(given)), dropped)
        request = AgentRequest(self.session, CHAT, parsed, (place,), self.time, prompt, segment=segment)
        written = () if prompt is None else self.store.written_ids.prompt(self.session.id, prompt)
        return TurnPlan(request, TurnGrant(parsed), written=written, turn_id=turn_id, side_call=side_call)

    def generated(
        self,
        plan: TurnPlan,
        reply: str | Message,
        *,
        sampled: int = 3,
        stop: bool = True,
        index: int = 0,
        finish: str = "stop",
        versions: Sequence[tuple[str, int, int]] | None = None,
    ) -> Choice:
        """An answer to it; of its `sampled` tokens the last is a stop token, unless told otherwise."""
        ids = self.ids(sampled)
        if stop and ids:
            ids[-1] = STOP
        return Choice(
            index=index,
            message=assistant(reply) if isinstance(reply, str) else reply,
            finish=finish,
            matched=STOP if stop else None,
            ids=ids,
            logprobs=[-1.0 / each for each in ids],
            versions=[VersionRun(*run) for run in ([("1", 0, sampled)] if versions is None else versions)],
            prompt=None if plan.request.prompt is not None else [7, 8, 9],
            facts={"rid": f"rid-{index}", "cached_tokens": 0, "versions": "engine"},
        )

    def record(self, plan: TurnPlan, *choices: Choice) -> list[Turn]:
        before = len(self.session.turns)
        self.recorder.record(plan, choices, {"worker": "http://w"})
        return [*self.session.turns[before:]]

    def turn(self, messages: Sequence[Message], reply: str | Message = "ok", **options: Any) -> Turn:
        """A request and its answer; `options` of `ask` and `generated`."""
        of_answer = ("sampled", "stop", "finish", "versions")
        plan = self.ask(messages, **{name: value for name, value in options.items() if name not in of_answer})
        choice = self.generated(plan, reply, **{name: options[name] for name in of_answer if name in options})
        self.time += 1
        (turn,) = self.record(plan, choice)
        return turn

    def choices(self, messages: Sequence[Message], *replies: str, **options: Any) -> list[Turn]:
        plan = self.ask(messages, n=len(replies), **options)
        self.time += 1
        return self.record(plan, *(self.generated(plan, reply, index=i) for i, reply in enumerate(replies)))

    def classify(self, turn: Turn) -> Classification:
        """What the turns before it say of a turn."""
        return self.session.history.classify(turn)

    def reason(self, turn: Turn) -> str | None:
        return self.classify(turn).reason

    def edit(self, turn: Turn) -> Any:
        return self.classify(turn).edit

    def follow(self, turn: Turn, *appended: Message, **options: Any) -> Turn:
        """The next turn behind one, its whole history sent along."""
        return self.turn([*history(turn), *appended], **options)


def history(turn: Turn) -> list[Message]:
    return [message for each in turn.line() for message in (*each.appended, each.answer)]
