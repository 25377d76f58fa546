"""Control requests: where their paths stand, and how engines are told of the router's own accord."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

import miles_router
from miles_router.control.table import TABLE
from miles_router.engines import paths
from miles_router.engines.actions import Abort, Action, Continue, Flush, NameVersion, Pause
from miles_router.engines.engine import Engine
from miles_router.engines.sglang.engine import SGLANG
from miles_router.engines.sglang_jax.engine import WITH_ADAPTERS

ROOT = Path(miles_router.__file__).parent.parent
HOUSE = ROOT / "miles_router"
#: They speak the API from outside, as clients and workers do, and import nothing of the server.
OUTSIDE = (HOUSE / "client", HOUSE / "testing")
CONTROL = frozenset(row.path for row in TABLE)
ENGINES = frozenset(
    {*paths.MODEL_INFO, *paths.SERVER_INFO, *paths.SCHEMA, *paths.GENERATION, paths.HEALTH, paths.READY}
)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every text in code, with its line; documentation left out."""
    tree = ast.parse(source)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in documentation:
            yield node.lineno, node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def named(source: str, wanted: frozenset[str]) -> list[int]:
    """The lines whose texts have one of these paths."""
    return [line for line, text in sorted(texts(source)) if wanted & set(re.findall(r"/[\w/]+", text))]


def modules(*folders: Path) -> list[Path]:
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in found if not any(path.is_relative_to(folder) for folder in OUTSIDE)]


def test_a_path_is_found_wherever_a_text_has_it() -> None:
    code = '"""On /flush_cache."""\ndef f():\n    "/flush_cache"\n    return "/flush_cache"\n'
    assert named(code, CONTROL) == [4]
    assert named('x = f"{url}/flush_cache?a=1"\ny = b"/flush_cache"\nz = "/flush_cache/x /flush_caches"', CONTROL) == [
        1,
        2,
    ]


@pytest.mark.parametrize("path", modules(HOUSE, ROOT / "middleware_hub"), ids=lambda path: str(path.relative_to(ROOT)))
def test_control_paths_stand_among_the_paths_of_engines_alone(path: Path) -> None:
    lines = named(path.read_text(encoding="utf-8"), CONTROL)
    assert (lines != []) is (path == HOUSE / "engines" / "paths.py"), lines


@pytest.mark.parametrize(
    "path",
    modules(*(HOUSE / name for name in ("control", "fleet", "forwarding"))),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_else_is_asked_of_engines_has_its_paths_from_one_module(path: Path) -> None:
    assert named(path.read_text(encoding="utf-8"), ENGINES) == []


def test_every_row_stands_once() -> None:
    assert len(CONTROL) == len(TABLE)


@pytest.mark.parametrize("engine", [SGLANG, WITH_ADAPTERS], ids=["usual", "jax"])
@pytest.mark.parametrize("action", [Pause("retract"), Continue(), Abort("a"), Flush(), NameVersion("2")], ids=repr)
def test_an_engine_is_told_what_a_client_may_tell_it(engine: Engine, action: Action) -> None:
    order = engine.order(action)
    (row,) = [row for row in TABLE if row.path.encode() == order.target]
    assert order.method in row.methods
    assert row.check(orjson.loads(order.body)) is None
