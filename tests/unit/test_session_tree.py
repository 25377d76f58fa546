"""A session's tree: where a request's turns hang, why, which tokens a line has, and what an answer leaves."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.sessions.equality import MEANING
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from tests.support.sessions import SPECIAL, STOP, SYSTEM, Scene, assistant, history, user

START = [SYSTEM, user("Add.")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_the_first_message_that_was_edited_is_shown_with_its_field_and_both_texts() -> None:
    scene = Scene()
    scene.follow(scene.turn(START, "The sum is " + "5" * 300), user("b"))
    edited = scene.turn([*START, assistant("The sum is " + "5" * 299 + "6"), user("b")])
    assert scene.edit(edited) is not None
    held, sent = scene.edit(edited)["held"], scene.edit(edited)["sent"]
    assert (scene.edit(edited)["message"], scene.edit(edited)["field"]) == (2, "content")
    assert (held, sent) == ("…" + "5" * 41, "…" + "5" * 40 + "6")


def test_tools_and_settings_that_change_are_shown() -> None:
    scene = Scene()
    first = scene.turn(START, tools=TOOLS)
    less = scene.follow(first, user("more"), tools=[])
    assert scene.edit(less) is not None
    assert (scene.edit(less)["field"], scene.edit(less)["sent"]) == ("tools", None)
    assert "add" in scene.edit(less)["held"]
    other = scene.follow(first, user("more"), tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    assert scene.edit(other) is not None
    assert (scene.edit(other)["field"], scene.edit(other)["sent"]) == (
        "chat_template_kwargs",
        '{"enable_thinking":false}',
    )


class Counted:
    """An equality that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, held: Message, sent: Message) -> bool:
        self.asked += 1
        return MEANING(held, sent)


def respelled(messages: Sequence[Message]) -> list[Message]:
    """As another library writes answers."""
    return [{**m, "refusal": None} if m["role"] == "assistant" else {**m} for m in messages]


def test_a_spelling_that_comes_back_each_time_is_read_once() -> None:
    equal = Counted()
    scene = Scene(equal=equal)
    turn = scene.turn(START)
    for number in range(50):
        turn = scene.turn([*respelled(history(turn)), user(f"{number}")])
    assert len(scene.session.roots) == 1
    assert equal.asked <= 50


def test_edited_history_is_walked_once_and_not_once_per_root() -> None:
    equal = Counted()
    scene = Scene(equal=equal)
    before = [SYSTEM, *(user(f"{number}") for number in range(100))]
    counts = []
    for number in range(60):
        scene.turn([*before, user(f"note {number}"), user("go on")])
        counts.append(equal.asked)
        equal.asked = 0
    assert len(scene.session.roots) == 60
    assert counts[-1] <= 10 * len(counts)


def copied(messages: Sequence[Message]) -> list[Message]:
    """As a parser gives them: equal, and other objects."""
    return [{**message} for message in messages]


def test_a_cleared_session_s_turns_are_gone_without_the_garbage_collector() -> None:
    scene = Scene()
    first = scene.turn(START)
    second = scene.follow(first, user("b"))
    gone = [weakref.ref(turn) for turn in (first, second)]
    gc.disable()
    try:
        scene.session.replies["t"] = None
        scene.session.clear()
        assert (scene.session.turns, scene.session.roots, scene.session.replies) == ([], [], {})
        everything = ParentMatch(None, tuple(copied(START)), b"")
        assert scene.session.history.intern(everything) == Session("new", now=0.0, clock=0.0).history.intern(everything)
        assert second.parent is first, "a request in flight keeps what it extends"
        del first, second
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_only_a_history_with_an_unrecorded_answer_is_marked() -> None:
    scene = Scene()
    first = scene.turn([SYSTEM, user("Add.")], "5")
    second = scene.follow(first, user("Again."))
    edited = scene.turn([SYSTEM, user("Add!"), first.answer, user("Go on")])
    assert not any(scene.classify(turn).unrecorded for turn in (first, second, edited))
    begun_anew = scene.turn([SYSTEM, user("Multiply."), assistant("6"), user("Again.")])
    appended = scene.follow(second, user("And?"), assistant("of its own"), user("Go on"))
    assert scene.classify(begun_anew).unrecorded
    assert scene.classify(appended).unrecorded
    assert not scene.classify(scene.follow(begun_anew, user("Go on"))).unrecorded  # the turn before says it
    assert scene.store.statistics.unrecorded_history == 2


@pytest.mark.parametrize(
    ("finish", "matched", "last", "ended"),
    [
        ("stop", STOP, STOP, True),
        ("stop", 5, 5, True),  # a stop token of the agent's own
        ("stop", 5, STOP, False),
        ("stop", "END", 5, False),
        ("length", None, STOP, False),
        ("tool_calls", None, STOP, True),
        ("tool_calls", None, SPECIAL - 1, False),
    ],
)
def test_a_turn_ended_itself_if_its_last_token_is_what_stopped_it(
    finish: str, matched: int | str | None, last: int, ended: bool
) -> None:
    scene = Scene()
    asked = scene.ask(START)
    generated = replace(scene.generated(asked, "ok", finish=finish), matched=matched)
    (turn,) = scene.record(asked, replace(generated, ids=[1, 2, last]))
    assert (turn.ended_itself, turn.last_id) == (ended, last)


def parsed_again(messages: list[Any]) -> list[Any]:
    """As each request's own parse has them."""
    parsed: list[Any] = orjson.loads(orjson.dumps(messages))
    return parsed


def long_session(scene: Scene, turns: int, *, rooted: bool) -> list[Turn]:
    """Turns that add 2000 characters each; `rooted`: none goes on in tokens."""
    sent: list[Any] = [SYSTEM]
    made = []
    for number in range(turns):
        sent.append(user(f"{number} " + "x" * 2000))
        asked = scene.ask(parsed_again(sent), segment="not_text" if rooted else None)
        if rooted:
            request = asked.request
            root = replace(request.parents[0], parent=None, appended=tuple(request.fields["messages"]))
            asked = replace(asked, request=replace(request, parents=[root], prompt=None), written=())
        made += scene.record(asked, scene.generated(asked, f"answer {number}"))
        sent.append({**made[-1].answer, "refusal": None})
    return made


@pytest.mark.parametrize("rooted", [False, True], ids=["continued", "a new root each turn"])
def test_messages_take_memory_in_proportion_to_the_turns(rooted: bool) -> None:
    tracemalloc.start()
    try:
        scene = Scene()
        long_session(scene, 2, rooted=rooted)
        gc.collect()
        before, counted = tracemalloc.get_traced_memory()[0], scene.session.nbytes
        made = long_session(scene, 100, rooted=rooted)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(made) == 100
    assert taken < 100 * 7_000
    assert 0.8 < (scene.session.nbytes - counted) / taken < 1.25, "what is counted is what is taken, about"
