"""The public API for middlewares: few names, each on the author's page, and nothing else is imported by a layer."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.docs.pages import ROOT, blocks

MAIN = "miles_router.middlewares"
SUB_APIS = [f"{MAIN}.{name}" for name in ("rows", "generation", "state", "episodes")]
#: Beside them: errors that become answers, and two libraries that know nothing of the router.
BESIDE = ("miles_router.errors", "miles_router.engines", "miles_router.trajectory")
PAGE = ROOT / "docs" / "writing-a-middleware.md"
MOST_NAMES = 32
PATIENCE = 60
HUB = sorted((ROOT / "middleware_hub").rglob("*.py"))
#: Programs of their own, which are clients of a router.
CLIENTS = ROOT / "middleware_hub" / "auditing" / "tool"
SHOWN = {str(block): block.text for block in blocks(PAGE, "python")}


def names(module: str) -> list[str]:
    exported: list[str] = importlib.import_module(module).__all__
    return exported


def documented() -> list[str]:
    """The names in the tables of the page's section, in order: in the first column, of sub-APIs in the last."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Names\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    cells = [row[-1] if "`middlewares." in row[0] else row[0] for row in rows]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@functools.cache
def imports(source: str) -> list[tuple[str, str]]:
    return list(_imports(source))


def _imports(source: str) -> Iterator[tuple[str, str]]:
    """Modules of the router that a source imports from, each with a name; a module itself has none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "miles_router":
            yield from ((node.module or "", each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.partition(".")[0] == "miles_router")


def foreign(source: str, beside: tuple[str, ...] = BESIDE) -> list[str]:
    """What a source imports from the router that is not public to middlewares."""
    public = {module: names(module) for module in (MAIN, *SUB_APIS)}
    return [
        f"{module}: {name}"
        for module, name in imports(source)
        if name not in public.get(module, ()) and not f"{module}.".startswith(tuple(f"{each}." for each in beside))
    ]


def test_the_main_page_has_few_names() -> None:
    assert len(names(MAIN)) <= MOST_NAMES


def test_every_name_has_one_place() -> None:
    every = [name for module in (MAIN, *SUB_APIS) for name in names(module)]
    assert len(every) == len(set(every))


def test_every_name_stands_on_the_page_once() -> None:
    assert sorted(documented()) == sorted(name for module in (MAIN, *SUB_APIS) for name in names(module))


def test_every_name_is_used_by_a_layer_or_an_example() -> None:
    sources = [*SHOWN.values(), *(path.read_text(encoding="utf-8") for path in HUB)]
    used = {each for source in sources for each in imports(source)}
    assert {(module, name) for module in (MAIN, *SUB_APIS) for name in names(module)} - used == set()


def test_layers_import_the_public_api_alone() -> None:
    beside = {path: (*BESIDE, "miles_router.client") if path.is_relative_to(CLIENTS) else BESIDE for path in HUB}
    found = {str(path.relative_to(ROOT)): foreign(path.read_text(encoding="utf-8"), beside[path]) for path in HUB}
    assert {path: names for path, names in found.items() if names} == {}


def test_examples_import_the_main_page_alone() -> None:
    for place, source in SHOWN.items():
        assert {module for module, _ in imports(source)} <= {MAIN, "miles_router.errors", "miles_router.check"}, place
        assert [each for each in foreign(source) if "miles_router.check: stage" not in each] == [], place


def test_the_main_page_loads_no_sub_api_but_rows() -> None:
    """`Router` has a channel for each kind of rows."""
    code = f"import sys, {MAIN}; print(*(name for name in {SUB_APIS} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == [f"{MAIN}.rows"]
