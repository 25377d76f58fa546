"""Fixtures shared by all tests. SGLang workers start only when a test asks for them, once per test session."""

from collections.abc import Generator, Iterator

import pytest

from tests.sglang_worker import RealWorker, real_workers, tail


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure beside real workers shows what they logged last."""
    report = yield
    if report.failed and item.get_closest_marker("sglang"):
        report.sections += [(f"SGLang on port {worker.port}", tail(worker.log_path)) for worker in RealWorker.running]
    return report
