"""The journal of one slot, in a SQLite file. One thread makes all calls.

Normally the file uses a WAL with an exclusive lock taken first (https://www.sqlite.org/wal.html#noshm). So one process
has it open, and there is no shared-memory file. Where a WAL's bytes are damaged, SQLite silently ends it at the damage
(https://www.sqlite.org/fileformat2.html#wal_file_format). Therefore each transaction is numbered, and a second file
counts the acknowledged ones.

A directory shared by several machines has no shared memory, and a stopped process must not block its successor. There
each transaction locks the file for itself, with a rollback journal, and checks that its epoch is still the newest.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from miles_router.errors import StateError, StateFull, StateHeld, StateOutdated
from miles_router.state.blobs import Blobs, Changes, Sync

#: "MRst", which marks the file as the router's (`PRAGMA application_id`).
APPLICATION = 0x4D527374
#: The version of the tables below and of the blobs stored in them (`PRAGMA user_version`).
FORMAT = 5
#: The table of small blobs, and the table of large blobs that `load` reads only when asked.
SMALL, LARGE = "journal", "large"
COLUMNS = (
    "(owner TEXT NOT NULL, seq INTEGER NOT NULL, blob BLOB NOT NULL, sum INTEGER NOT NULL, PRIMARY KEY (owner, seq))"
)
TABLES = (
    f"CREATE TABLE {SMALL} {COLUMNS}",
    f"CREATE TABLE {LARGE} {COLUMNS}",
    "CREATE TABLE slot (transactions INTEGER NOT NULL, epoch INTEGER NOT NULL)",
    "INSERT INTO slot VALUES (0, 0)",
)
#: The count of acknowledged commits and its complement, so that a torn or foreign file is recognized.
COUNT = struct.Struct("<QQ")
ALL_BITS = (1 << 64) - 1
#: Blobs in one SQL statement. Each statement releases the interpreter lock and must get it back afterwards.
AT_ONCE = 64
#: KiB of page cache for one slot.
PAGE_CACHE = 512
#: Bytes of disk that a WAL keeps after it is written back.
WAL_KEPT = 4 * 1024 * 1024
#: Seconds to wait for a transaction of another machine, where files are shared.
PATIENCE = 0.25
#: Epochs from this number on come from routers that share the directory.
SHARED_EPOCHS = 1 << 32
#: Pages of 4 KiB given back to the disk in one step, and free pages kept for later writes.
VACUUM_STEP = 256
KEPT_FREE = 256

#: Step from owner to owner by the key, without reading what lies between their heads.
OWNERS = """
WITH RECURSIVE walk(owner) AS (
    SELECT (SELECT min(owner) FROM journal WHERE owner > ?1)
    UNION ALL
    SELECT (SELECT min(owner) FROM journal WHERE owner > walk.owner) FROM walk WHERE walk.owner IS NOT NULL
)
SELECT journal.owner, blob, sum FROM walk JOIN journal ON journal.owner = walk.owner AND seq = 0 LIMIT ?2
"""
#: Parts of SQLite's messages (`sqlite3_errstr`), each with the error to raise. Python 3.10 does not give error codes.
SQLITE_ERRORS: tuple[tuple[str, type[StateError], str], ...] = (
    ("database is locked", StateHeld, "another running router has it open"),
    ("database or disk is full", StateFull, "no room is left on the disk"),
    ("malformed", StateError, "it is damaged"),
    ("file is not a database", StateError, "it is no file of miles-router's, or damaged"),
)


class Journal:
    """An open journal.

    Raises (all methods):
        StateError: a subclass names the cause. A failed change leaves stored data as it was. If a COMMIT itself fails,
            its outcome is unknown until the file is next opened.
    """

    def __init__(self, path: Path, sync: Sync, *, shared: bool = False) -> None:
        """Open and check the file; create it if needed.

        Args:
            shared: other machines may take the slot over while it is open.
        """
        self._path = path
        self._shared = shared
        with self._named_errors():
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=PATIENCE if shared else 0
            )
        try:
            with self._named_errors():
                self._open(sync)
                self._counted = path.with_suffix(".acknowledged")
                self._count = os.open(self._counted, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except BaseException:
            self._connection.close()
            raise
        try:
            with self._named_errors():
                self._check_count()
        except BaseException:
            self.close()
            raise
        self._count_synced = sync == "machine"
        #: Whether deleted blobs may have left space to give back to the disk.
        self.slack = True

    def _open(self, sync: Sync) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # before the first read: otherwise the WAL needs shared memory
        made = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
        new = made == (0, 0) and not self._number("SELECT count(*) FROM sqlite_master")
        if not new and made[0] != APPLICATION:
            raise StateError(f"{self._path}: it is no file of miles-router's")
        if not new and made[1] != FORMAT:
            raise StateError(f"{self._path}: its format is {made[1]}, and this miles-router reads {FORMAT}")
        if new:
            execute("PRAGMA auto_vacuum = INCREMENTAL")
        execute(f"PRAGMA journal_mode = {'TRUNCATE' if self._shared else 'WAL'}")
        if self._shared:
            execute("PRAGMA locking_mode = NORMAL")
        execute(f"PRAGMA synchronous = {'FULL' if sync == 'machine' else 'NORMAL'}")
        execute(f"PRAGMA journal_size_limit = {WAL_KEPT}")
        execute(f"PRAGMA cache_size = -{PAGE_CACHE}")
        execute("BEGIN IMMEDIATE")  # in exclusive mode the lock stays, before any caller learns that the slot is ours
        if new:
            for statement in (*TABLES, f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {FORMAT}"):
                execute(statement)
        execute("COMMIT")
        if new and sync == "machine":
            _sync_directory(self._path.parent)

    def _check_count(self) -> None:
        content = os.pread(self._count, COUNT.size + 1, 0)  # before the table: another machine may commit in between
        self._transactions, self.epoch = self._connection.execute("SELECT transactions, epoch FROM slot").fetchone()
        if not content:  # without a count there is nothing to compare
            return
        acknowledged, complement = COUNT.unpack(content) if len(content) == COUNT.size else (0, 0)
        if complement != acknowledged ^ ALL_BITS:
            raise StateError(f"{self._counted}: it is no count of commits. Remove it to go on without one")
        if acknowledged > self._transactions:
            raise StateError(
                f"{self._path}: {acknowledged - self._transactions} of {acknowledged} acknowledged commits are gone: "
                f"its end or its WAL is damaged. Remove {self._counted.name} to go on without them"
            )

    def _number(self, question: str) -> int:
        answer: int = self._connection.execute(question).fetchone()[0]
        return answer

    def transaction(self, works: Sequence[Callable[[Journal], Any]]) -> None:
        """Run all `works` in one durable transaction, or change nothing.

        Raises:
            StateOutdated: a newer epoch has the slot.
        """
        with self._named_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
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
            self._transactions = count
            os.pwrite(self._count, COUNT.pack(count, count ^ ALL_BITS), 0)  # before any caller learns of the commit
            if self._count_synced:
                os.fdatasync(self._count)

    def append(self, owner: str, blobs: Changes, large: Changes, *, replace_all: bool) -> None:
        """Inside a transaction: write blobs under their numbers. A blob replaces an older one; None deletes it.

        Args:
            replace_all: delete all that the owner has first.
        """
        if replace_all:
            self.delete(owner)
        for table, changes in ((SMALL, blobs), (LARGE, large)):
            gone = [(owner, seq) for seq, blob in changes.items() if blob is None]
            if gone:
                self.slack = True
                self._connection.executemany(f"DELETE FROM {table} WHERE owner = ? AND seq = ?", gone)
            put = [(owner, seq, blob, crc32(blob)) for seq, blob in changes.items() if blob is not None]
            for start in range(0, len(put), AT_ONCE):
                some = put[start : start + AT_ONCE]
                places = ", ".join(["(?, ?, ?, ?)"] * len(some))
                fields = [field for each in some for field in each]
                self._connection.execute(
                    f"INSERT INTO {table} VALUES {places} "
                    "ON CONFLICT (owner, seq) DO UPDATE SET blob = excluded.blob, sum = excluded.sum",
                    fields,
                )

    def delete(self, owner: str, *, large_alone: bool = False) -> None:
        """Inside a transaction: delete all blobs of an owner, or only its large ones."""
        self.slack = True
        for table in (LARGE,) if large_alone else (SMALL, LARGE):
            self._connection.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))

    def claim(self, epoch: int | None = None) -> int:
        """Take the slot over for an epoch and return it. The default is the slot's last epoch plus one.

        Afterwards a process with an older epoch cannot commit. If the transaction fails, this process keeps its old
        epoch, so that it cannot use the refused one later.

        Raises:
            StateOutdated: the slot already has a newer epoch.
        """
        before = self.epoch
        if epoch is not None and epoch < before:
            raise StateOutdated(f"{self._path}: the slot has epoch {before}, and epoch {epoch} is older")

        def set_epoch(journal: Journal) -> None:
            journal.epoch = journal._number("SELECT epoch FROM slot") + 1 if epoch is None else epoch

        try:
            self.transaction((set_epoch,))
        except BaseException:
            self.epoch = before
            raise
        claimed: int = self.epoch
        return claimed

    def load(self, owner: str, table: str = SMALL) -> Blobs:
        """Return the blobs of an owner in one table, ordered by number."""
        with self._named_errors():
            rows = self._connection.execute(
                f"SELECT seq, blob, sum FROM {table} WHERE owner = ? ORDER BY seq", (owner,)
            ).fetchall()  # fetched at once: a cursor kept alive by an exception would keep the file open and locked
            return {seq: self._checked(blob, owner, check) for seq, blob, check in rows}

    def owners(self, after: str, limit: int) -> list[tuple[str, bytes]]:
        """Return up to `limit` pairs (owner, head) of the owners that have a head, ordered by name and starting after
        `after`.
        """
        with self._named_errors():
            rows = self._connection.execute(OWNERS, (after, limit)).fetchall()
            return [(owner, self._checked(blob, owner, check)) for owner, blob, check in rows]

    def _checked(self, blob: bytes, owner: str, check: int) -> bytes:
        """Check the CRC. SQLite detects malformed pages but not flipped bytes."""
        if crc32(blob) != check:
            raise StateError(f"{self._path}: a row of {owner!r} is not what was written")
        return blob

    def holdings(self) -> list[tuple[str, bytes | None, int, int, int]]:
        """Return (owner, head or None, blobs, bytes of small blobs, bytes of large blobs) for each owner."""
        with self._named_errors():
            return self._connection.execute(
                "SELECT owner, max(head), count(*), sum(small), sum(large) FROM (SELECT owner, CASE seq WHEN 0 THEN "
                f"blob END AS head, length(blob) AS small, 0 AS large FROM {SMALL} "
                f"UNION ALL SELECT owner, NULL, 0, length(blob) FROM {LARGE}) GROUP BY owner ORDER BY owner"
            ).fetchall()

    def vacuum(self) -> None:
        """Give some space of deleted blobs back to the disk. `slack` stays True while there is more."""
        with self._named_errors():
            if self._number("PRAGMA freelist_count") > KEPT_FREE:
                self._connection.execute(f"PRAGMA incremental_vacuum({VACUUM_STEP})").fetchall()
                self.slack = self._number("PRAGMA freelist_count") > KEPT_FREE
                if not self.slack:  # the file only shrinks when the WAL is written back
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            else:
                self.slack = False

    def close(self) -> None:
        """Write the WAL back and close the file. Pages that cannot be written back stay in the WAL."""
        with self._named_errors():
            try:
                self._connection.close()
            finally:
                os.close(self._count)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            for text, kind, meaning in SQLITE_ERRORS:
                if text in str(error):
                    raise kind(f"{self._path}: {meaning}") from error
            raise StateError(f"{self._path}: {error}") from error
        except OSError as error:
            kind = StateFull if error.errno == errno.ENOSPC else StateError
            raise kind(f"{self._path}: {error.strerror or error}") from error
        except (MemoryError, OverflowError, TypeError, ValueError) as error:  # for values that SQLite cannot store
            raise StateError(f"{self._path}: {error}") from error


def _sync_directory(path: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
