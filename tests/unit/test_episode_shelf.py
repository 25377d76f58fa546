"""The shelf gives what it holds, newest first from any place, whatever came and went: held against a sorted list."""

from __future__ import annotations

import random

from miles_router.middlewares.episodes import BLOCK, EpisodePlace, EpisodeShelf


def test_it_gives_what_a_sorted_list_would() -> None:
    chance = random.Random(17)
    shelf = EpisodeShelf[EpisodePlace]()
    held: set[EpisodePlace] = set()
    for step in range(12 * BLOCK):
        began = float(step) if chance.random() < 0.7 else float(chance.randrange(12 * BLOCK))
        place = (began, f"e{chance.randrange(4)}-{step}")
        shelf.add(place, place)
        held.add(place)
        if chance.random() < 0.4:
            gone = chance.choice([*held]) if step % 50 == 0 else place
            shelf.remove(gone)
            held.discard(gone)
        if step % 97 == 0:
            before = None if chance.random() < 0.2 else (float(chance.randrange(12 * BLOCK)), "e2")
            most = chance.randrange(1, 3 * BLOCK)
            wanted = sorted((each for each in held if before is None or each < before), reverse=True)[:most]
            assert shelf.newest(before, most) == wanted
    assert len(shelf) == len(held)
    for place in sorted(held, key=lambda each: each[1]):
        shelf.remove(place)
    shelf.remove((0.0, "never there"))
    assert (len(shelf), shelf.newest(None, 10)) == (0, [])
