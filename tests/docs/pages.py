"""The documentation as data: every page, its fenced blocks, its links.

What a fence promises:

    console   commands behind `$ `, run in order against real processes; shown output is compared (`...` is anything)
    bash      commands that are checked and not run: names, flags and make targets must exist
    python    run as a program; with a first line `# name.py` written to that file, for the blocks that follow
    yaml      a configuration that loads; with a first line `# name.yaml` also written to that file
    json      parses
    text      anything else: layouts, messages, commands for machines that no test has
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
KINDS = {"console", "bash", "python", "yaml", "json", "text"}

_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w[\w.-]*\.(?:py|yaml))\n")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    kind: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that its first line names."""
        found = _FILE_NAME.match(self.text)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """A page's path as people write it."""
    return page.relative_to(ROOT).as_posix()


@functools.cache
def read(name: str) -> str:
    """The text of a page, by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The fenced blocks of a page in order, of some kinds or of all."""
    text = page.read_text(encoding="utf-8")
    found = [Block(page, text.count("\n", 0, m.start()) + 1, m["kind"], m["text"]) for m in _FENCE.finditer(text)]
    return [block for block in found if not kinds or block.kind in kinds]


def all_blocks(*kinds: str) -> list[Block]:
    """The blocks of every page."""
    return [block for page in PAGES for block in blocks(page, *kinds)]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where a page's links lead."""
    return _LINK.findall(prose(page))


def anchor(heading: str) -> str:
    """Return the name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    return {anchor(heading) for heading in _HEADING.findall(prose(page))}


def guarantees() -> dict[str, list[str]]:
    """Return the headings of `docs/guarantees.md` that are guarantees, by section."""
    sections = re.split(r"^## (.+)$", prose(ROOT / "docs" / "guarantees.md"), flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^### (.+)$", text, re.MULTILINE)
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


@functools.cache
def guarantee_tests() -> dict[str, list[str]]:
    """Return the tests of each guarantee, by its anchor."""
    tests: dict[str, list[str]] = yaml.safe_load(read("tests/guarantees.yaml"))
    return tests
