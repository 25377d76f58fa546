"""What all tests share: the tiers, how they are spread over processes, real workers, and the stage."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
import uvloop

from tests.sglang_worker import RealWorker, real_workers, tail
from tests.support import tiers
from tests.support.stage import Stage, staged
from tests.support.tokenizers import loaded_once

MOST_PROCESSES = 8
#: Marks of the tests that begin first.
FIRST = ("sglang", "static")
#: Where each test takes so long that it is a group of its own.
APART = ("tests/docs/test_snippets.py", "tests/property/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, default="ci", help="how much the tests do (tests/support/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(config.getoption("tier"))


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one process for each core, and one for the tests that wait for SGLang."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first. Tests with real workers stay together, so that these start once."""
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.xdist_group("sglang"))
    items.sort(key=lambda item: next((place for place, mark in enumerate(FIRST) if mark in item.keywords), len(FIRST)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup` with files as groups, so that what a module makes once is made once."""
    from xdist.scheduler import LoadGroupScheduling

    class Groups(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group: str = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid and not nodeid.startswith(APART) else group

    config.option.loadscopereorder = False
    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


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


@pytest.fixture(scope="session")
def tokenizers_loaded_once() -> Iterator[None]:
    """Loading one takes half a second, and nearly every router of these tests has one."""
    with loaded_once():
        yield


@pytest.fixture
async def stage(tokenizers_loaded_once: None) -> AsyncIterator[Stage]:
    """Workers and a router for one test."""
    async with staged() as made:
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure beside real workers shows what they logged last."""
    report = yield
    if report.failed and item.get_closest_marker("sglang"):
        report.sections += [(f"SGLang on port {worker.port}", tail(worker.log_path)) for worker in RealWorker.running]
    return report
