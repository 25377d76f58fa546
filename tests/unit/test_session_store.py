"""Sessions: made, found, bounded, ended by contract, forgotten, and read again from disk."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.archive import archive as archive_module
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.archive.steps import Saved, Unsaved, read_session
from middleware_hub.openai_session.episodes.contract import (
    FORGOTTEN,
    SPENT,
    STOPPED,
    Allowance,
    Budget,
    Freshness,
    Ledger,
    SessionEnd,
    SessionStatus,
    allowance,
    restored_end,
)
from middleware_hub.openai_session.episodes.reading import read_contract
from middleware_hub.openai_session.errors import TooManySessions
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.store import Bounds, SessionStore
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest, StateError
from miles_router.middlewares.episodes import BLOCK, EpisodePlace, EpisodeShelf
from miles_router.slots import slot_of
from miles_router.state.blobs import Blobs
from miles_router.state.store import StateStore
from tests.support.sessions import PLENTY
from tests.support.waiting import Clock, soon


def store_of(clock: Clock | None = None, **bounds: float) -> SessionStore:
    clock = clock or Clock()
    return SessionStore(replace(PLENTY, **bounds), now=clock, clock=clock)  # type: ignore[arg-type]  # by name


def test_a_jump_of_the_wall_clock_forgets_nothing() -> None:
    wall, clock = Clock(), Clock()
    store = SessionStore(replace(PLENTY, idle_timeout=10.0), now=wall, clock=clock)
    session = store.create("a")
    wall.now += 1e6
    store.expire()
    assert store.get("a") is session
    assert (session.created_at, session.used_at) == (1000.0, 1e6 + 1000.0)
    wall.now -= 2e6
    clock.now += 11
    store.expire()
    assert len(store) == 0


def test_a_busy_session_does_not_hide_the_idle_ones_behind_it() -> None:
    clock = Clock()
    store = store_of(clock, idle_timeout=10.0)
    with store.in_use(store.create("busy")):
        store.create("idle")
        clock.now += 10.0
        store.expire()
        assert [session.id for session in store] == ["busy"]


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


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([], "contract must be an object"),
        ({"bugdet": {}}, "contract.bugdet"),
        ({"budget": {"max_token": 1}}, "contract.budget.max_token"),
        ({"budget": []}, "contract.budget must"),
        ({"budget": {"max_tokens": 0}}, "contract.budget.max_tokens"),
        ({"budget": {"max_tokens": True}}, "contract.budget.max_tokens"),
        ({"budget": {"max_turns": 1.0}}, "contract.budget.max_turns"),
        ({"budget": {"max_context": "9"}}, "contract.budget.max_context"),
        ({"budget": {"deadline_s": 0}}, "contract.budget.deadline_s"),
        ({"budget": {"deadline_s": 1e12}}, "contract.budget.deadline_s"),
        ({"sampling": {"max_tokens": 1}}, "contract.sampling.max_tokens"),
        ({"sampling": {"temperature": "hot"}}, "contract.sampling.temperature"),
        ({"sampling": {"temperature": True}}, "contract.sampling.temperature"),
        ({"sampling": {"temperature": float("inf")}}, "contract.sampling.temperature"),
        ({"sampling": {"stop": [1]}}, "contract.sampling.stop"),
        ({"sampling": {"logit_bias": {"7": "x"}}}, "contract.sampling.logit_bias"),
        ({"model": {"base": "x"}}, "contract.model.base"),
        ({"model": {"name": "base:adapter"}}, "contract.model.name"),
        ({"model": {"lora": ""}}, "contract.model.lora"),
        ({"freshness": {"otherwise": "mark"}}, "oldest_version is required"),
        ({"freshness": {"oldest_version": "new"}}, "contract.freshness.oldest_version"),
        ({"freshness": {"oldest_version": 1, "otherwise": "ask"}}, "contract.freshness.otherwise"),
        ({"freshness": {"oldest_version": 1, "otherwise": []}}, "contract.freshness.otherwise"),
        ({"key": "mine"}, "contract.key"),
        ({"group": ""}, "contract.group"),
        ({"group": True}, "contract.group"),
        ({"group": "g" * 257}, "contract.group"),
    ],
)
def test_what_is_wrong_with_a_contract_is_named(wrong: Any, named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_contract(wrong)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("budget", "used", "prompt", "choices", "window", "left"),
    [
        (Budget(), 0, 5, 1, None, Allowance(None)),
        (Budget(max_tokens=10), 3, None, 1, 100, Allowance(7, SessionStatus.BUDGET_TOKENS, 10)),
        (Budget(max_tokens=10), 3, 50, 3, 100, Allowance(2, SessionStatus.BUDGET_TOKENS, 10)),
        (Budget(max_context=60), 0, 50, 2, 100, Allowance(10, SessionStatus.CONTEXT, 60)),
        (Budget(max_context=60), 0, 60, 1, 100, Allowance(0, SessionStatus.CONTEXT, 60)),
        (Budget(max_context=200), 0, 70, 1, 100, Allowance(30, SessionStatus.CONTEXT, 100)),
        (Budget(max_tokens=20, max_context=60), 0, 50, 1, None, Allowance(10, SessionStatus.CONTEXT, 60)),
    ],
)
def test_a_turn_may_have_what_there_is_least_of(
    budget: Budget, used: int, prompt: int | None, choices: int, window: int | None, left: Allowance
) -> None:
    ledger = Ledger()
    ledger.settle("before", used)
    assert allowance(budget, ledger, prompt=prompt, choices=choices, window=window) == left


@pytest.mark.parametrize(
    ("version", "stale"), [("6", True), ("7", False), ("10", False), (None, True), ("default", True)]
)
def test_versions_are_numbers_and_what_is_none_is_stale(version: str | None, stale: bool) -> None:
    assert Freshness(7).is_stale(version) is stale
    assert not Freshness().is_stale(version)


ENDS = [status for status in SessionStatus if status is not SessionStatus.OPEN]


def ended(*ends: str) -> SessionEnd:
    state = SessionEnd()
    for end in ends:
        state = state.after(SessionStatus(end))
    return state


@pytest.mark.parametrize("first", [end for end in ENDS if not end.is_forgotten])
@pytest.mark.parametrize("second", [end for end in ENDS if not end.is_forgotten])
def test_what_a_row_says_restores_the_end(first: SessionStatus, second: SessionStatus) -> None:
    state = SessionEnd().after(first).after(second)
    finalized = state.status is SessionStatus.FINALIZED
    assert restored_end(state.reason, state.stopped_by, finalized=finalized) == state


NAME = "episode"


class Process:
    """The sessions of one process on a store. Its time stands still until somebody sets it."""

    def __init__(self, store: StateStore) -> None:
        self.seconds = 0.0
        self.sessions = SessionStore(Bounds(10, 10, 1 << 20, 1 << 20, 0.001), now=self._now, clock=lambda: 0.0)
        router: Any = SimpleNamespace(store=store, config=SimpleNamespace(state_rows=False), rows={})
        self.archive = SessionArchive(self.sessions, router, now=self._now, clock=lambda: 0.0)

    def _now(self) -> float:
        return self.seconds


async def test_a_session_that_is_asked_for_does_not_expire_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "LOOK", 0.0)
    store = StateStore(tmp_path)
    first, then = Process(store), Process(store)
    await first.archive.save(first.sessions.create(NAME))
    load, owners, read, looked = store.load, store.owners, asyncio.Event(), asyncio.Event()

    async def slow(owner: str) -> Blobs:
        blobs = await load(owner)
        await read.wait()
        return blobs

    async def told(slot: int) -> AsyncIterator[tuple[str, bytes]]:
        async for each in owners(slot):
            if slot == slot_of(NAME):  # what it says is done before anything else is
                looked.set()
            yield each

    monkeypatch.setattr(store, "load", slow)
    monkeypatch.setattr(store, "owners", told)
    asked = asyncio.ensure_future(then.archive.load(NAME))
    await asyncio.sleep(0)
    then.seconds = 100.0
    async with then.archive.running():
        await soon(looked.wait())
        read.set()
        await soon(asked)
        assert NAME in then.sessions
        assert await load(NAME)
    await store.close()


@pytest.mark.parametrize(
    ("head", "step"),
    [
        ({"turns": 1}, b"no"),
        ({"turns": 1}, b"\2\0\0\0{}"),
        ({"turns": None}, None),
        ({"used": 1}, None),
        ({"turns": 1}, None),
    ],
    ids=["no header", "a header without fields", "turns that are no number", "a use that is none", "a turn is missing"],
)
async def test_a_session_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, head: dict[str, Any], step: bytes | None
) -> None:
    store = StateStore(tmp_path)
    first, then = Process(store), Process(store)
    await first.archive.save(first.sessions.create(NAME))
    written = await store.load(NAME)
    await store.append(NAME, {0: orjson.dumps({**orjson.loads(written[0]), **head}), 1: step})
    with pytest.raises(StateError, match=f"session {NAME!r} cannot be read"):
        await then.archive.load(NAME)
    await store.close()


def stored() -> tuple[Blobs, list[dict[str, Any]]]:
    """Return a session as an earlier router wrote it, and what that router said of each turn when it recorded it."""
    held = orjson.loads(Path(__file__).with_name("stored_session.json").read_bytes())
    return dict(enumerate(map(base64.b64decode, held["blobs"]))), held["classified"]


def classified(session: Session) -> list[dict[str, Any]]:
    """What is computed of each turn, under the names that its row had for it."""
    found = session.history.classified()
    return [
        {
            "reason": each.reason,
            "edit": each.edit,
            "first": each.first and each.first.number,
            "origin": None if each.conversation is turn else each.conversation.number,
            "unrecorded_history": each.unrecorded,
            "side_call": each.side_call,
        }
        for turn, each in zip(session.turns, found, strict=True)
    ]


async def test_a_stored_session_is_classified_as_it_was() -> None:
    blobs, said = stored()
    session, _ = read_session(NAME, blobs, {}, {}, now=0.0, clock=0.0)
    for expected, computed in zip(said, classified(session), strict=True):
        assert computed == expected
    assert len({each["reason"] for each in said}) == 9


async def test_a_session_that_was_read_again_goes_on_where_its_steps_end() -> None:
    """Its things have the places that they had: what both routers wrote is read as what one router wrote."""
    whole, _ = read_session(NAME, stored()[0], {}, {}, now=0.0, clock=0.0)
    turns = whole.turns
    for cut in range(len(turns)):
        first = Unsaved(_beginning(whole, cut), Saved(), with_rows=False).blobs
        session, saved = read_session(NAME, first, {}, {}, now=0.0, clock=0.0)
        blobs = {**first}
        for turn in turns[cut:]:
            session.history.append(_again(turn, session))
            session.rewards.set([_reward(turn)])
            unsaved = Unsaved(session, saved, with_rows=False)
            blobs |= unsaved.blobs
            saved = unsaved.after_append()
        found, _ = read_session(NAME, blobs, {}, {}, now=0.0, clock=0.0)
        assert [_described(turn) for turn in found.turns] == [_described(turn) for turn in turns]
        assert found.rewards.log == [*map(_reward, turns)]
        assert sum(map(len, blobs.values())) < 1.5 * sum(map(len, stored()[0].values())), "nothing is written twice"


def _beginning(whole: Session, turns: int) -> Session:
    session, _ = read_session(NAME, stored()[0], {}, {}, now=0.0, clock=0.0)
    session.clear()
    for turn in whole.turns[:turns]:
        session.history.restore(_again(turn, session))
        session.rewards.set([_reward(turn)])
    return session


def _reward(turn: Turn) -> dict[str, Any]:
    return {"turn": turn.number, "name": "reward", "value": turn.number / 4}


def _again(turn: Turn, session: Session) -> Turn:
    parent = None if turn.parent is None else session.turns[turn.parent.number]
    place, _ = session.history.intern(ParentMatch(parent, turn.appended, turn.context))
    return replace(turn, parent=parent, appended=place.appended, context=place.context)


def _described(turn: Turn) -> tuple[object, ...]:
    sampled = [(piece.tokens.tolist(), piece.logprobs, piece.version) for piece in turn.sampled]
    logprobs = [None if each is None else each.tobytes() for _, each, _ in sampled]
    about = (turn.number, turn.request, turn.parent and turn.parent.number, turn.answer, turn.facts, turn.tools)
    return (*about, turn.appended, turn.context, turn.given.tokens.tolist(), [each[0] for each in sampled], logprobs)


def test_it_gives_what_a_sorted_list_would() -> None:
    chance = random.Random(17)
    shelf = EpisodeShelf[EpisodePlace]()
    held: set[EpisodePlace] = set()
    for step in range(12 * BLOCK):
        began = float(step) if chance.random() < 0.7 else float(chance.randrange(12 * BLOCK))
        place = (began, f"e{chance.randrange(4)}-{step}")
        shelf.add(place, place)
        held.add(place)
        if chance.random() < 0.4:
            gone = chance.choice([*held]) if step % 50 == 0 else place
            shelf.remove(gone)
            held.discard(gone)
        if step % 97 == 0:
            before = None if chance.random() < 0.2 else (float(chance.randrange(12 * BLOCK)), "e2")
            most = chance.randrange(1, 3 * BLOCK)
            wanted = sorted((each for each in held if before is None or each < before), reverse=True)[:most]
            assert shelf.newest(before, most) == wanted
    assert len(shelf) == len(held)
    for place in sorted(held, key=lambda each: each[1]):
        shelf.remove(place)
    shelf.remove((0.0, "never there"))
    assert (len(shelf), shelf.newest(None, 10)) == (0, [])


#: The later a status stands here, the less may follow it.
RANKS = [(SessionStatus.OPEN, SessionStatus.CONTEXT), SPENT, STOPPED, (SessionStatus.FINALIZED,), FORGOTTEN]
TURN_RECORDED: None = None


def rank(status: SessionStatus) -> int:
    return next(number for number, statuses in enumerate(RANKS) if status in statuses)


def after(state: SessionEnd, event: SessionStatus | None) -> SessionEnd:
    return state.reopened() if event is TURN_RECORDED else state.after(event)


def test_no_order_of_ends_and_turns_takes_back_an_end_or_its_cause() -> None:
    known, walk = {SessionEnd()}, [SessionEnd()]
    for before in walk:  # each state that any events lead to, and each event
        for event in (*ENDS, TURN_RECORDED):
            state = after(before, event)
            assert rank(state.status) >= rank(before.status), (before, event)
            assert event is TURN_RECORDED or rank(event) <= rank(state.status), (before, event)
            assert state.cause is before.cause or before.cause in (None, SessionStatus.CONTEXT), (before, event)
            assert state.status in (before.status, event, SessionStatus.OPEN), (before, event)
            if state not in known:
                known.add(state)
                walk.append(state)
    assert {state.status for state in known} == set(SessionStatus)
