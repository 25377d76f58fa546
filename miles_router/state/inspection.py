"""What a state directory holds, for a person, while no router runs: `miles-router state DIR`."""

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
    """How much an owner has; `large` is the bytes of its large blobs. Without a head it has no kind."""

    file: str
    owner: str
    kind: str
    blobs: int
    nbytes: int
    large: int


def holdings(directory: Path) -> Iterator[Holding]:
    """Iterate over the owners, file by file.

    Raises:
        ConfigError: there is no such directory, or a file cannot be read, and why.
    """
    for journal, name in _journals(directory):
        for owner, head, *sizes in journal.holdings():
            yield Holding(name, owner, "" if head is None else kind_of(owner, head), *sizes)


def kind_of(owner: str, head: bytes) -> str:
    """Return the kind that the head of an owner names.

    Raises:
        ConfigError: it names none.
    """
    try:
        return str(orjson.loads(head)["kind"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"state: the head of {owner!r} cannot be read: {error!r}") from None


def blobs_of(directory: Path, owner: str) -> list[Blobs]:
    """Return all blobs of an owner but the large ones, for each file that has some.

    Raises:
        ConfigError: no owner has this name, or a file cannot be read.
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
            # Else the file would have a WAL from now on, and machines that share it, and still run, go on with that.
            with closing(Journal(path, "process", shared=True)) as journal:
                yield journal, path.stem
        except StateError as error:
            raise ConfigError(f"state: {error}") from None
        _show_progress(done, len(paths))


def _show_progress(done: int, count: int) -> None:
    """Draw a bar on a terminal."""
    if sys.stderr.isatty():
        full = BAR * done // count
        end = "\n" if done == count else ""
        print(f"\r[{'#' * full}{' ' * (BAR - full)}] {done} of {count} files", end=end, file=sys.stderr, flush=True)
