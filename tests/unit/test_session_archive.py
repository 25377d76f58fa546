"""Sessions beyond memory: what happens to one at the same time as something else."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.archive import archive as archive_module
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.archive.session_rows import HEAD, TURN, Saved, Unsaved, read_session
from middleware_hub.openai_session.sessions.session import Session, Tally
from middleware_hub.openai_session.sessions.store import Bounds, SessionStore
from miles_router.errors import StateDamaged
from miles_router.slots import slot_of
from miles_router.state.rows import Change, StateRow, header_of
from miles_router.state.store import StateStore
from tests.support.waiting import soon

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

    async def slow(owner: str) -> list[StateRow]:
        rows = await load(owner)
        await read.wait()
        return rows

    async def told(slot: int, *args: Any, **named: Any) -> Any:
        page = await owners(slot, *args, **named)
        if page and slot == slot_of(NAME):  # what it says is done before anything else is
            looked.set()
        return page

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
    ("head", "turn"),
    [({"turns": 1}, b"no"), ({"turns": 1}, b"\2\0\0\0{}"), ({"turns": None}, b""), ({"used": 1}, b"")],
    ids=["a turn without a header", "a header without fields", "turns that are no number", "a use that is none"],
)
async def test_a_session_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, head: dict[str, Any], turn: bytes
) -> None:
    store = StateStore(tmp_path)
    first, then = Process(store), Process(store)
    await first.archive.save(first.sessions.create(NAME))
    (written,) = await store.load(NAME)
    damaged = orjson.dumps({**orjson.loads(written.value), **head})
    await store.commit(NAME, [Change(HEAD, 0, damaged), Change(TURN, 0, turn)])
    with pytest.raises(StateDamaged, match=f"session {NAME!r} cannot be read"):
        await then.archive.load(NAME)
    await store.close()


def rows_of_format_2() -> list[StateRow]:
    """A session that this router wrote when its rows still said why each turn is not simply the next one."""
    rows = orjson.loads(Path(__file__).with_name("session_rows_of_format_2.json").read_bytes())
    return [StateRow(kind, key, base64.b64decode(value)) for kind, key, value in rows]


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


async def test_a_stored_session_of_the_format_before_is_classified_as_it_was() -> None:
    rows = rows_of_format_2()
    stored = [header_of(value)[0] for kind, key, value in rows if kind == TURN]
    session, _ = read_session(NAME, rows, {}, now=0.0, clock=0.0)
    for header, computed in zip(stored, classified(session), strict=True):
        assert computed == {name: header[name] for name in computed}
    assert len({header["reason"] for header in stored}) == 9


async def test_a_restored_session_is_classified_as_before() -> None:
    before, _ = read_session(NAME, rows_of_format_2(), {}, now=0.0, clock=0.0)
    changes = Unsaved(before, Saved(), with_rows=False).changes
    rows = [StateRow(each.kind, each.key, bytes(each.value)) for each in changes if each.value is not None]
    after, _ = read_session(NAME, rows, {}, now=0.0, clock=0.0)
    assert classified(after) == classified(before)
    assert after.tally.described() == before.tally.described() == Tally().upto(after.history).described()
