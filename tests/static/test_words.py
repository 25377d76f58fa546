"""The cheap half of the rules for plain words: banned words, how docstrings begin, and how long test names are."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = sorted(path for package in ("miles_router", "middleware_hub") for path in (ROOT / package).rglob("*.py"))
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Words that hide who does what, or that English technical prose does not use.
BANNED = re.compile(r"\b(nobody|Nobody|somebody|Somebody|whoever|Whoever|anew|(?<!there )(?:is|are) none)\b")
#: A docstring begins with a verb or a noun; these words begin a riddle.
BEGINNINGS = frozenset(
    {"As", "How", "It", "Its", "Of", "See", "Such", "That", "These", "They", "Those", "What", "Where"}
    | {"Which", "Who", "Whom", "Whose", "Why"}
)
MOST_CHARACTERS = 80
#: Tokens with words for people. From Python 3.12 on, f-strings are tokens of their own.
PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
#: Folders and pages that are still to be rewritten. Only ever shortened.
NOT_YET: tuple[str, ...] = ()


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments and texts of a module, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", SOURCE, ids=_name)
def test_the_source_has_no_banned_words_and_docstrings_begin_plainly(path: Path) -> None:
    if _name(path).startswith(NOT_YET):
        pytest.skip("still to be rewritten")
    text = path.read_text(encoding="utf-8")
    found = [f"{line}: {word[0]}" for line, prose in _prose(text) for word in BANNED.finditer(prose)]
    found += [
        f"{line}: {start}" for line, doc in _docstrings(ast.parse(text)) if (start := doc.split()[0]) in BEGINNINGS
    ]
    assert not found, f"{_name(path)}: {', '.join(found)}"


@pytest.mark.parametrize("path", DOCS, ids=_name)
def test_the_docs_have_no_banned_words(path: Path) -> None:
    if _name(path).startswith(NOT_YET):
        pytest.skip("still to be rewritten")
    text = re.sub(r"`[^`]*`", "", path.read_text(encoding="utf-8"))
    found = [f"{text.count(chr(10), 0, word.start()) + 1}: {word[0]}" for word in BANNED.finditer(text)]
    assert not found, f"{_name(path)}: {', '.join(found)}"


def test_the_names_of_tests_are_short() -> None:
    long = [
        f"{_name(path)}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and len(node.name) > MOST_CHARACTERS
    ]
    assert not long
