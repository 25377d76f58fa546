"""Answers become turns: all choices of one or none, counted exactly, and nothing else is kept of their requests."""

from __future__ import annotations

import gc
import logging
import tracemalloc
import weakref
from dataclasses import replace
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.messages import message_bytes
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.openai_session.turns.plan import TurnGrant, TurnPlan
from middleware_hub.openai_session.turns.recorder import MAX_UNTRACED, TURN_BYTES
from tests.support.sessions import SPECIAL, STOP, SYSTEM, Scene, assistant, history, user

START = [SYSTEM, user("Add.")]


def test_a_turn_has_what_was_asked_and_answered() -> None:
    scene = Scene()
    asked = scene.ask(START, stream=True, turn_id="t")
    scene.time += 2
    (turn,) = scene.record(asked, scene.generated(asked, assistant("ok", reasoning_content="hm")))
    assert (turn.appended, turn.answer) == (tuple(START), assistant("ok", reasoning_content="hm"))
    assert turn.given.tokens.tolist() == [7, 8, 9]
    assert [(piece.version, piece.tokens.tolist()) for piece in turn.sampled] == [("1", [1, 2, STOP])]
    assert (turn.path, turn.choice, turn.dropped, turn.finish_reason) == ("/v1/chat/completions", 0, 0, "stop")
    assert turn.facts == {
        "worker": "http://w",
        "rid": "rid-0",
        "cached_tokens": 0,
        "cache_versions": [],
        "versions": "engine",
        "matched": STOP,
        "asked_at": 1000.0,
        "answered_at": 1002.0,
        "turn_id": "t",
        "streamed": True,
    }


def test_numbers_of_all_turns_are_counted() -> None:
    scene = Scene()
    first = scene.choices(START, "a", "b")[1]
    scene.follow(first, user("more"), given=4, dropped=1, sampled=2)
    recorder = scene.recorder
    assert (recorder.statistics.turns, recorder.statistics.sampled_tokens) == (3, 8)
    assert (recorder.statistics.given_tokens, recorder.statistics.reused_tokens) == (3 + 4, 5)


def test_choices_share_what_was_given_and_what_was_asked() -> None:
    scene = Scene()
    first, second = scene.choices(START, "a", "b")
    assert first.given is second.given
    assert first.appended is second.appended
    inner = scene.choices([*history(second), user("more")], "a", "b")
    assert inner[0].given is inner[1].given


def test_equal_prompts_of_two_requests_are_not_choices_of_one() -> None:
    scene = Scene()
    assert scene.turn(START).given is not scene.turn(START).given


@pytest.mark.parametrize("prompt", [None, [], ["a"], [-1], [[1]]])
def test_a_root_without_the_ids_of_its_prompt_is_unusable(prompt: Any) -> None:
    scene = Scene()
    asked = scene.ask(START)
    with pytest.raises(UnusableAnswer, match="prompt"):
        scene.record(asked, replace(scene.generated(asked, "ok"), prompt=prompt))
    assert scene.session.turns == []


def test_a_prompt_that_the_engine_tells_must_be_the_one_it_was_sent() -> None:
    scene = Scene()
    first = scene.turn(START)
    asked = scene.ask([*history(first), user("more")], dropped=1)
    assert asked.request.prompt is not None
    sent = asked.request.prompt.ids().tolist()
    for told in ([*sent, 1], sent[1:], [0, *sent[1:]]):
        with pytest.raises(UnusableAnswer, match="other ids than it was sent"):
            scene.record(asked, replace(scene.generated(asked, "ok"), prompt=told))
    assert len(scene.record(asked, replace(scene.generated(asked, "ok"), prompt=sent))) == 1


def test_all_choices_are_held_or_none() -> None:
    scene = Scene()
    asked = scene.ask(START)
    good, bad = scene.generated(asked, "a"), replace(scene.generated(asked, "b", index=1), logprobs=[])
    before = scene.session.nbytes
    with pytest.raises(UnusableAnswer):
        scene.record(asked, good, bad)
    assert (scene.session.turns, scene.session.nbytes, scene.store.nbytes) == ([], before, before)
    assert (
        scene.recorder.statistics.turns,
        scene.recorder.statistics.given_tokens,
        scene.recorder.statistics.sampled_tokens,
    ) == (0, 0, 0)


def test_the_answer_of_a_deleted_session_is_dropped() -> None:
    scene = Scene()
    first = scene.turn(START)
    asked = scene.ask([*history(first), user("more")])
    generated = scene.generated(asked, "ok")
    scene.store.delete(scene.session)
    assert scene.record(asked, generated) == []
    assert (scene.session.turns, scene.store.nbytes, scene.recorder.statistics.turns) == ([], 0, 1)


@pytest.mark.parametrize(
    ("finish", "matched", "last", "ended"),
    [
        ("stop", STOP, STOP, True),
        ("stop", 5, 5, True),  # a stop token of the agent's own
        ("stop", 5, STOP, False),
        ("stop", "END", 5, False),
        ("stop", None, STOP, False),
        ("length", None, STOP, False),
        ("length", STOP, STOP, False),
        ("abort", None, STOP, False),
        ("tool_calls", None, STOP, True),
        ("tool_calls", None, SPECIAL - 1, False),
        ("tool_calls", "</tool_call>", 5, False),
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


# Bytes


def test_the_account_is_of_arrays_once_messages_once_and_turns() -> None:
    scene = Scene()
    empty = scene.session.nbytes
    first, second = scene.choices(START, "a", "b")
    words = sum(map(message_bytes, [*START, first.answer, second.answer]))
    assert scene.session.nbytes - empty == 3 * 4 + 2 * 3 * 8 + words + 2 * TURN_BYTES
    before = scene.session.nbytes
    third = scene.follow(second, user("more"), given=5, sampled=1)
    words = message_bytes(third.appended[0]) + message_bytes(third.answer)
    assert scene.session.nbytes - before == 5 * 4 + 8 + words + TURN_BYTES
    assert scene.store.nbytes == scene.session.nbytes


def test_a_retry_costs_its_answer_and_its_tokens() -> None:
    scene = Scene()
    scene.turn([SYSTEM, user("x" * 100_000)])
    before = scene.session.nbytes
    scene.turn([SYSTEM, user("x" * 100_000)])
    assert scene.session.nbytes - before < 2 * TURN_BYTES


def test_tools_are_held_once() -> None:
    scene = Scene()
    tools = [{"type": "function", "function": {"name": "add", "description": "x" * 50_000}}]
    turn = scene.turn(START, tools=tools)
    before = scene.session.nbytes
    later = scene.follow(turn, user("more"), tools=tools)
    again = scene.turn(START, tools=tools)
    assert later.context is turn.context is again.context
    assert before > 50_000 > scene.session.nbytes - before


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
            root = replace(request.places[0], parent=None, appended=tuple(request.fields["messages"]))
            asked = replace(asked, request=replace(request, places=[root], prompt=None), written=())
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


class Body(dict[str, Any]):
    """A parsed request that can be watched."""


def test_nothing_is_kept_of_a_request_but_its_messages() -> None:
    scene = Scene()
    asked, body = scene.ask(START), Body({"messages": START, "metadata": {"x": "y" * 1000}})
    asked = replace(asked, request=replace(asked.request, fields=body), grant=TurnGrant(body))
    gone: list[weakref.ref[Any]] = [weakref.ref(asked), weakref.ref(body)]
    (turn,) = scene.record(asked, scene.generated(asked, "ok"))
    del asked, body
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert not any(isinstance(each, (AgentRequest, TurnPlan)) for each in gc.get_referents(turn))


# What is not recorded


def test_a_request_that_is_not_recorded_is_said_to_be_so(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with caplog.at_level(logging.WARNING):
        scene.recorder.note_untraced("/v1/messages", scene.session, "this endpoint is not traced", "r1")
    assert scene.session.untraced == [
        {"path": "/v1/messages", "reason": "this endpoint is not traced", "request_id": "r1", "at": 1000.0}
    ]
    assert [record.getMessage() for record in caplog.records] == ["turn_not_traced"]
    assert scene.recorder.statistics.untraced == 1


def test_requests_that_are_not_recorded_take_no_memory_without_end() -> None:
    scene = Scene()
    for number in range(MAX_UNTRACED + 5):
        scene.recorder.note_untraced("/v1/messages", scene.session, "not traced", f"r{number}")
    assert (len(scene.session.untraced), scene.recorder.statistics.untraced) == (MAX_UNTRACED, MAX_UNTRACED + 5)
