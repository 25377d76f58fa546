"""The journal on disk: what was committed is there, what is damaged or somebody else's is refused by name."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from miles_router import cli
from miles_router.engines.actions import Pause
from miles_router.errors import StateError, StateHeld, StateOutdated
from miles_router.pools.registrations import StandstillRow
from miles_router.slots import CONTROL, slot_of
from miles_router.state import store as store_module
from miles_router.state.blobs import header_of
from miles_router.state.journal import APPLICATION, FORMAT, PATIENCE, SHARED_EPOCHS, Journal
from miles_router.state.locks import ByteLocks
from miles_router.state.store import StateStore
from tests.support.quiet_fleet import quiet_fleet
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


async def test_a_commit_is_made_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        first = store.append(OWNER, {0: b"kept"})
        bad = store.append(OWNER, {1: b"half", 2**64: b"no number of SQLite's"})
        last = store.append(OWNER, {3: b"kept too"})
        results = await asyncio.gather(first, bad, last, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["NoneType", "StateError", "NoneType"]
        assert [*await store.load(OWNER)] == [0, 3]


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


async def test_what_comes_behind_the_end_is_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    await store.append(OWNER, blobs(1))
    await store.close()
    for _ in range(2):
        with pytest.raises(StateError):
            await soon(store.append(OWNER, blobs(2)))
    assert store.waiting == 0


async def _broken_off(directory: Path) -> None:
    """A directory as a killed process leaves it: the WAL is not written back."""
    async with opened(directory / "running") as store:
        for number in range(10):
            await store.append(OWNER, {number: b"x" * 5000})
        for path in (directory / "running").iterdir():
            (directory / path.name).write_bytes(path.read_bytes())


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
    await _broken_off(tmp_path)
    damage(file_of(tmp_path, suffix=".sqlite-wal"))
    async with opened(tmp_path) as store:
        for attempt in (store.load(OWNER), store.append(OWNER, blobs(1))):
            with pytest.raises(StateError, match=r"of 10 acknowledged commits are gone"):
                await attempt


async def test_what_is_left_of_a_damaged_slot_can_be_had_by_choice(tmp_path: Path) -> None:
    await _broken_off(tmp_path)
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


@pytest.mark.parametrize("value", [b"", b"\1\0\0", b"\4\0\0\0{}", b"\2\0\0\0[]", b"\1\0\0\0{}"])
def test_what_has_no_header_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # what is wrong is said in words of JSON's
        header_of(value)


OTHER = """
import pathlib, sys
from miles_router.state.locks import ByteLocks

locks = ByteLocks(pathlib.Path(sys.argv[1]))
print(locks.lock(7, shared=sys.argv[2] == "beside"), flush=True)
sys.stdin.read()
"""


@contextmanager
def other(directory: Path, how: str) -> Iterator[str]:
    """Another process that locks byte 7; gives whether it could."""
    command = [sys.executable, "-c", OTHER, str(directory), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def test_who_looks_sees_the_lock_of_a_leader(tmp_path: Path) -> None:
    mine = ByteLocks(tmp_path)
    with other(tmp_path, "alone") as took:
        assert (took, mine.lock(7, shared=True), mine.lock(8, shared=True)) == ("True", False, True)
    assert mine.lock(7), "it has ended"
    mine.close()


def test_those_that_look_at_once_take_none_of_them_for_the_leader(tmp_path: Path) -> None:
    mine = ByteLocks(tmp_path)
    with other(tmp_path, "beside") as took:
        assert (took, mine.lock(7, shared=True), mine.lock(7)) == ("True", True, False)
    mine.close()


def test_a_look_leaves_files_alone_that_are_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.sqlite").touch()
    with pytest.raises(SystemExit):
        cli.main(["state", str(tmp_path)])
    assert "holds no state" in capsys.readouterr().err
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("mine.sqlite", 0)]


async def test_no_name_on_the_disk_speaks_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StateStore(tmp_path)
    await store.append("evil\x1b[2J", {0: b'{"kind": "session"}'})
    await store.close()
    cli.main(["state", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "'evil\\x1b[2J'" in shown
    assert "\x1b" not in shown


def count_no_more(journal: Journal) -> None:
    """Have the next commit be held, and fail behind that."""
    readable = os.open(os.devnull, os.O_RDONLY)
    os.dup2(readable, journal._count)
    os.close(readable)


async def test_a_pause_that_was_refused_is_not_found_by_the_next_router(tmp_path: Path) -> None:
    store, fleet = StateStore(tmp_path), quiet_fleet()
    row = StandstillRow(store, "", fleet)
    await row.save()
    await store._ask(CONTROL, count_no_more)
    fleet.begin_pause(Pause("abort"))
    with pytest.raises(StateError):
        await row.save()
    fleet.end_pause()
    await row.save()
    assert [each async for each in store.owners(CONTROL)] == []
    await store.close()
