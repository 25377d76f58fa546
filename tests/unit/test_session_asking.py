"""Placing a chat request: what the continuation is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from middleware_hub.openai_session.continuing.continuation import Continuation, Extension, HeldEnd
from middleware_hub.openai_session.sessions.messages import strict
from middleware_hub.openai_session.sessions.tree import Session, Turn
from middleware_hub.openai_session.turns.asking import CHAT, ask
from miles_router.trajectory import Piece


class Told:
    """A continuation that notes its template settings."""

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] | None = None

    def after(self, turn: HeldEnd, appended: Sequence[Any], tools: Any, settings: Mapping[str, Any]) -> Extension:
        self.settings = settings
        return Extension(0, [7, 8])


def test_what_reasoning_means_for_the_template_is_told_as_the_engine_reads_it() -> None:
    question = {"role": "user", "content": "Hi"}
    asked = {"messages": [question], "reasoning_effort": "none"}
    told, session = Told(), Session("s", now=0.0)
    first = ask(session, asked, path=CHAT, continuation=cast(Continuation, told), equal=strict, now=0.0)
    answer = {"role": "assistant", "content": "Yes"}
    turn = Turn(
        path=CHAT,
        parent=None,
        appended=first.place.appended,
        context=first.place.context,
        answer=answer,
        given=Piece.given([1, 2]),
        dropped=0,
        sampled=(Piece.sampled([3, 4], [-1.0, -1.0], "1"),),
        finish_reason="stop",
        ended_itself=True,
    )
    session.grow(turn, strict)
    more = {**asked, "messages": [question, answer, question]}
    second = ask(session, more, path=CHAT, continuation=cast(Continuation, told), equal=strict, now=1.0)
    assert told.settings == {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}
    assert second.held is not None
    assert second.given is not None
    assert (second.held.tolist(), second.given.tokens.tolist()) == ([1, 2, 3, 4], [7, 8])
    other = {**more, "reasoning_effort": "high"}
    assert ask(session, other, path=CHAT, continuation=cast(Continuation, told), equal=strict, now=2.0).given is None
