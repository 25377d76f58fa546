"""The cheap half of the rules for plain words: banned words, how docstrings begin, and how long test names are."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

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


def _found(text: str) -> Iterator[tuple[int, str]]:
    """Yield banned words and docstrings' beginnings of a module, each with its line."""
    if BANNED.search(text):  # the tokenizer is slow
        yield from ((line, word[0]) for line, prose in _prose(text) for word in BANNED.finditer(prose))
    for line, docstring in _docstrings(ast.parse(text)):
        if (start := docstring.split()[0]) in BEGINNINGS:
            yield line, start


def test_the_source_has_no_banned_words_and_docstrings_begin_plainly() -> None:
    assert [(_name(path), *each) for path in SOURCE for each in _found(path.read_text(encoding="utf-8"))] == []


def _parameters(node: ast.AST) -> set[str]:
    """Return the names that `Args` of a function or class may document."""
    if isinstance(node, ast.ClassDef):
        inits = [each for each in node.body if getattr(each, "name", None) in ("__init__", "__new__")]
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        return _parameters(inits[0]) if inits else {each.id for each in fields if isinstance(each, ast.Name)}
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}


def _unknown_arguments(tree: ast.Module) -> Iterator[str]:
    """Yield the arguments that docstrings document and signatures lack."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            _, _, block = (ast.get_docstring(node) or "").partition("\nArgs:\n")
            block = re.split(r"\n(?=\S)", block)[0]
            for names in re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", block, re.MULTILINE):
                known = _parameters(node)
                yield from (f"{node.name}: {each}" for each in names.split(", ") if each.lstrip("*") not in known)


def test_docstrings_document_arguments_that_exist() -> None:
    trees = {_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE}
    assert [(name, each) for name, tree in trees.items() for each in _unknown_arguments(tree)] == []


def test_the_docs_have_no_banned_words() -> None:
    texts = {_name(path): re.sub(r"`[^`]*`", "", path.read_text(encoding="utf-8")) for path in DOCS}
    found = [
        (name, text.count("\n", 0, word.start()) + 1, word[0])
        for name, text in texts.items()
        for word in BANNED.finditer(text)
    ]
    assert found == []


def test_the_names_of_tests_are_short() -> None:
    named = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = {path: named.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert sum(map(len, names.values())) > 1000
    assert [(_name(path), name) for path in paths for name in names[path] if len(name) > MOST_CHARACTERS] == []
