"""What is believed once: by all processes of a machine together, each of which writes alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_router.cluster.nodes.seen import TRIES, Seen
from miles_router.cluster.peers import Peers

#: One process that takes tags as fast as it can, once it is told to begin, and says which it was the first to see.
TAKER = """
import sys
from pathlib import Path
from miles_router.cluster.nodes.seen import Seen
from miles_router.cluster.peers import Peers

seen = Seen(Peers(int(sys.argv[1]), 2, Path(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
print(*(tag for tag in range(1, 20_001) if seen.takes(7, tag << 20 | tag)))
"""


def test_what_one_process_has_taken_another_of_its_machine_does_not_take_nor_one_that_comes_after_it(
    tmp_path: Path,
) -> None:
    one, other = (Seen(Peers(index, 2, tmp_path)) for index in range(2))
    assert one.takes(3, 11)
    assert not other.takes(3, 11)
    assert other.takes(3, 12)
    assert not one.takes(3, 12)
    assert not one.takes(3, 11)
    after = Seen(Peers(0, 2, tmp_path))
    assert not after.takes(3, 11)
    assert not after.takes(3, 12)
    assert after.takes(4, 11), "of another beat"


def test_of_two_processes_that_are_shown_the_same_at_the_same_time_no_two_believe_it(tmp_path: Path) -> None:
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, str(index), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for each in takers:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in takers:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    one, other = (set(each.communicate()[0].split()) for each in takers)
    assert {each.returncode for each in takers} == {0}
    assert one | other, "most are believed by one of them"
    assert not one & other


def test_where_there_is_no_room_nothing_is_believed(tmp_path: Path) -> None:
    seen = Seen(Peers(0, 1, tmp_path))
    for number in range(TRIES):
        assert seen.takes(1, (number + 1) << 32)
    with pytest.raises(OverflowError):
        seen.takes(1, (TRIES + 1) << 32)
