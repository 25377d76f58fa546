"""Pages hold together: links lead somewhere, fences are of a known kind, guarantees have tests that exist."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import (
    KINDS,
    PAGES,
    ROOT,
    all_blocks,
    anchor,
    anchors,
    guarantee_tests,
    guarantees,
    links,
    name_of,
    prose,
    read,
)

LINE_LENGTH = 120
HEADING_LENGTH = 60
FRAMEWORKS = {"miles", "slime", "verl", "prime-rl", "SkyRL", "TRL", "Dressage"}
GUARANTEES = [heading for headings in guarantees().values() for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https?://", link):
            continue
        if not target.exists() or (heading and heading not in anchors(target)):
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


def named_tests() -> list[str]:
    """Return the tests that guarantees and frameworks' calls name."""
    of_calls = re.findall(r"tests/[\w/]+\.py::\w+", read("tests/frameworks.yaml"))
    return list(dict.fromkeys(chain(*guarantee_tests().values(), of_calls)))


@pytest.mark.parametrize("test", named_tests())
def test_every_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("heading", GUARANTEES)
def test_every_guarantee_is_short_and_has_tests(heading: str) -> None:
    tests = guarantee_tests()[anchor(heading)]
    assert len(heading) <= HEADING_LENGTH
    assert tests
    assert len(set(tests)) == len(tests)


def test_tests_are_mapped_to_guarantees_of_the_page() -> None:
    assert len(GUARANTEES) > 20
    assert list(guarantee_tests()) == [anchor(heading) for heading in GUARANTEES]


def test_the_page_of_guarantees_names_no_tests() -> None:
    assert "tests/" not in read("docs/guarantees.md")


def test_every_call_of_a_framework_has_a_test() -> None:
    calls: dict[str, int] = {}
    for section in read("docs/frameworks.md").split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        calls[name] = len(re.findall(r"^\| (?!call \||---)", text, re.MULTILINE))
    tests = yaml.safe_load(read("tests/frameworks.yaml"))["rows"]
    assert set(calls) == FRAMEWORKS
    assert calls == {name: len(rows) for name, rows in tests.items()}
    assert all(row for rows in tests.values() for row in rows)
