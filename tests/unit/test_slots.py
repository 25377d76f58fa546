"""The slots that sessions and texts are dealt into."""

from collections import Counter

from miles_router.slots import SLOTS, slot_of


def test_a_name_has_the_same_slot_in_every_process_and_release() -> None:
    assert [slot_of(name) for name in ("", "a", "session-1", "Ünïcode")] == [52, 47, 44, 40]


def test_names_are_spread_evenly() -> None:
    counts = Counter(slot_of(f"session-{number}") for number in range(64 * 400))
    assert len(counts) == SLOTS
    assert max(counts.values()) < 1.25 * 400
