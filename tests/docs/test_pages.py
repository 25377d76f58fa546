"""Pages hold together: links lead somewhere, fences are of a known kind, promises name tests that exist."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.pages import KINDS, PAGES, ROOT, all_blocks, anchors, links, name_of, prose, read

LINE_LENGTH = 120
FRAMEWORKS = {"miles", "slime", "verl", "prime-rl", "SkyRL", "TRL", "Dressage"}
PROMISE_PAGE, CALLS_PAGE = "docs/behavior.md", "docs/drop-in.md"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https?://", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_keep_to_their_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert text.count("```") % 2 == 0
    long = [line for line in prose(page).splitlines() if len(line) > LINE_LENGTH and not line.startswith(("|", "!["))]
    assert long == []


def test_every_fence_says_what_it_promises() -> None:
    assert [str(block) for block in all_blocks() if block.kind not in KINDS] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached = set(links(ROOT / "README.md"))
    assert [name_of(page) for page in PAGES if page.name != "README.md" and name_of(page) not in reached] == []


def promises() -> list[str]:
    """The tests that the pages of promises and of frameworks' calls name."""
    named = [re.findall(r"`(tests/[\w/]+\.py::\w+)`", read(page)) for page in (PROMISE_PAGE, CALLS_PAGE)]
    return list(dict.fromkeys(chain(*named)))


@pytest.mark.parametrize("promise", promises())
def test_every_promise_names_a_test_that_exists(promise: str) -> None:
    path, _, name = promise.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_promise_has_a_test() -> None:
    items = re.findall(r"^- (.*?)(?=^- |^#|^$|\Z)", prose(ROOT / PROMISE_PAGE), re.MULTILINE | re.DOTALL)
    assert len(items) > 20
    assert [item for item in items if "tests/" not in item] == []


def test_every_call_of_a_framework_has_a_test() -> None:
    calls: dict[str, list[str]] = {}
    for line in read(CALLS_PAGE).splitlines():
        if line.startswith("## "):
            framework = calls.setdefault(re.split(r"[# :]+", line)[1], [])
        elif line.startswith("| ") and not line.startswith(("| call |", "| --- |")):
            framework.append(line)
    assert {name for name, rows in calls.items() if len(rows) > 3} == FRAMEWORKS
    assert [row for rows in calls.values() for row in rows if not re.search(r"`tests/[^`|]+::test_\w+` \|$", row)] == []
