"""Pages hold together: links lead somewhere, fences are of a known kind, guarantees have tests that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path

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


def is_broken(link: str, page: Path) -> bool:
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(heading and heading not in anchors(target))


def test_links_lead_to_files_and_headings_that_exist() -> None:
    inner = [(name_of(page), link, page) for page in PAGES for link in links(page) if not re.match(r"https?://", link)]
    assert [(name, link) for name, link, page in inner if is_broken(link, page)] == []


def test_pages_keep_to_their_form() -> None:
    texts = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}
    assert [name for name, text in texts.items() if not text.startswith("# ") or text.count("```") % 2] == []
    lines = [(name_of(page), line) for page in PAGES for line in prose(page).splitlines()]
    assert [each for each in lines if len(each[1]) > LINE_LENGTH and not each[1].startswith(("|", "!["))] == []


def test_every_fence_says_what_it_promises() -> None:
    assert [str(block) for block in all_blocks() if block.kind not in KINDS] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached = set(links(ROOT / "README.md"))
    assert [name_of(page) for page in PAGES if page.name != "README.md" and name_of(page) not in reached] == []


def functions(path: str) -> set[str]:
    tree = ast.parse(read(path))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_named_test_exists() -> None:
    """The tests that guarantees and frameworks' calls name."""
    of_calls = re.findall(r"tests/[\w/]+\.py::\w+", read("tests/frameworks.yaml"))
    named = defaultdict(set)
    for test in chain(*guarantee_tests().values(), of_calls):
        path, _, name = test.partition("::")
        named[path].add(name)
    assert {path: missing for path, names in named.items() if (missing := names - functions(path))} == {}


def test_every_guarantee_is_short_and_has_tests() -> None:
    assert [heading for heading in GUARANTEES if len(heading) > HEADING_LENGTH] == []
    tests = {heading: guarantee_tests()[anchor(heading)] for heading in GUARANTEES}
    assert [heading for heading, named in tests.items() if not named or len(set(named)) < len(named)] == []


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
