"""What all tests share: the tiers, how they are spread over processes, real workers, and the stage."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from tests.sglang_worker import RealWorker, real_workers, tail
from tests.support import tiers
from tests.support.browser import Browser
from tests.support.running_router import use_processes
from tests.support.scripted_chat import able
from tests.support.scripted_worker import ScriptedWorker
from tests.support.session_trial import SessionTrial, session_trial
from tests.support.stage import Stage, staged
from tests.support.tokenizers import loaded_once

ROOT = Path(__file__).resolve().parents[1]
MOST_PROCESSES = 8
#: What a process of xdist is told.
NAMES_FILES = "names_files"
#: Marks of the tests that begin first.
FIRST = ("sglang", "static")
#: Where each test takes so long that the others of its file need not wait for it.
APART = ("tests/docs/test_snippets.py", "tests/fuzz/", "tests/property/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, default="ci", help="how much the tests do (tests/support/tiers.py)")
    about = "processes of each router that a test looks at from outside; what looks inside of one is skipped"
    parser.addoption("--processes", type=int, default=1, help=about)


def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(config.getoption("tier"))
    use_processes(config.getoption("processes"))


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one process for each core, and two that wait: for SGLang, and for pauses and processes."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) + 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first. Where no files are named, what the tier leaves to others does not run."""
    if not _names_files(config):
        left = {item for item in items if tiers.is_left(item.nodeid, sglang=needs_sglang(item.nodeid))}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    for item in items:
        if item.config.getoption("processes") > 1 and (reason := _alone(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"of a router of one process alone: {reason}"))
        assert (item.get_closest_marker("sglang") is not None) == needs_sglang(item.nodeid), item.nodeid
    items.sort(key=lambda item: next((place for place, mark in enumerate(FIRST) if mark in item.keywords), len(FIRST)))


def _names_files(config: pytest.Config) -> bool:
    """Whether files or folders stand on the command line; a process of xdist is told."""
    given = config.args_source is pytest.Config.ArgsSource.ARGS
    return bool(getattr(config, "workerinput", {}).get(NAMES_FILES, given))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of xdist, which gets the same folder in either case."""
    node.workerinput[NAMES_FILES] = _names_files(node.config)


def _alone(item: pytest.Item) -> str | None:
    if "caplog" in getattr(item, "fixturenames", ()):
        return "it reads the log of the test's process"
    mark = item.get_closest_marker("alone")
    return None if mark is None else str(mark.args[0])


def needs_sglang(nodeid: str) -> bool:
    """Whether a test is marked `sglang`, by its name: as a parameter, or with its whole file."""
    file, _, name = nodeid.partition("::")
    return re.search(r"\[(.*-)?sglang(-.*)?\]$", name) is not None or _is_marked(file)


@functools.cache
def _is_marked(file: str) -> bool:
    return "\npytestmark = pytest.mark.sglang\n" in (ROOT / file).read_text(encoding="utf-8")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a process takes a whole file, so that what a module makes once is made once; and one takes all tests
    with real workers, of which each kind needs 2 GB, so that these start once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if needs_sglang(nodeid):
                return "sglang"
            return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log) if config.getoption("dist") != "each" else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """xdist gives its processes 10 s to end, which on a busy machine is too short to write what `coverage` measured."""
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage is not None else None
    if measured is not None:
        measured.save()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the router runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    """A Chromium without a window."""
    async with Browser.started() as started:
        yield started


@pytest.fixture(scope="session")
def sglang_workers() -> Iterator[list[RealWorker]]:
    """Two real SGLang workers with a dense model."""
    with real_workers(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def sglang_moe_workers() -> Iterator[list[RealWorker]]:
    """Two real SGLang workers with a mixture-of-experts model, returning routed experts on request."""
    with real_workers(2, "--enable-return-routed-experts", moe=True) as workers:
        yield workers


@pytest.fixture(scope="session", autouse=True)
def tokenizers_loaded_once() -> Iterator[None]:
    """Loading one takes half a second, and nearly every router of these tests has one."""
    with loaded_once():
        yield


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Workers and a router for one test."""
    async with staged() as made:
        yield made


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    """A scripted worker that answers what sessions ask of an engine by themselves."""
    return able(await stage.worker())


@pytest.fixture
async def trial(stage: Stage, worker: ScriptedWorker) -> SessionTrial:
    """Sessions in front of that worker."""
    return await session_trial(stage, worker)


@pytest.fixture
def monkeypatch(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """pytest's own; of a router of several processes it changes nothing."""
    made = pytest.MonkeyPatch()
    if request.config.getoption("processes") > 1:
        made.setattr = functools.partial(_set_from_outside, made.setattr)  # type: ignore[method-assign]
    yield made
    made.undo()


def _set_from_outside(set_it: Callable[..., None], target: Any, *given: Any, **more: Any) -> None:
    name = target if isinstance(target, str) else getattr(target, "__module__", getattr(target, "__name__", ""))
    if name.startswith(("miles_router.", "middleware_hub.")):
        pytest.skip(f"it changes a router from inside: {name}")
    set_it(target, *given, **more)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure beside real workers shows what they logged last."""
    report = yield
    if report.failed and item.get_closest_marker("sglang"):
        report.sections += [(f"SGLang on port {worker.port}", tail(worker.log_path)) for worker in RealWorker.running]
    return report
