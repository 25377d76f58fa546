"""What outlives the process, on real files: rows by owner, in a file for each slot."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from miles_router.errors import ConfigError, StateDamaged, StateError, StateForeign, StateHeld, StateOutdated
from miles_router.slots import CONTROL, SLOTS, slot_of
from miles_router.state import store as store_module
from miles_router.state.rows import Change, StateRow
from miles_router.state.slot_file import APPLICATION, FORMAT, READABLE, SHARED_EPOCHS, SlotFile
from miles_router.state.store import StateStore
from tests.support.waiting import soon, until

OWNER = "session-1"
SLOT = slot_of(OWNER)
#: A format that is no longer read.
OLDER = READABLE[0] - 1


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[StateStore]:
    store = StateStore(directory)
    try:
        yield store
    finally:
        await store.close()


def file_of(directory: Path, slot: int = SLOT, suffix: str = ".sqlite") -> Path:
    return directory / f"slot-{slot:02d}{suffix}"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def rows(count: int, size: int = 100) -> list[Change]:
    return [Change("turn", number, bytes([number % 256]) * size) for number in range(count)]


async def test_what_was_committed_is_there_in_order_after_a_restart(tmp_path: Path) -> None:
    changes = [
        Change("turn", 10, b"ten"),
        Change("turn", 9, b"nine"),
        Change("turn", "x", b"text"),
        Change("a", 0, b""),
    ]
    async with opened(tmp_path) as store:
        await store.commit(OWNER, changes)
        await store.commit("another", [Change("turn", 0, b"other")], slot=SLOT)
    async with opened(tmp_path) as store:
        assert await store.load(OWNER) == [
            StateRow("a", 0, b""),
            StateRow("turn", 9, b"nine"),
            StateRow("turn", 10, b"ten"),
            StateRow("turn", "x", b"text"),
        ]
        assert await store.load("another", slot=SLOT) == [StateRow("turn", 0, b"other")]
        assert await store.load("nobody") == []


async def test_a_row_is_replaced_and_deleted_and_an_owner_goes_as_a_whole(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(100))
        await store.commit(OWNER, [Change("turn", 3, b"new"), Change("turn", 4, None)])
        entries = {entry.key: entry.value for entry in await store.load(OWNER)}
        assert entries[3] == b"new"
        assert len(entries) == 99
        assert 4 not in entries
        await store.delete(OWNER)
        assert await store.load(OWNER) == []


async def test_an_owner_that_begins_anew_has_nothing_of_what_it_had(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(5))
        await store.commit(OWNER, [Change("turn", 7, b"new")], anew=True)
        assert await store.load(OWNER) == [StateRow("turn", 7, b"new")]


async def test_a_commit_is_made_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        first = store.commit(OWNER, [Change("turn", 0, b"kept")])
        bad = store.commit(OWNER, [Change("turn", 1, b"half"), Change("turn", 2**64, b"no number of SQLite's")])
        last = store.commit(OWNER, [Change("turn", 3, b"kept too")])
        results = await asyncio.gather(first, bad, last, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["NoneType", "StateError", "NoneType"]
        assert [entry.key for entry in await store.load(OWNER)] == [0, 3]


async def test_commits_that_come_together_are_one_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, [])
        await asyncio.gather(*(store.commit(OWNER, [Change("turn", number, b"x")]) for number in range(500)))
        assert len(await store.load(OWNER)) == 500
    connection = sqlite3.connect(file_of(tmp_path))
    assert connection.execute("SELECT transactions FROM slot").fetchone()[0] < 250
    connection.close()


async def test_owners_are_listed_in_pages_with_a_row_of_theirs(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(25):
            about = [Change("session", 0, b"%d" % number)] if number % 5 else []
            await store.commit(f"s{number:02d}", [*rows(3), *about], slot=7)
        listed: list[tuple[str, bytes]] = []
        while page := await store.owners(7, "session", after=listed[-1][0] if listed else "", limit=6):
            assert len(page) <= 6
            listed += page
        assert listed == [(f"s{number:02d}", b"%d" % number) for number in range(25) if number % 5]


async def test_only_the_slots_that_somebody_asks_for_are_opened(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await store.load(OWNER) == []
        assert await store.owners(3, "session") == []
        assert not store.exists(SLOT)
        assert names(tmp_path) == set()
        await store.commit(OWNER, rows(1))
        await store.commit("router", rows(1), slot=CONTROL)
        assert {name.partition(".")[0] for name in names(tmp_path)} == {file_of(tmp_path).stem, "control"}
        assert SLOT < SLOTS == CONTROL


async def test_a_slot_that_another_has_open_is_refused_until_it_is_released(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        await one.commit(OWNER, rows(1))
        for attempt in (other.load(OWNER), other.commit(OWNER, rows(1)), other.claim(SLOT, 1)):
            with pytest.raises(StateHeld, match="another running router has it open"):
                await attempt
        writing = asyncio.gather(*(one.commit(OWNER, [Change("turn", number, b"x")]) for number in range(1, 5)))
        await asyncio.sleep(0)
        await one.release(SLOT)
        await writing
        assert len(await other.load(OWNER)) == 5
        with pytest.raises(StateHeld):
            await one.load(OWNER)


async def test_an_older_epoch_commits_nothing_more(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        await one.claim(SLOT, 4)
        await one.commit(OWNER, rows(1))
        await one.release(SLOT)
        await other.claim(SLOT, 5)
        await other.release(SLOT)
        with pytest.raises(StateOutdated, match="epoch 5 has it, and 4 is older"):
            await one.claim(SLOT, 4)
        await one.commit(OWNER, rows(2))  # who claims nothing goes on in the epoch that there is


async def test_an_epoch_that_came_over_an_open_slot_is_seen_in_the_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.claim(SLOT, 1)
        await store.commit(OWNER, rows(1))
        taken_over: Callable[[SlotFile], None] = lambda file: file.transaction(  # noqa: E731
            [lambda each: each._connection.execute("UPDATE slot SET epoch = 1")]
        )
        await store._ask(SLOT, taken_over)
        await store._ask(SLOT, lambda file: setattr(file, "epoch", 0))
        with pytest.raises(StateOutdated, match="another router has taken this slot over"):
            await store.commit(OWNER, [Change("turn", 1, b"late")])
        assert len(await store.load(OWNER)) == 1


@pytest.mark.parametrize(
    ("write", "refused"),
    [
        (lambda path: path.write_bytes(b"a notebook of somebody's" * 200), "no file of miles-router's, or damaged"),
        (lambda path: _table(path, 0, 0), "no file of miles-router's"),
        (lambda path: _table(path, APPLICATION, FORMAT + 1), f"its format is {FORMAT + 1}, and .* reads {FORMAT}"),
        (lambda path: _table(path, APPLICATION, OLDER), f"its format is {OLDER}, and .* reads {FORMAT}"),
    ],
    ids=["no database", "another program's", "a newer format", "an older one"],
)
async def test_somebody_elses_file_is_refused_and_left_as_it_is(
    tmp_path: Path, write: Callable[[Path], None], refused: str
) -> None:
    path = file_of(tmp_path)
    write(path)
    before = path.read_bytes()
    async with opened(tmp_path) as store:
        for attempt in (store.load(OWNER), store.commit(OWNER, rows(1))):
            with pytest.raises(StateForeign, match=refused):
                await attempt
    assert path.read_bytes() == before
    assert names(tmp_path) == {path.name}


async def test_a_file_of_the_format_before_is_read_and_gets_this_one_with_its_first_change(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(1))
    _set_format(file_of(tmp_path), READABLE[0])
    async with opened(tmp_path) as store:
        assert len(await store.load(OWNER)) == 1
    assert _format(file_of(tmp_path)) == READABLE[0]
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(2))
    assert _format(file_of(tmp_path)) == FORMAT


def _set_format(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def _format(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _table(path: Path, application: int, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE precious (value)")
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()


async def test_a_directory_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state_dir: .*/file/deep: cannot be made: Not a directory"):
        StateStore(tmp_path / "file" / "deep")


async def test_the_disk_gets_back_the_room_of_what_was_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(200, 100_000))
        await store.commit("kept", rows(1), slot=SLOT)
        await store.release(SLOT)
        assert file_of(tmp_path).stat().st_size > 20_000_000
        await store.delete(OWNER)
        small = lambda: sum(path.stat().st_size for path in tmp_path.iterdir()) < 2_000_000  # noqa: E731
        await until(small, "the files are small again")
        assert len(await store.load("kept", slot=SLOT)) == 1


async def test_changes_beyond_the_bound_wait_in_order_and_leave_with_their_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING", 10_000)
    async with opened(tmp_path) as store:
        commits = [asyncio.ensure_future(store.commit(OWNER, [Change("n", 0, b"%6000d" % n)])) for n in range(20)]
        await asyncio.sleep(0)
        assert store.waiting <= 10_000
        commits[15].cancel()
        await asyncio.gather(*commits, return_exceptions=True)
        assert store.waiting == 0
        assert [commit.cancelled() for commit in commits].count(True) == 1
        assert (await store.load(OWNER))[0].value == b"%6000d" % 19


async def test_a_commit_is_made_though_its_caller_has_left(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        commit = asyncio.ensure_future(store.commit(OWNER, rows(1)))
        await asyncio.sleep(0)
        commit.cancel()
        assert len(await store.load(OWNER)) == 1


async def test_a_count_that_cannot_be_read_is_refused_and_other_slots_go_on(tmp_path: Path) -> None:
    os.mkfifo(file_of(tmp_path, suffix=".acknowledged"))
    async with opened(tmp_path) as store:
        with pytest.raises(StateError):
            await soon(store.commit(OWNER, rows(1)))
        await soon(store.commit("another", rows(1), slot=SLOT + 1))


async def test_a_defect_in_one_slots_work_is_answered_logged_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: object) -> None:
        raise RuntimeError("nobody thought of it")

    async with opened(tmp_path) as store:
        with monkeypatch.context() as broken:
            broken.setattr(SlotFile, "load", defect)
            await store.commit(OWNER, rows(1))
            with pytest.raises(StateError):
                await soon(store.load(OWNER))
        assert "nobody thought of it" in caplog.text
        assert len(await soon(store.load(OWNER))) == 1


async def test_what_comes_behind_the_end_is_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    await store.commit(OWNER, rows(1))
    await store.close()
    for _ in range(2):
        with pytest.raises(StateError):
            await soon(store.commit(OWNER, rows(2)))
    assert store.waiting == 0


async def _broken_off(directory: Path, commits: int) -> None:
    """A directory as a killed process leaves it: the WAL is not written back."""
    async with opened(directory / "running") as store:
        for number in range(commits):
            await store.commit(OWNER, [Change("turn", number, b"x" * 5000)])
        for path in (directory / "running").iterdir():
            (directory / path.name).write_bytes(path.read_bytes())


async def test_a_wal_is_read_back(tmp_path: Path) -> None:
    await _broken_off(tmp_path, 10)
    assert file_of(tmp_path, suffix=".sqlite-wal").stat().st_size > 0
    async with opened(tmp_path) as store:
        assert len(await store.load(OWNER)) == 10


@pytest.mark.parametrize(
    "damage",
    [
        lambda wal: wal.write_bytes(wal.read_bytes()[:-3000]),
        lambda wal: wal.write_bytes(wal.read_bytes()[:-3000] + bytes(3000)),
        lambda wal: wal.write_bytes(b"\1" * 32 + wal.read_bytes()[32:]),
        lambda wal: wal.unlink(),
    ],
    ids=["short", "torn", "unreadable from the start", "gone"],
)
async def test_a_wal_that_lacks_acknowledged_commits_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    await _broken_off(tmp_path, 10)
    damage(file_of(tmp_path, suffix=".sqlite-wal"))
    async with opened(tmp_path) as store:
        for attempt in (store.load(OWNER), store.commit(OWNER, rows(1))):
            with pytest.raises(StateDamaged, match=r"of 10 acknowledged commits are gone"):
                await attempt


async def test_what_is_left_of_a_damaged_slot_can_be_had_by_choice(tmp_path: Path) -> None:
    await _broken_off(tmp_path, 10)
    wal = file_of(tmp_path, suffix=".sqlite-wal")
    wal.write_bytes(wal.read_bytes()[:-100])
    file_of(tmp_path, suffix=".acknowledged").unlink()
    async with opened(tmp_path) as store:
        assert [entry.key for entry in await store.load(OWNER)] == [*range(9)]


async def test_a_byte_that_has_changed_on_the_disk_is_refused_by_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, [Change("turn", 0, b"ids" * 1000), Change("session", 0, b"well")])
        await store.commit("sound", rows(1), slot=SLOT)
    path = file_of(tmp_path)
    content = path.read_bytes()
    assert content.count(b"idsidsids") > 0
    path.write_bytes(content.replace(b"idsidsids", b"idsidsidt", 1).replace(b"well", b"will"))
    async with opened(tmp_path) as store:
        for attempt in (store.load(OWNER), store.owners(SLOT, "session")):
            with pytest.raises(StateDamaged, match="a row of 'session-1' is not what was written"):
                await attempt
        assert len(await store.load("sound", slot=SLOT)) == 1


@pytest.mark.parametrize("left", [0, 50, 4096, 30_000])
async def test_a_truncated_file_is_refused_by_name(tmp_path: Path, left: int) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(20, 5000))
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    async with opened(tmp_path) as store:
        with pytest.raises((StateDamaged, StateForeign), match=r"damaged"):
            await store.load(OWNER)


async def test_a_count_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.commit(OWNER, rows(1))
    file_of(tmp_path, suffix=".acknowledged").write_bytes(b"12345678")
    async with opened(tmp_path) as store:
        with pytest.raises(StateDamaged, match="it is no count of commits"):
            await store.load(OWNER)


@asynccontextmanager
async def shared(directory: Path) -> AsyncIterator[StateStore]:
    """One of several machines that have a directory."""
    store = StateStore(directory, "machine", shared=True)
    try:
        yield store
    finally:
        await store.close()


async def test_machines_that_share_a_directory_take_slots_over_while_the_other_has_them_open(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        await one.claim(SLOT, 1)
        await one.commit(OWNER, rows(1))
        await other.claim(SLOT, 2)
        assert len(await other.load(OWNER)) == 1, "what the first has written"
        with pytest.raises(StateOutdated):
            await one.commit(OWNER, rows(2))
        await other.commit(OWNER, rows(3))
        assert len(await other.load(OWNER)) == 3
        with pytest.raises(StateOutdated):
            await one.claim(SLOT, 1)


async def test_a_claim_that_failed_leaves_the_epoch_that_there_was(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        await one.claim(SLOT, 1)
        busy = sqlite3.connect(file_of(tmp_path), isolation_level=None)
        busy.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateHeld):
            await one.claim(SLOT, 5)
        busy.execute("ROLLBACK")
        busy.close()
        await other.claim(SLOT, 3)
        with pytest.raises(StateOutdated):
            await one.commit(OWNER, rows(1))
        await other.commit(OWNER, rows(2))


async def test_whoever_was_succeeded_stays_so_when_he_tries_again(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        await one.claim(SLOT, 1)
        await other.claim(SLOT, 2)
        for _ in range(3):
            with pytest.raises(StateOutdated):
                await one.commit(OWNER, rows(1))
        assert await other.load(OWNER) == []


async def test_of_those_that_take_a_slot_over_without_an_epoch_each_has_the_next_one(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        assert [await one.take_over(SLOT), await other.take_over(SLOT), await one.take_over(SLOT)] == [1, 2, 3]
        with pytest.raises(StateOutdated):
            await other.commit(OWNER, rows(1))
        await one.commit(OWNER, rows(1))


async def test_a_router_alone_succeeds_those_that_have_shared_its_directory_and_go_on(tmp_path: Path) -> None:
    async with shared(tmp_path) as machine:
        await machine.claim(SLOT, SHARED_EPOCHS)
        await machine.commit(OWNER, rows(1))
        async with opened(tmp_path) as alone:
            assert len(await alone.load(OWNER)) == 1
            with pytest.raises(StateHeld):
                await machine.commit(OWNER, rows(2))
            await alone.commit(OWNER, rows(3))
        with pytest.raises(StateOutdated):
            await machine.commit(OWNER, rows(2))
        await machine.claim(SLOT, SHARED_EPOCHS + 5)
        assert len(await machine.load(OWNER)) == 3
