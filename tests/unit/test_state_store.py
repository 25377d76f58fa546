"""State that outlives the process, on real files: blobs by owner, in a journal for each slot."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from miles_router.errors import ConfigError, StateError, StateFull, StateHeld, StateOutdated
from miles_router.slots import CONTROL, SLOTS, slot_of
from miles_router.state import store as store_module
from miles_router.state.inspection import holdings
from miles_router.state.journal import APPLICATION, FORMAT, PATIENCE, SHARED_EPOCHS, Journal
from miles_router.state.store import StateStore
from tests.support.waiting import soon, until

OWNER = "session-1"
SLOT = slot_of(OWNER)
OLDER = FORMAT - 1


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


def blobs(count: int, size: int = 100) -> dict[int, bytes]:
    return {number: bytes([number % 256]) * size for number in range(count)}


async def test_what_was_committed_is_there_in_order_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, {10: b"ten", 9: b"nine", 0: b""}, large={3: b"large"})
        await store.append("another", {0: b"other"}, slot=SLOT)
    async with opened(tmp_path) as store:
        assert [*(await store.load(OWNER)).items()] == [(0, b""), (9, b"nine"), (10, b"ten")]
        assert await store.load(OWNER, large=True) == {3: b"large"}
        assert await store.load("another", slot=SLOT) == {0: b"other"}
        assert await store.load("nobody") == {}


async def test_a_blob_is_replaced_and_deleted_and_an_owner_goes_as_a_whole(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, blobs(100), large=blobs(3))
        await store.append(OWNER, {3: b"new", 4: None}, large={1: None})
        held = await store.load(OWNER)
        assert held[3] == b"new"
        assert len(held) == 99
        assert 4 not in held
        assert [*await store.load(OWNER, large=True)] == [0, 2]
        await store.delete(OWNER, large_alone=True)
        assert (len(await store.load(OWNER)), await store.load(OWNER, large=True)) == (99, {})
        await store.append(OWNER, {}, large=blobs(3))
        await store.delete(OWNER)
        assert (await store.load(OWNER), await store.load(OWNER, large=True)) == ({}, {})


async def test_an_owner_that_begins_anew_has_nothing_of_what_it_had(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, blobs(5), large=blobs(5))
        await store.append(OWNER, {7: b"new"}, large={8: b"new"}, replace_all=True)
        assert await store.load(OWNER) == {7: b"new"}
        assert await store.load(OWNER, large=True) == {8: b"new"}


async def test_a_load_reads_no_large_blob(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, {0: b"head"}, large={0: b"rows" * 1000})
    damaged = file_of(tmp_path).read_bytes().replace(b"rowsrows", b"rowsrowt", 1)
    file_of(tmp_path).write_bytes(damaged)
    async with opened(tmp_path) as store:
        assert await store.load(OWNER) == {0: b"head"}
        with pytest.raises(StateError, match="a row of 'session-1' is not what was written"):
            await store.load(OWNER, large=True)


async def test_a_commit_is_made_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        first = store.append(OWNER, {0: b"kept"})
        bad = store.append(OWNER, {1: b"half", 2**64: b"no number of SQLite's"})
        last = store.append(OWNER, {3: b"kept too"})
        results = await asyncio.gather(first, bad, last, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["NoneType", "StateError", "NoneType"]
        assert [*await store.load(OWNER)] == [0, 3]


async def test_commits_that_come_together_are_one_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, {})
        await asyncio.gather(*(store.append(OWNER, {number: b"x"}) for number in range(500)))
        assert len(await store.load(OWNER)) == 500
    connection = sqlite3.connect(file_of(tmp_path))
    assert connection.execute("SELECT transactions FROM slot").fetchone()[0] < 250
    connection.close()


async def test_owners_are_listed_in_pages_with_their_head(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for number in range(25):
            head = {0: b"%d" % number} if number % 5 else {}
            await store.append(f"s{number:02d}", {1: b"more", 2: b"more", **head}, slot=7)
        expected = [(f"s{number:02d}", b"%d" % number) for number in range(25) if number % 5]
        assert [each async for each in store.owners(7, page=6)] == expected
        assert [each async for each in store.owners(7, after="s11", page=6)] == expected[9:]


async def test_only_the_slots_that_somebody_asks_for_are_opened(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await store.load(OWNER) == {}
        assert [each async for each in store.owners(3)] == []
        assert not store.exists(SLOT)
        assert names(tmp_path) == set()
        await store.append(OWNER, blobs(1))
        await store.append("router", blobs(1), slot=CONTROL)
        assert {name.partition(".")[0] for name in names(tmp_path)} == {file_of(tmp_path).stem, "control"}
        assert SLOT < SLOTS == CONTROL


async def test_a_slot_that_another_has_open_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    async with opened(tmp_path) as other:
        async with opened(tmp_path) as one:
            await one.append(OWNER, blobs(1))
            for attempt in (other.load(OWNER), other.append(OWNER, blobs(1)), other.claim(SLOT, 1)):
                with pytest.raises(StateHeld, match="another running router has it open"):
                    await attempt
            writing = asyncio.gather(*(one.append(OWNER, {number: b"x"}) for number in range(1, 5)))
            await asyncio.sleep(0)
        await writing
        assert len(await other.load(OWNER)) == 5
        async with opened(tmp_path) as one:
            with pytest.raises(StateHeld):
                await one.load(OWNER)


async def test_an_older_epoch_commits_nothing_more(tmp_path: Path) -> None:
    async with opened(tmp_path) as one:
        assert await one.claim(SLOT, 4) == 4
        await one.append(OWNER, blobs(1))
    async with opened(tmp_path) as other:
        await other.claim(SLOT, 5)
    async with opened(tmp_path) as one:
        with pytest.raises(StateOutdated, match="the slot has epoch 5, and epoch 4 is older"):
            await one.claim(SLOT, 4)
        await one.append(OWNER, blobs(2))  # who claims nothing goes on in the epoch that there is


async def test_an_epoch_that_came_over_an_open_slot_is_seen_in_the_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.claim(SLOT, 1)
        await store.append(OWNER, blobs(1))
        taken_over: Callable[[Journal], None] = lambda file: file.transaction(  # noqa: E731
            [lambda each: each._connection.execute("UPDATE slot SET epoch = 1")]
        )
        await store._ask(SLOT, taken_over)
        await store._ask(SLOT, lambda file: setattr(file, "epoch", 0))
        with pytest.raises(StateOutdated, match="another router has taken this slot over"):
            await store.append(OWNER, {1: b"late"})
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
        for attempt in (store.load(OWNER), store.append(OWNER, blobs(1))):
            with pytest.raises(StateError, match=refused):
                await attempt
    assert path.read_bytes() == before
    assert names(tmp_path) == {path.name}


def _table(path: Path, application: int, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE precious (value)")
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()


async def test_a_directory_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state_dir: .*/file/deep: the directory cannot be created: Not a directory"):
        StateStore(tmp_path / "file" / "deep")


async def test_the_disk_gets_back_the_room_of_what_was_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, blobs(200, 100_000))
        await store.append("kept", blobs(1), slot=SLOT)
    assert file_of(tmp_path).stat().st_size > 20_000_000
    async with opened(tmp_path) as store:
        await store.delete(OWNER)
        small = lambda: sum(path.stat().st_size for path in tmp_path.iterdir()) < 2_000_000  # noqa: E731
        await until(small, "the files are small again")
        assert len(await store.load("kept", slot=SLOT)) == 1


async def test_changes_beyond_the_bound_wait_in_order_and_leave_with_their_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING", 10_000)
    async with opened(tmp_path) as store:
        commits = [asyncio.ensure_future(store.append(OWNER, {0: b"%6000d" % n})) for n in range(20)]
        await asyncio.sleep(0)
        assert store.waiting <= 10_000
        commits[15].cancel()
        await asyncio.gather(*commits, return_exceptions=True)
        assert store.waiting == 0
        assert [commit.cancelled() for commit in commits].count(True) == 1
        assert (await store.load(OWNER))[0] == b"%6000d" % 19


async def test_a_commit_is_made_though_its_caller_has_left(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        commit = asyncio.ensure_future(store.append(OWNER, blobs(1)))
        await asyncio.sleep(0)
        commit.cancel()
        assert len(await store.load(OWNER)) == 1


async def test_a_count_that_cannot_be_read_is_refused_and_other_slots_go_on(tmp_path: Path) -> None:
    os.mkfifo(file_of(tmp_path, suffix=".acknowledged"))
    async with opened(tmp_path) as store:
        with pytest.raises(StateError):
            await soon(store.append(OWNER, blobs(1)))
        await soon(store.append("another", blobs(1), slot=SLOT + 1))


async def test_a_defect_in_one_slots_work_is_answered_logged_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: object) -> None:
        raise RuntimeError("nobody thought of it")

    async with opened(tmp_path) as store:
        with monkeypatch.context() as broken:
            broken.setattr(Journal, "load", defect)
            await store.append(OWNER, blobs(1))
            with pytest.raises(StateError):
                await soon(store.load(OWNER))
        assert "nobody thought of it" in caplog.text
        assert len(await soon(store.load(OWNER))) == 1


async def test_a_file_that_cannot_be_closed_keeps_no_caller_waiting(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, blobs(1))
        await store._ask(SLOT, lambda journal: os.close(journal._count))  # whatever is asked of it fails now
        results = asyncio.gather(store.append(OWNER, {1: b"x"}), store.append("another", blobs(1), slot=SLOT + 1))
        with pytest.raises(StateError, match="Bad file descriptor"):
            await soon(results)
        await soon(store.append(OWNER, {1: b"x"}))
        assert len(await soon(store.load(OWNER))) == 2


async def test_what_comes_behind_the_end_is_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    await store.append(OWNER, blobs(1))
    await store.close()
    for _ in range(2):
        with pytest.raises(StateError):
            await soon(store.append(OWNER, blobs(2)))
    assert store.waiting == 0


async def _broken_off(directory: Path, commits: int) -> None:
    """A directory as a killed process leaves it: the WAL is not written back."""
    async with opened(directory / "running") as store:
        for number in range(commits):
            await store.append(OWNER, {number: b"x" * 5000})
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
        for attempt in (store.load(OWNER), store.append(OWNER, blobs(1))):
            with pytest.raises(StateError, match=r"of 10 acknowledged commits are gone"):
                await attempt


async def test_what_is_left_of_a_damaged_slot_can_be_had_by_choice(tmp_path: Path) -> None:
    await _broken_off(tmp_path, 10)
    wal = file_of(tmp_path, suffix=".sqlite-wal")
    wal.write_bytes(wal.read_bytes()[:-100])
    file_of(tmp_path, suffix=".acknowledged").unlink()
    async with opened(tmp_path) as store:
        assert [*await store.load(OWNER)] == [*range(9)]


async def test_a_byte_that_has_changed_on_the_disk_is_refused_by_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, {1: b"ids" * 1000, 0: b"well"})
        await store.append("sound", blobs(1), slot=SLOT)
    path = file_of(tmp_path)
    content = path.read_bytes()
    assert content.count(b"idsidsids") > 0
    path.write_bytes(content.replace(b"idsidsids", b"idsidsidt", 1).replace(b"well", b"will"))
    async with opened(tmp_path) as store:
        for attempt in (store.load(OWNER), anext(store.owners(SLOT))):
            with pytest.raises(StateError, match="a row of 'session-1' is not what was written"):
                await attempt
        assert len(await store.load("sound", slot=SLOT)) == 1


@pytest.mark.parametrize("left", [0, 50, 4096, 30_000])
async def test_a_truncated_file_is_refused_by_name(tmp_path: Path, left: int) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, blobs(20, 5000))
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    async with opened(tmp_path) as store:
        with pytest.raises(StateError, match=r"damaged"):
            await store.load(OWNER)


async def test_a_count_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, blobs(1))
    file_of(tmp_path, suffix=".acknowledged").write_bytes(b"12345678")
    async with opened(tmp_path) as store:
        with pytest.raises(StateError, match="it is no count of commits"):
            await store.load(OWNER)


@asynccontextmanager
async def shared(directory: Path) -> AsyncIterator[StateStore]:
    """One of several machines that have a directory."""
    store = StateStore(directory, "machine", shared=True)
    try:
        yield store
    finally:
        await store.close()


async def test_machines_sharing_a_directory_take_over_open_slots(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        await one.claim(SLOT, 1)
        await one.append(OWNER, blobs(1))
        await other.claim(SLOT, 2)
        assert len(await other.load(OWNER)) == 1, "what the first has written"
        with pytest.raises(StateOutdated):
            await one.append(OWNER, blobs(2))
        await other.append(OWNER, blobs(3))
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
            await one.append(OWNER, blobs(1))
        await other.append(OWNER, blobs(2))


async def test_whoever_was_succeeded_stays_so_when_he_tries_again(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        await one.claim(SLOT, 1)
        await other.claim(SLOT, 2)
        for _ in range(3):
            with pytest.raises(StateOutdated):
                await one.append(OWNER, blobs(1))
        assert await other.load(OWNER) == {}


async def test_of_those_that_take_a_slot_over_without_an_epoch_each_has_the_next_one(tmp_path: Path) -> None:
    async with shared(tmp_path) as one, shared(tmp_path) as other:
        assert [await one.claim(SLOT), await other.claim(SLOT), await one.claim(SLOT)] == [1, 2, 3]
        with pytest.raises(StateOutdated):
            await other.append(OWNER, blobs(1))
        await one.append(OWNER, blobs(1))


async def test_a_router_alone_succeeds_those_that_have_shared_its_directory_and_go_on(tmp_path: Path) -> None:
    async with shared(tmp_path) as machine:
        await machine.claim(SLOT, SHARED_EPOCHS)
        await machine.append(OWNER, blobs(1))
        async with opened(tmp_path) as alone:
            assert len(await alone.load(OWNER)) == 1
            with pytest.raises(StateHeld):
                await machine.append(OWNER, blobs(2))
            await alone.append(OWNER, blobs(3))
        with pytest.raises(StateOutdated):
            await machine.append(OWNER, blobs(2))
        await machine.claim(SLOT, SHARED_EPOCHS + 5)
        assert len(await machine.load(OWNER)) == 3


async def test_a_machine_that_opens_a_file_while_another_commits_takes_nothing_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, opening = Journal(file_of(tmp_path), "process", shared=True), os.open

    def just_then(path: Path, *rest: int) -> int:
        other.transaction([lambda journal: journal.append(OWNER, blobs(1), {}, replace_all=False)])
        return opening(path, *rest)

    with monkeypatch.context() as busy:
        busy.setattr(os, "open", just_then)
        one = Journal(file_of(tmp_path), "process", shared=True)
    assert len(one.load(OWNER)) == 1
    one.close()
    other.close()


async def test_a_slot_that_a_stopped_machine_has_locked_keeps_no_other_slot_waiting(tmp_path: Path) -> None:
    async with shared(tmp_path) as store:
        await store.claim(3, 1)
        await store.claim(4, 1)
        stopped = sqlite3.connect(file_of(tmp_path, 3), isolation_level=None)
        stopped.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        held = [store.append(f"s{n}", blobs(1), slot=3) for n in range(20)]
        results = asyncio.gather(*held, return_exceptions=True)
        await asyncio.gather(*(store.append(OWNER, blobs(1), slot=4) for _ in range(2)))
        assert {type(each) for each in await results} == {StateHeld}
        assert time.monotonic() - began < 10 * PATIENCE
        stopped.execute("ROLLBACK")
        stopped.close()
        await store.append(OWNER, blobs(1), slot=3)


async def test_inspecting_a_shared_directory_changes_nothing_for_running_machines(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as machine:
        await machine.claim(SLOT, SHARED_EPOCHS)
        await machine.append(OWNER, {0: b'{"kind": "session"}'})
        assert [each.owner for each in holdings(tmp_path)] == [OWNER]
        await machine.append(OWNER, blobs(2))
        assert not any(name.endswith(("-wal", "-shm")) for name in names(tmp_path)), "which one machine alone can read"


async def test_a_person_cannot_look_into_what_a_running_router_has_open(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.append(OWNER, {0: b'{"kind": "session"}'})
        with pytest.raises(ConfigError, match="another running router has it open"):
            [*holdings(tmp_path)]
    async with opened(tmp_path):
        assert [each.owner for each in holdings(tmp_path)] == [OWNER]
    async with opened(tmp_path) as store:
        assert len(await store.load(OWNER)) == 1


async def test_a_router_alone_that_finds_no_room_to_succeed_them_tries_again_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StateFull("no room is left on the disk")

    async with shared(tmp_path) as machine:
        await machine.claim(SLOT, SHARED_EPOCHS)
        async with opened(tmp_path) as alone:
            with monkeypatch.context() as crowded:
                crowded.setattr(Journal, "claim", full)
                with pytest.raises(StateFull):
                    await alone.append(OWNER, blobs(1))
            await alone.append(OWNER, blobs(2))
        with pytest.raises(StateOutdated):
            await machine.append(OWNER, blobs(3))
