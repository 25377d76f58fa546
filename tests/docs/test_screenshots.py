"""The pictures in the documentation can be taken again, and are those of pages as they are now."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, read
from tests.docs.screenshots import SHOTS
from tests.support.browser import Browser

PNG = b"\x89PNG\r\n\x1a\n"


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height, which a PNG's first chunk begins with."""
    assert picture.startswith(PNG)
    width, height = struct.unpack_from(">II", picture, len(PNG) + 8)
    return width, height


@pytest.mark.parametrize("names", SHOTS, ids=lambda names: names[0])
async def test_pictures_can_be_taken_again(browser: Browser, tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, taken in zip(names, await SHOTS[names](browser, tmp_path), strict=True):
        kept = (ROOT / "docs" / name).read_bytes()
        assert size_of(taken) == size_of(kept), name
        # Those of the dashboard show a real run, so they are not equally full.
        assert 0.25 < len(taken) / len(kept) < 4, "run python -m tests.docs.screenshots"


def test_every_picture_stands_on_its_page() -> None:
    pages = "".join(read(f"docs/{path.name}") for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in chain(*SHOTS) if f"]({name})" not in pages] == []
