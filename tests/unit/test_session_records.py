"""A session as its trainer reads it: the records of its turns, and the tree they form."""

from __future__ import annotations

from typing import Any

import orjson

from middleware_hub.openai_session.export.records import (
    classified,
    compact_answer,
    metadata_of,
    record,
    summary,
    turn_span,
)
from middleware_hub.openai_session.sessions.session import Session
from tests.support.sessions import SYSTEM, Scene, assistant, user

START = [SYSTEM, user("Add.")]


def described(session: Session) -> Any:
    """The answer to `GET /sessions/{id}`."""
    return orjson.loads(compact_answer(session.id, classified(session), metadata_of(session)))


def test_a_record_says_what_a_turn_was_asked_and_answered_and_where() -> None:
    scene = Scene()
    first = scene.turn(START, "a", sampled=2)
    second = scene.follow(
        first, user("more"), given=4, dropped=1, sampled=3, finish="length", versions=[("1", 0, 1), ("2", 1, 3)]
    )
    found = record(second, scene.classify(second))
    assert found == {
        "timestamp": 1002.0,
        "request_timestamp": 1001.0,
        "method": "POST",
        "status_code": 200,
        "request": {"messages_before": 3},
        "turn": 1,
        "parent": 0,
        "reason": None,
        "edit": None,
        "path": "/v1/chat/completions",
        "messages": (user("more"),),
        "response": assistant("ok"),
        "unrecorded_history": False,
        "finish_reason": "length",
        "choice": 0,
        "span": [8, 11],
        "given_tokens": 4,
        "dropped_tokens": 1,
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "weight_versions": [{"version": "1", "start": 8, "end": 9}, {"version": "2", "start": 9, "end": 11}],
        **second.facts,
    }
    assert record(first, scene.classify(first))["parent"] is None
    assert record(first, scene.classify(first))["weight_versions"] == [{"version": "1", "start": 3, "end": 5}]


def test_the_facts_of_a_turn_hide_nothing_of_its_record() -> None:
    scene = Scene()
    turn = scene.turn(START)
    own = set(record(turn, scene.classify(turn))) - set(turn.facts)
    assert own >= {"turn", "parent", "reason", "path", "messages", "response", "span", "weight_versions"}


def test_spans_are_positions_in_the_tokens_of_any_leaf_behind() -> None:
    scene = Scene()
    first = scene.turn(START)
    leaf = scene.follow(scene.follow(first, user("b"), given=5), user("c"), dropped=1)
    tokens = leaf.trajectory().tokens.tolist()
    for turn in leaf.line():
        start, end = record(turn, scene.classify(turn))["span"]
        sampled = [token for piece in turn.sampled for token in piece.tokens.tolist()]
        dropped = sum(child.dropped for child in scene.session.history.children(turn))
        assert tokens[start : end - dropped] == sampled[: len(sampled) - dropped]


def test_a_session_is_describe_with_its_tree() -> None:
    scene = Scene()
    scene.session.metadata["task"] = "sum"
    first = scene.turn(START)
    scene.follow(first, user("b"))
    scene.turn([user("else")])
    scene.recorder.note_untraced("/v1/messages", scene.session, "not traced", "r")
    found = described(scene.session)
    assert found["session_id"] == "s"
    assert [each["turn"] for each in found["records"]] == [0, 1, 2]
    metadata = found["metadata"]
    assert (metadata["task"], metadata["turns"], metadata["segments"]) == ("sum", 3, 2)
    assert (metadata["roots"], metadata["leaves"]) == ([0, 2], [1, 2])
    assert metadata["untraced"][0]["path"] == "/v1/messages"
    assert (metadata["created_at"], metadata["in_flight"]) == (1000.0, 0)
    assert metadata["bytes"] == scene.session.nbytes


def test_an_empty_session_is_described_too() -> None:
    found = described(Scene().session)
    assert (found["records"], found["metadata"]["roots"], found["metadata"]["leaves"]) == ([], [], [])


def test_a_session_s_line_counts_each_token_once() -> None:
    scene = Scene()
    scene.follow(scene.turn(START, sampled=2), user("b"), given=4, sampled=1)
    assert summary(scene.session) == {
        "session_id": "s",
        "turns": 2,
        "tokens": 3 + 2 + 4 + 1,
        "bytes": scene.session.nbytes,
        "in_flight": 0,
        "created_at": 1000.0,
        "last_used_at": 1000.0,
    }


def test_a_turn_s_span_has_what_was_counted_and_timed() -> None:
    scene = Scene()
    turn = scene.turn(START)
    assert turn_span(turn, scene.classify(turn), 5) == {
        "turn": 0,
        "start": 3,
        "end": 5,
        "finish_reason": "stop",
        "reason": None,
        "edit": None,
        "cached_tokens": 0,
        "cache_versions": [],
        "asked_at": 1000.0,
        "first_token_at": None,
        "answered_at": 1001.0,
        "worker": "http://w",
        "rid": "rid-0",
        "turn_id": None,
        "versions": "engine",
    }
