"""Locks of processes on the bytes of a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_router.state.locks import ByteLocks

OTHER = """
import pathlib, sys
from miles_router.state.locks import ByteLocks

locks = ByteLocks(pathlib.Path(sys.argv[1]))
print(locks.take(7, beside_others=sys.argv[2] == "beside"), flush=True)
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
        assert (took, mine.take(7, beside_others=True), mine.take(8, beside_others=True)) == ("True", False, True)
    assert mine.take(7), "it has ended"
    mine.close()


def test_those_that_look_at_once_take_none_of_them_for_the_leader(tmp_path: Path) -> None:
    mine = ByteLocks(tmp_path)
    with other(tmp_path, "beside") as took:
        assert (took, mine.take(7, beside_others=True), mine.take(7)) == ("True", True, False)
    mine.close()
