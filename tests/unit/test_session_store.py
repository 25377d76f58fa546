"""The store: sessions are made, found, bounded and forgotten, and its account of bytes comes out even."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from middleware_hub.openai_session.errors import TooManySessions
from middleware_hub.openai_session.sessions.store import MAX_CARRIED_BYTES, SessionStore
from miles_router.errors import BadRequest, ConfigError, Conflict, NotFound
from tests.support.sessions import PLENTY, SYSTEM, Scene, user

START = [SYSTEM, user("Add.")]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def store_of(clock: Clock | None = None, **bounds: float) -> SessionStore:
    clock = clock or Clock()
    return SessionStore(replace(PLENTY, **bounds), now=clock, clock=clock)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sessions", 0, "max_sessions: must be at least 1, not 0"),
        ("turns", 0, "max_turns: must be at least 1, not 0"),
        ("session_bytes", 0, "max_session_bytes: must be at least 1, not 0"),
        ("total_bytes", -1, "max_bytes: must be at least 1, not -1"),
        ("idle_timeout", -0.5, "idle_timeout: must be at least 0, not -0.5"),
        ("idle_timeout", float("nan"), "idle_timeout: must be at least 0, not nan"),
    ],
)
def test_bounds_that_let_nothing_in_are_refused(field: str, value: Any, reason: str) -> None:
    bounds = replace(PLENTY, sessions=1, turns=1, session_bytes=1, total_bytes=1)
    bounds.check("sessions")
    with pytest.raises(ConfigError, match=re.escape(f"sessions.{reason}")):
        replace(bounds, **{field: value}).check("sessions")


def test_a_session_is_found_by_its_id() -> None:
    store = store_of()
    named, unnamed = store.create("episode:1.~_-", {"task": 1}), store.create()
    assert store.get("episode:1.~_-") is named
    assert store.get(unnamed.id) is unnamed
    assert (named.metadata, unnamed.metadata) == ({"task": 1}, {})
    assert len(store) == store.statistics.created == 2


def test_ids_made_by_the_router_cannot_be_guessed() -> None:
    store = store_of()
    ids = {store.create().id for _ in range(100)}
    assert len(ids) == 100
    assert {len(each) for each in ids} == {32}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "a%20", "a?b", "x" * 129])
def test_an_id_that_does_not_fit_into_a_path_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="session_id must be"):
        store_of().create(name)


def test_an_id_that_is_taken_is_refused() -> None:
    store = store_of()
    store.create("a")
    with pytest.raises(Conflict, match="'a' exists already"):
        store.create("a")
    store.delete(store.get("a"))
    assert store.create("a").turns == []


def test_an_unknown_session_is_not_found() -> None:
    with pytest.raises(NotFound, match="no session 'a'"):
        store_of().get("a")


def test_there_are_no_more_sessions_than_may_be() -> None:
    store = store_of(sessions=2)
    first, _ = store.create(), store.create()
    with pytest.raises(TooManySessions, match="2 sessions exist already") as refused:
        store.create()
    assert refused.value.headers["Retry-After"]
    store.delete(first)
    store.create()


def test_an_expired_session_makes_room() -> None:
    clock = Clock()
    store = store_of(clock, sessions=1, idle_timeout=10.0)
    store.create("a")
    clock.now += 10.0
    store.create("b")
    assert ([session.id for session in store], store.statistics.expired) == (["b"], 1)


def test_a_jump_of_the_wall_clock_forgets_nothing() -> None:
    wall, clock = Clock(), Clock()
    store = SessionStore(replace(PLENTY, idle_timeout=10.0), now=wall, clock=clock)
    session = store.create("a")
    wall.now += 1e6
    store.expire()
    assert store.get("a") is session
    assert (session.created_at, session.used_at) == (100.0, 1e6 + 100.0)
    wall.now -= 2e6
    clock.now += 11
    store.expire()
    assert len(store) == 0


def test_what_a_session_carries_is_bounded_and_accounted() -> None:
    store = store_of()
    large = {"note": "x" * MAX_CARRIED_BYTES}
    with pytest.raises(BadRequest, match="metadata may take"):
        store.create("a", large)
    assert (len(store), store.nbytes) == (0, 0)
    session = store.create("a", {"note": "x"})
    with pytest.raises(BadRequest, match="label and reward may take"):
        store.finalize(session, large)
    before = store.nbytes
    store.finalize(session, {"label": "x" * 1000})
    assert store.nbytes == session.nbytes > before + 1000
    store.finalize(session, {})
    assert store.nbytes < before + 200
    store.delete(session)
    assert store.nbytes == 0


def test_session_with_a_refused_first_turn_is_forgotten_unless_it_was_created() -> None:
    store = store_of()
    implied, made = store.get_or_create("implied"), store.create("made")
    with store.in_use(implied):
        store.drop_unused(implied)
        assert len(store) == 2  # another request is under way in it
    store.drop_unused(implied)
    store.drop_unused(made)
    assert [session.id for session in store] == ["made"]


def test_a_session_that_is_used_does_not_expire() -> None:
    clock = Clock()
    store = store_of(clock, idle_timeout=10.0)
    store.create("used")
    store.create("idle")
    clock.now += 9.0
    store.get("used")
    clock.now += 1.0
    store.expire()
    assert [session.id for session in store] == ["used"]


def test_a_request_under_way_keeps_its_session_and_its_end_counts_as_use() -> None:
    clock = Clock()
    store = store_of(clock, idle_timeout=10.0)
    session = store.create("a")
    with store.in_use(session), store.in_use(session):
        clock.now += 100.0
        store.expire()
        assert session.in_flight == 2
    assert session.in_flight == 0
    clock.now += 9.0
    assert store.get("a") is session
    clock.now += 10.0
    with pytest.raises(NotFound):
        store.get("a")


def test_a_busy_session_does_not_hide_the_idle_ones_behind_it() -> None:
    clock = Clock()
    store = store_of(clock, idle_timeout=10.0)
    with store.in_use(store.create("busy")):
        store.create("idle")
        clock.now += 10.0
        store.expire()
        assert [session.id for session in store] == ["busy"]


def test_without_a_timeout_nothing_expires() -> None:
    clock = Clock()
    store = store_of(clock, idle_timeout=0.0)
    store.create("a")
    clock.now += 1e9
    assert store.get("a").id == "a"


def test_a_session_named_again_after_it_expired_is_a_new_one() -> None:
    clock = Clock()
    store = store_of(clock, idle_timeout=10.0)
    first = store.get_or_create("a")
    assert store.get_or_create("a") is first
    clock.now += 10.0
    assert store.get_or_create("a") is not first
    assert (first.ending.status.is_forgotten, len(store)) == (True, 1)


def test_a_session_deleted_during_a_request_stays_deleted() -> None:
    store = store_of(Clock(), idle_timeout=10.0)
    session = store.create("a")
    with store.in_use(session):
        store.delete(session)
        again = store.create("a")
        store.account(session, 1000)
    assert store.get("a") is again
    assert session.ending.status.is_forgotten
    assert store.nbytes == again.nbytes


def test_deleting_twice_counts_once() -> None:
    store = store_of()
    kept, session = store.create(), store.create()
    store.account(session, 1000)
    store.delete(session)
    store.delete(session)
    assert store.nbytes == kept.nbytes


def test_turns_of_a_session_are_bounded_with_those_under_way() -> None:
    scene = Scene(replace(PLENTY, turns=2))
    with scene.store.in_use(scene.session):
        scene.store.check_room(scene.session)
        scene.turn(START)
        scene.store.check_room(scene.session)
        with scene.store.in_use(scene.session), pytest.raises(BadRequest, match=r"1 turns already and 1 running"):
            scene.store.check_room(scene.session)
        scene.turn(START)
        with pytest.raises(BadRequest, match=r"has 2 turns already \(max_turns\)"):
            scene.store.check_room(scene.session)


def test_bytes_of_a_session_are_bounded() -> None:
    scene = Scene(replace(PLENTY, session_bytes=20_000))
    scene.turn(START)
    scene.store.check_room(scene.session)
    scene.turn([SYSTEM, user("x" * 20_000)])
    with pytest.raises(BadRequest, match="max_session_bytes"):
        scene.store.check_room(scene.session)


def test_bytes_of_all_sessions_are_bounded() -> None:
    scene = Scene(replace(PLENTY, total_bytes=20_000))
    other = scene.store.create()
    scene.turn([SYSTEM, user("x" * 20_000)])
    for refused in (lambda: scene.store.check_room(other), scene.store.create):
        with pytest.raises(TooManySessions, match="max_bytes"):
            refused()
    scene.store.delete(scene.session)
    scene.store.check_room(other)


def test_what_a_session_is_made_with_is_counted() -> None:
    store = store_of()
    plain, described = store.create(), store.create(None, {"task": "x" * 1000})
    assert described.nbytes - plain.nbytes > 1000
    assert store.nbytes == plain.nbytes + described.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_the_account_of_bytes_comes_out_even_whatever_happens(seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    store = store_of(clock, idle_timeout=50.0)
    made = [store.create()]
    for _ in range(300):
        session = chance.choice(made)
        clock.now += chance.random()
        match chance.randrange(4):
            case 0:
                made.append(store.create())
            case 1:
                store.delete(session)
            case 2:
                store.account(session, chance.randrange(10_000))
            case 3:
                store.expire()
        held = sum(each.nbytes for each in store)
        assert store.nbytes == held >= 0
        assert {id(each) for each in store} == {id(each) for each in made if not each.ending.status.is_forgotten}
    for session in made:
        store.delete(session)
    assert (store.nbytes, len(store)) == (0, 0)


def test_what_finds_no_room_is_counted_by_the_bound_that_it_met() -> None:
    store = store_of(sessions=2, turns=1, session_bytes=200, total_bytes=1000)
    session, other = store.create("a"), store.create("b")
    with pytest.raises(TooManySessions, match="max_sessions"):
        store.create("c")
    with store.in_use(session), store.in_use(session), pytest.raises(BadRequest, match="max_turns"):
        store.check_room(session)
    store.account(session, 200)
    with pytest.raises(BadRequest, match="max_session_bytes"):
        store.check_room(session)
    store.account(session, 1000)
    with pytest.raises(TooManySessions, match="max_bytes"):
        store.check_room(other)
    assert store.statistics.refused == dict.fromkeys(("max_sessions", "max_turns", "max_session_bytes", "max_bytes"), 1)
