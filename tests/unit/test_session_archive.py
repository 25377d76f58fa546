"""Sessions beyond memory: what happens to one at the same time as something else."""

from __future__ import annotations

import asyncio
import base64
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
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.session import Session, Tally
from middleware_hub.openai_session.sessions.store import Bounds, SessionStore
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import StateError
from miles_router.slots import slot_of
from miles_router.state.blobs import Blobs
from miles_router.state.store import StateStore
from tests.support.waiting import soon, until

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


async def test_a_restored_session_is_classified_as_before() -> None:
    before, _ = read_session(NAME, stored()[0], {}, {}, now=0.0, clock=0.0)
    after, _ = read_session(NAME, Unsaved(before, Saved(), with_rows=False).blobs, {}, {}, now=0.0, clock=0.0)
    assert classified(after) == classified(before)
    assert after.tally.described() == before.tally.described() == Tally().updated(after.history).described()


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
            unsaved = Unsaved(session, saved, with_rows=False)
            blobs |= unsaved.blobs
            saved = unsaved.after_append()
        found, _ = read_session(NAME, blobs, {}, {}, now=0.0, clock=0.0)
        assert [_described(turn) for turn in found.turns] == [_described(turn) for turn in turns]
        assert sum(map(len, blobs.values())) < 1.5 * sum(map(len, stored()[0].values())), "nothing is written twice"


def _beginning(whole: Session, turns: int) -> Session:
    session, _ = read_session(NAME, stored()[0], {}, {}, now=0.0, clock=0.0)
    session.clear()
    for turn in whole.turns[:turns]:
        session.history.restore(_again(turn, session))
    return session


def _again(turn: Turn, session: Session) -> Turn:
    """Return the same turn in another session."""
    parent = None if turn.parent is None else session.turns[turn.parent.number]
    place, _ = session.history.intern(ParentMatch(parent, turn.appended, turn.context))
    return replace(turn, parent=parent, appended=place.appended, context=place.context)


def _described(turn: Turn) -> tuple[object, ...]:
    sampled = [(piece.tokens.tolist(), piece.logprobs, piece.version) for piece in turn.sampled]
    logprobs = [None if each is None else each.tobytes() for _, each, _ in sampled]
    about = (turn.number, turn.request, turn.parent and turn.parent.number, turn.answer, turn.facts, turn.tools)
    return (*about, turn.appended, turn.context, turn.given.tokens.tolist(), [each[0] for each in sampled], logprobs)


async def test_a_file_that_cannot_be_read_keeps_no_session_of_another_from_expiring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "LOOK", 0.0)
    (tmp_path / "slot-00.sqlite").write_bytes(b"a notebook of somebody's" * 200)
    store = StateStore(tmp_path)
    first, then = Process(store), Process(store)
    assert slot_of(NAME) > 0
    await first.archive.save(first.sessions.create(NAME))
    then.seconds = 100.0
    async with then.archive.running():
        await until(lambda: then.sessions.statistics.expired == 1, "it expires")
    await store.close()
