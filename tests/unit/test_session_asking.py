"""Placing a chat request: what the continuation is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from middleware_hub.openai_session.continuing.continuation import Continuation, Extension, HeldEnd
from middleware_hub.openai_session.sessions.messages import strict
from middleware_hub.openai_session.sessions.tree import Session, Turn
from middleware_hub.openai_session.turns.asking import CHAT, Asked, ask
from miles_router.trajectory import Piece

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


class Told:
    """A continuation that notes what it renders with."""

    def __init__(self) -> None:
        self.tools: Sequence[Any] | None = None
        self.settings: Mapping[str, Any] | None = None

    def after(self, turn: HeldEnd, appended: Sequence[Any], tools: Any, settings: Mapping[str, Any]) -> Extension:
        self.tools, self.settings = tools, settings
        return Extension(0, [7, 8])


class Scene:
    """A session with one turn, which `asked` these fields, and its continuation."""

    def __init__(self, **asked: Any) -> None:
        self.told = Told()
        self.session = Session("s", now=0.0)
        self.history: list[Any] = [{"role": "user", "content": "Hi"}]
        first = self.ask(**asked)
        self.history.append({"role": "assistant", "content": "Yes"})
        turn = Turn(
            path=CHAT,
            parent=None,
            appended=first.place.appended,
            context=first.place.context,
            answer=self.history[-1],
            given=Piece.given([1, 2]),
            dropped=0,
            sampled=(Piece.sampled([3, 4], [-1.0, -1.0], "1"),),
            finish_reason="stop",
            ended_itself=True,
        )
        self.session.grow(turn, strict)
        self.history.append({"role": "user", "content": "And?"})

    def ask(self, **fields: Any) -> Asked:
        """The history, asked with these fields."""
        parsed = {"messages": self.history, **fields}
        told = cast(Continuation, self.told)
        return ask(self.session, parsed, path=CHAT, continuation=told, equal=strict, now=0.0)


def test_what_reasoning_means_for_the_template_is_told_as_the_engine_reads_it() -> None:
    scene = Scene(reasoning_effort="none")
    second = scene.ask(reasoning={"effort": "none"})
    assert scene.told.settings == {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}
    assert second.held is not None
    assert second.given is not None
    assert (second.held.tolist(), second.given.tokens.tolist()) == ([1, 2, 3, 4], [7, 8])


@pytest.mark.parametrize("effort", ["high", 0, None])
def test_a_turn_with_other_template_settings_continues_none(effort: object) -> None:
    assert Scene(reasoning_effort="none").ask(reasoning_effort=effort).given is None
    assert effort is None or Scene().ask(reasoning_effort=effort).given is None


@pytest.mark.parametrize(("choice", "shown"), [("auto", TOOLS), ("none", None), (TOOLS[1], TOOLS[1:])])
def test_a_turn_is_rendered_with_the_tools_that_the_held_one_was_rendered_with(choice: object, shown: object) -> None:
    scene = Scene(tools=TOOLS, tool_choice=choice)
    assert scene.ask(tools=TOOLS, tool_choice=choice).given is not None
    assert scene.told.tools == shown
    scene = Scene(tools=TOOLS)
    assert scene.ask(tools=TOOLS, tool_choice=choice).given is not None
    assert scene.told.tools == TOOLS
