"""The house's own rules, held against the source: where names may stand, and how large things may be."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROUTER, HUB = ROOT / "miles_router", ROOT / "middleware_hub"
MODULES = sorted(path for package in (ROUTER, HUB) for path in package.rglob("*.py"))
PRODUCT = [path for path in MODULES if "testing" not in path.parts]
MAX_LINES = 450
MAX_MODULES_BESIDE_FOLDERS = 10
ENGINES = ("sglang", "vllm", "tensorrt", "trtllm", "lmdeploy")
FRAMEWORKS = ("slime", "verl", "dressage", "skyrl", "openrlhf", "areal")
#: What the client and the server see of one thing, each from its end.
AT_BOTH_ENDS = ("NotFound", "Session")
#: Words with a framework's or an engine's name that are ours, or that users type.
OUR_WORDS = ("sglang_router", "x-sglext", "sglext")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def words_of_code(path: Path) -> list[tuple[int, str]]:
    return [*_words_of_code(path)]


def _words_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers and strings, without docstrings and comments: a source may be cited, and not be a condition."""
    parsed = tree(path)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(parsed)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(parsed):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and id(node) not in docstrings and isinstance(node.value, (str, bytes)):
            yield line, node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""


def places_of(names: tuple[str, ...], allowed: tuple[str, ...]) -> list[str]:
    found = []
    for path in PRODUCT:
        if any(part in allowed for part in (*path.relative_to(ROOT).parts[:-1], path.stem)):
            continue
        for line, word in words_of_code(path):
            lowered = word.lower()
            for ours in OUR_WORDS:
                lowered = lowered.replace(ours, "")
            if re.search(rf"(?<![a-z])({'|'.join(names)})(?![a-z])", lowered):
                found.append(f"{name(path)}:{line}: {word[:60]}")
    return found


def test_engines_are_named_in_their_folder_alone() -> None:
    assert places_of(ENGINES, ("engines", "cli")) == []  # the command says for whom it is


def test_frameworks_are_named_in_dialects_and_compat_alone() -> None:
    assert places_of(FRAMEWORKS, ("dialects", "compat")) == []


def test_time_is_bound_in_one_way() -> None:
    """`asyncio.wait_for` may swallow a cancellation before Python 3.12; see `tasks.within`."""
    assert [name(path) for path in PRODUCT if "asyncio.wait_for(" in path.read_text(encoding="utf-8")] == []


def test_no_class_name_stands_for_two_things() -> None:
    classes = defaultdict(list)
    for path in PRODUCT:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{name(path)}:{node.lineno}")
    twice = {each: where for each, where in classes.items() if len(where) > 1 and each not in AT_BOTH_ENDS}
    assert twice == {}


def test_a_module_fits_one_idea() -> None:
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def test_few_modules_stand_beside_the_folders() -> None:
    beside = [path.name for path in ROUTER.glob("*.py") if not path.name.startswith("__")]
    assert len(beside) <= MAX_MODULES_BESIDE_FOLDERS, beside


def test_the_glossary_has_classes_that_there_are() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w+)`", glossary))
    classes = {node.name for path in PRODUCT for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}
    assert named, "the glossary names no class"
    assert named - classes == set()
    words = Counter(re.findall(r"\*\*([^*]+)\*\*", glossary))
    assert [word for word, times in words.items() if times > 1] == [], "a word has one meaning, in one place"


def test_texts_come_into_pages_by_one_door_which_shows_all_of_them() -> None:
    assets = [HUB / "view" / "assets", HUB / "dashboard" / "assets"]
    scripts = [path for folder in assets for path in folder.glob("*.js") if path.name != "elements.js"]
    writes = re.compile(
        r"(textContent|innerText|innerHTML|outerHTML|document\.title|nodeValue) = "
        r"|createElement\(\"(?!canvas)|createTextNode|insertAdjacent|document\.write|setAttribute\(\"(title|aria-label)"
    )
    found = [f"{name(path)}: {each[0]}" for path in scripts for each in writes.finditer(path.read_text("utf-8"))]
    assert scripts
    assert found == []
