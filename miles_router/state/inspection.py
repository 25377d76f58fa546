"""The command `miles-router state DIR`: list what a state directory contains while no router runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import orjson

from miles_router.errors import ConfigError, StateError
from miles_router.state.blobs import Blobs
from miles_router.state.journal import Journal

BAR = 40  # characters


class Holding(NamedTuple):
    """The amount of data of one owner. `large` is the bytes of its large blobs; `kind` is empty without a head."""

    file: str
    owner: str
    kind: str
    blobs: int
    nbytes: int
    large: int


def holdings(directory: Path) -> Iterator[Holding]:
    """Yield every owner in the directory, file by file.

    Raises:
        ConfigError: the directory does not exist, or a file cannot be read.
    """
    for journal, name in _journals(directory):
        for owner, head, *sizes in journal.holdings():
            yield Holding(name, owner, "" if head is None else kind_of(owner, head), *sizes)


def kind_of(owner: str, head: bytes) -> str:
    """Return the kind named in an owner's head.

    Raises:
        ConfigError: the head cannot be parsed or names no kind.
    """
    try:
        return str(orjson.loads(head)["kind"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"state: the head of {owner!r} cannot be read: {error!r}") from None


def blobs_of(directory: Path, owner: str) -> list[Blobs]:
    """Return the small blobs of an owner, one mapping for each file that has any.

    Raises:
        ConfigError: no file has an owner of this name, or a file cannot be read.
    """
    found = [blobs for journal, _ in _journals(directory) if (blobs := journal.load(owner))]
    if not found:
        raise ConfigError(f"state: {directory} holds nothing of {owner!r}")
    return found


def _journals(directory: Path) -> Iterator[tuple[Journal, str]]:
    paths = sorted([*directory.glob("slot-[0-9][0-9].sqlite"), *directory.glob("control.sqlite")])
    if not paths:
        raise ConfigError(f"state: {directory} holds no state of a router")
    for done, path in enumerate(paths, 1):
        try:
            # Opened as shared, because otherwise SQLite would switch the file to a WAL. Machines that share the
            # directory and still run would then use that WAL.
            with closing(Journal(path, "process", shared=True)) as journal:
                yield journal, path.stem
        except StateError as error:
            raise ConfigError(f"state: {error}") from None
        _show_progress(done, len(paths))


def _show_progress(done: int, count: int) -> None:
    if sys.stderr.isatty():
        full = BAR * done // count
        end = "\n" if done == count else ""
        print(f"\r[{'#' * full}{' ' * (BAR - full)}] {done} of {count} files", end=end, file=sys.stderr, flush=True)
