"""When the client asks again, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_router.client import Retries, RouterClient
from miles_router.client.errors import NotConnected
from miles_router.client.router_client import _generate_body
from miles_router.client.transport import RetryLog

LISTED = "import sys, {}; print(*sorted(name for name in sys.modules if '.' not in name or 'miles_router.' in name))"
SHARED = {f"miles_router.{name}" for name in ("dialects", "engines", "tasks", "trajectory", "version")}
SERVER = {"starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "yaml", "transformers", "middleware_hub"}


def loaded_by(module: str) -> set[str]:
    found = subprocess.run([sys.executable, "-c", LISTED.format(module)], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_the_client_imports_nothing_of_the_server() -> None:
    loaded = loaded_by("miles_router.client")
    assert not loaded & SERVER
    ours = {name for name in loaded if name.startswith("miles_router.") and not name.startswith("miles_router.client")}
    assert {".".join(name.split(".")[:2]) for name in ours} == SHARED


def test_importing_the_package_costs_nothing() -> None:
    assert not loaded_by("miles_router") & {"aiohttp", "numpy", "asyncio"}


def test_waiting_grows_is_spread_and_is_bounded() -> None:
    retries = Retries(attempts=9, first_delay=1.0, longest_delay=5.0)
    for failures, full in enumerate((1.0, 2.0, 4.0, 5.0, 5.0)):
        delays = {retries.delay(failures) for _ in range(50)}
        assert all(full / 2 <= delay <= full for delay in delays)
        assert len(delays) > 1, "those that failed together do not come back together"


def test_the_delay_stays_bounded_after_very_many_failures() -> None:
    assert 2.5 <= Retries(attempts=10**6, first_delay=1.0, longest_delay=5.0).delay(5_000) <= 5.0


def test_the_routers_word_counts_up_to_the_bound() -> None:
    retries = Retries(first_delay=0.0, longest_delay=5.0)
    assert retries.delay(0) == 0.0
    assert retries.delay(0, 3.0) == 3.0
    assert retries.delay(0, 60.0) == 5.0


def test_many_requests_that_are_asked_again_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    times = (0.0, 1.0, 9.0, 10.0, 11.0)
    log, error = RetryLog(iter(times).__next__), NotConnected("nobody is there")
    for _ in times:
        log.note(error, 0.5)
    log.close()
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "nobody is there; retrying in 0.5 s",
        "nobody is there; retrying in 0.5 s; 2 other retries since the last such line",
        "retries since the last such line: 1",
    ]


@pytest.mark.parametrize("url", ["", "host:30000", "ftp://host", "http://", "http://host/?a=b", "http://host/#a"])
def test_what_is_no_address_of_a_router_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        RouterClient(url)


def test_a_slash_at_the_end_of_the_address_is_not_doubled() -> None:
    assert RouterClient("http://host:1/prefix/").session("a").base_url == "http://host:1/prefix/sessions/a/v1"


def test_a_generation_is_of_one_prompt_and_one() -> None:
    assert _generate_body("a", None, {"n": 1}, None, {"x": None, "y": 0}) == {
        "text": "a",
        "sampling_params": {"n": 1},
        "y": 0,
    }
    for text, ids in ((None, None), ("a", [1])):
        with pytest.raises(ValueError, match="not both"):
            _generate_body(text, ids, None, None, {})
    with pytest.raises(ValueError, match="n must be 1"):
        _generate_body("a", None, {"n": 2}, None, {})
