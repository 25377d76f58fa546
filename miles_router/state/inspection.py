"""What a state directory holds, for a person, while no router runs: `miles-router state DIR`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from miles_router.errors import ConfigError, StateError
from miles_router.state.rows import StateRow
from miles_router.state.slot_file import SlotFile

BAR = 40  # characters


class Holding(NamedTuple):
    """How much an owner has of one kind."""

    file: str
    owner: str
    kind: str
    rows: int
    nbytes: int


def holdings(directory: Path) -> Iterator[Holding]:
    """What each owner has, file by file.

    Raises:
        ConfigError: there is no such directory, or a file cannot be read, and why.
    """
    for file, name in _files(directory):
        for owner, kind, rows, nbytes in file.holdings():
            yield Holding(name, owner, kind, rows, nbytes)


def rows_of(directory: Path, owner: str) -> list[StateRow]:
    """All rows of an owner.

    Raises:
        ConfigError: nobody has this name, or a file cannot be read.
    """
    rows = [row for file, _ in _files(directory) for row in file.load(owner)]
    if not rows:
        raise ConfigError(f"state: {directory} holds nothing of {owner!r}")
    return rows


def _files(directory: Path) -> Iterator[tuple[SlotFile, str]]:
    paths = sorted([*directory.glob("slot-[0-9][0-9].sqlite"), *directory.glob("control.sqlite")])
    if not paths:
        raise ConfigError(f"state: {directory} holds no state of a router")
    for done, path in enumerate(paths, 1):
        try:
            with closing(SlotFile(path, "process")) as file:
                yield file, path.stem
        except StateError as error:
            raise ConfigError(f"state: {error}") from None
        _show_progress(done, len(paths))


def _show_progress(done: int, count: int) -> None:
    """A bar, where somebody sees it."""
    if sys.stderr.isatty():
        full = BAR * done // count
        end = "\n" if done == count else ""
        print(f"\r[{'#' * full}{' ' * (BAR - full)}] {done} of {count} files", end=end, file=sys.stderr, flush=True)
