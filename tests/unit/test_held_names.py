"""What a process held is known to the one that comes after it, as long as there is room and somebody wants to know."""

from __future__ import annotations

from pathlib import Path

from miles_router.shards.held_names import KeptNames


def test_what_was_held_is_lost_for_those_that_come_after_and_what_was_removed_is_not(tmp_path: Path) -> None:
    first = KeptNames(tmp_path / "names", 10)
    for name in ("a", "b", "c", "d"):
        first.add(name)
    first.remove("b")
    first.add("e")
    first.remove("a")
    assert not any(map(first.was_lost, "abcde")), "nothing was lost yet"
    second = KeptNames(tmp_path / "names", 10)
    second.add("f")
    third = KeptNames(tmp_path / "names", 10)
    assert [name for name in "abcdefg" if third.was_lost(name)] == ["c", "d", "e", "f"]
    third.remove("c")
    third.add("d")
    assert [name for name in "abcdefg" if third.was_lost(name)] == ["e", "f"]


def test_there_is_always_room_for_what_is_held_and_the_oldest_lost_names_make_it(tmp_path: Path) -> None:
    first = KeptNames(tmp_path / "names", 3)
    for name in ("a", "b", "c"):
        first.add(name)
    second = KeptNames(tmp_path / "names", 3)
    for name in ("d", "e", "f"):
        second.add(name)
    third = KeptNames(tmp_path / "names", 3)
    assert all(map(third.was_lost, "abcdef"))
    for name in ("g", "h"):
        third.add(name)
    assert [name for name in "abcdefgh" if third.was_lost(name)] == ["c", "d", "e", "f"]
    fourth = KeptNames(tmp_path / "names", 3)
    assert {name for name in "abcdefgh" if fourth.was_lost(name)} == set("cdefgh")
