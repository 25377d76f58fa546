"""One slot's SQLite file: opened and checked, changed in transactions, read, vacuumed. One thread makes all calls.

WAL with an exclusive lock taken before it (https://www.sqlite.org/wal.html#noshm): one opener, and no file of shared
memory. Where its bytes are damaged, SQLite ends a WAL silently at the damage
(https://www.sqlite.org/fileformat2.html#wal_file_format): so each transaction is numbered, and what was acknowledged is
counted in a file beside it.

A directory that several machines share has no shared memory, and whoever is stopped must not keep what others take
over: there, each transaction locks the file for itself, with a rollback journal, and finds out whether its epoch is
still the youngest.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from miles_router.errors import StateDamaged, StateError, StateForeign, StateFull, StateHeld, StateOutdated
from miles_router.state.acknowledged import Acknowledged
from miles_router.state.rows import Change, StateRow, Sync

#: "MRst": whose file it is (`PRAGMA application_id`).
APPLICATION = 0x4D527374
#: Of the tables below, and of what the router and its layers put into them (`PRAGMA user_version`).
FORMAT = 3
#: Older formats whose rows are still read. The first change to a file gives it this one.
READABLE = (2, FORMAT)
TABLES = (
    "CREATE TABLE entries (owner TEXT NOT NULL, kind TEXT NOT NULL, key NOT NULL, value BLOB NOT NULL, "
    "sum INTEGER NOT NULL, "
    "PRIMARY KEY (owner, kind, key))",
    "CREATE TABLE slot (transactions INTEGER NOT NULL, epoch INTEGER NOT NULL)",
    "INSERT INTO slot VALUES (0, 0)",
)
#: Rows in one statement: each statement lets go of the interpreter, and waits for it afterwards.
ROWS_AT_ONCE = 64
#: KiB of pages that SQLite keeps for one slot.
PAGE_CACHE = 512
#: Bytes that a WAL keeps on the disk once it is written back.
WAL_KEPT = 4 * 1024 * 1024
#: Seconds for which a transaction of another machine is waited for, where files are shared.
PATIENCE = 0.25
#: Epochs from here on are those of routers that share the directory.
SHARED_EPOCHS = 1 << 32
#: Pages of 4 KiB given back to the disk in one step, and how many are kept for what comes.
VACUUM_STEP = 256
KEPT_FREE = 256

#: One owner after the other by the index, without looking at their rows.
OWNERS = """
WITH RECURSIVE walk(owner) AS (
    SELECT (SELECT min(owner) FROM entries WHERE owner > ?1)
    UNION ALL
    SELECT (SELECT min(owner) FROM entries WHERE owner > walk.owner) FROM walk WHERE walk.owner IS NOT NULL
)
SELECT walk.owner, entries.value, entries.sum
FROM walk JOIN entries ON entries.owner = walk.owner AND entries.kind = ?2 AND entries.key = ?3 LIMIT ?4
"""
#: What SQLite says (`sqlite3_errstr`), and which error of ours that is. Python 3.10 tells no codes.
MEANINGS: tuple[tuple[str, type[StateError], str], ...] = (
    ("database is locked", StateHeld, "another running router has it open"),
    ("database or disk is full", StateFull, "no room is left on the disk"),
    ("malformed", StateDamaged, "it is damaged"),
    ("file is not a database", StateForeign, "it is no file of miles-router's, or damaged"),
)


class SlotFile:
    """An open one.

    Raises (all methods):
        StateError: what went wrong, by name. A change that failed changed nothing that was held; whether a failed
            commit itself is held is known again when the file is next opened.
    """

    def __init__(self, path: Path, sync: Sync, *, shared: bool = False) -> None:
        """
        Args:
            shared: whether other machines may take it over while it is open.
        """
        self._path = path
        self._shared = shared
        with self._by_name():
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=PATIENCE if shared else 0
            )
        try:
            with self._by_name():
                self._open(sync)
                self._acknowledged = Acknowledged(path.with_suffix(".acknowledged"), sync)
        except BaseException:
            self._connection.close()
            raise
        try:
            self._check_count()
        except BaseException:
            self.close()
            raise
        #: Whether rows were deleted whose room the disk may have back.
        self.slack = True

    def _open(self, sync: Sync) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # before anything is read: else the WAL wants shared memory
        made = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
        new = made == (0, 0) and not self._number("SELECT count(*) FROM sqlite_master")
        if not new and made[0] != APPLICATION:
            raise StateForeign(f"{self._path}: it is no file of miles-router's")
        if not new and made[1] not in READABLE:
            raise StateForeign(f"{self._path}: its format is {made[1]}, and this miles-router reads {FORMAT}")
        if new:
            execute("PRAGMA auto_vacuum = INCREMENTAL")
        execute(f"PRAGMA journal_mode = {'TRUNCATE' if self._shared else 'WAL'}")
        if self._shared:
            execute("PRAGMA locking_mode = NORMAL")
        execute(f"PRAGMA synchronous = {'FULL' if sync == 'machine' else 'NORMAL'}")
        execute(f"PRAGMA journal_size_limit = {WAL_KEPT}")
        execute(f"PRAGMA cache_size = -{PAGE_CACHE}")
        execute("BEGIN IMMEDIATE")  # takes the lock for good, before anybody is told that the slot is ours
        if new:
            for statement in (*TABLES, f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {FORMAT}"):
                execute(statement)
        execute("COMMIT")
        if new and sync == "machine":
            _sync_directory(self._path.parent)
        self._format = FORMAT if new else made[1]
        self._transactions, self.epoch = execute("SELECT transactions, epoch FROM slot").fetchone()

    def _check_count(self) -> None:
        acknowledged = self._acknowledged.count
        if acknowledged is not None and acknowledged > self._transactions:
            raise StateDamaged(
                f"{self._path}: {acknowledged - self._transactions} of {acknowledged} acknowledged commits are gone: "
                f"its end or its WAL is damaged. Remove {self._acknowledged.path.name} to go on without them"
            )

    def _number(self, question: str) -> int:
        answer: int = self._connection.execute(question).fetchone()[0]
        return answer

    def transaction(self, works: Sequence[Callable[[SlotFile], Any]]) -> None:
        """Do all of it and make it durable, or nothing."""
        with self._by_name():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self._format != FORMAT:
                    self._connection.execute(f"PRAGMA user_version = {FORMAT}")
                for work in works:
                    work(self)
                if self._shared:
                    self._transactions = self._number("SELECT transactions FROM slot")
                count = self._transactions + 1
                ours = self._connection.execute(
                    "UPDATE slot SET transactions = ?, epoch = ?2 WHERE epoch <= ?2", (count, self.epoch)
                ).rowcount
                if not ours:
                    raise StateOutdated(f"{self._path}: another router has taken this slot over (epoch {self.epoch})")
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self._transactions, self._format = count, FORMAT
            self._acknowledged.write(count)

    def change(self, owner: str, changes: Sequence[Change], *, anew: bool) -> None:
        """Inside a transaction: put and delete rows of an owner; `anew`: in place of all that it had."""
        if anew:
            self._connection.execute("DELETE FROM entries WHERE owner = ?", (owner,))
        gone = [(owner, each.kind, each.key) for each in changes if each.value is None]
        if gone:
            self.slack = True
            self._connection.executemany("DELETE FROM entries WHERE owner = ? AND kind = ? AND key = ?", gone)
        put = [each for each in changes if each.value is not None]
        for start in range(0, len(put), ROWS_AT_ONCE):
            some = put[start : start + ROWS_AT_ONCE]
            rows = ", ".join(["(?, ?, ?, ?, ?)"] * len(some))
            self._connection.execute(
                f"INSERT INTO entries VALUES {rows} "
                "ON CONFLICT (owner, kind, key) DO UPDATE SET value = excluded.value, sum = excluded.sum",
                [
                    field
                    for each in some
                    for field in (owner, each.kind, each.key, each.value, crc32(each.value or b""))
                ],
            )

    def delete(self, owner: str) -> None:
        """Inside a transaction: delete all rows of an owner."""
        self.slack = True
        self._connection.execute("DELETE FROM entries WHERE owner = ?", (owner,))

    def claim(self, epoch: int) -> None:
        """Take the slot over for this epoch: who has an older one commits nothing any more."""
        if epoch < self.epoch:
            raise StateOutdated(f"{self._path}: epoch {self.epoch} has it, and {epoch} is older")
        self._enter(lambda: epoch)

    def succeed(self) -> None:
        """Whoever has shared it with others, and goes on, must not go on here."""
        if self.epoch >= SHARED_EPOCHS:
            self.claim(self.epoch + 1)

    def take_over(self) -> int:
        """Take the slot over for the epoch behind its last one, which is returned."""
        self._enter(lambda: self._number("SELECT epoch FROM slot") + 1)
        epoch: int = self.epoch
        return epoch

    def _enter(self, epoch: Callable[[], int]) -> None:
        """Go on in an epoch, if that is committed: who was refused it may commit nothing under it later on."""

        def enter(file: SlotFile) -> None:
            file.epoch = epoch()

        before = self.epoch
        try:
            self.transaction((enter,))
        except BaseException:
            self.epoch = before
            raise

    def load(self, owner: str) -> list[StateRow]:
        """All rows of an owner, ordered by kind and key."""
        with self._by_name():
            rows = self._connection.execute(
                "SELECT kind, key, value, sum FROM entries WHERE owner = ? ORDER BY kind, key", (owner,)
            ).fetchall()  # a cursor that an error holds on to would keep the file open, and locked
            return [StateRow(kind, key, self._whole(value, owner, check)) for kind, key, value, check in rows]

    def owners(self, kind: str, key: int | str, after: str, limit: int) -> list[tuple[str, bytes]]:
        """The next owners behind `after` that have this row, in their order, with its value."""
        with self._by_name():
            rows = self._connection.execute(OWNERS, (after, kind, key, limit)).fetchall()
            return [(owner, self._whole(value, owner, check)) for owner, value, check in rows]

    def _whole(self, value: bytes, owner: str, check: int) -> bytes:
        """SQLite finds out when a page is none, and not when a byte in it is another."""
        if crc32(value) != check:
            raise StateDamaged(f"{self._path}: a row of {owner!r} is not what was written")
        return value

    def holdings(self) -> list[tuple[str, str, int, int]]:
        """Of each owner and kind: how many rows there are, and their bytes."""
        with self._by_name():
            return self._connection.execute(
                "SELECT owner, kind, count(*), sum(length(value)) FROM entries GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()

    def vacuum(self) -> None:
        """Give a part of the room of deleted rows back to the disk; `slack` says whether there is more."""
        with self._by_name():
            if self._number("PRAGMA freelist_count") > KEPT_FREE:
                self._connection.execute(f"PRAGMA incremental_vacuum({VACUUM_STEP})").fetchall()
                self.slack = self._number("PRAGMA freelist_count") > KEPT_FREE
                if not self.slack:  # the file itself becomes shorter as the WAL is written back
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            else:
                self.slack = False

    def close(self) -> None:
        """Write the WAL back and let go of the file. What cannot be written back stays in the WAL."""
        self._connection.close()
        self._acknowledged.close()

    @contextmanager
    def _by_name(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            for said, kind, meaning in MEANINGS:
                if said in str(error):
                    raise kind(f"{self._path}: {meaning}") from error
            raise StateError(f"{self._path}: {error}") from error
        except OSError as error:
            kind = StateFull if error.errno == errno.ENOSPC else StateError
            raise kind(f"{self._path}: {error.strerror or error}") from error
        except (MemoryError, OverflowError, TypeError, ValueError) as error:  # of values that SQLite cannot hold
            raise StateError(f"{self._path}: {error}") from error


def _sync_directory(path: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
