"""The demo as people run it: what it says, and with KEEP=1 traffic to look at until Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.http import ask
from tests.support.running_router import refuses
from tests.support.waiting import until

FEW = ["--prompts", "2", "--samples", "2", "--max-new-tokens", "8", "--token-latency-ms", "0"]
SERVED = re.compile(r'^miles_router_requests_total\{route="generate",status="200",worker=".+"\} (\S+)$', re.MULTILINE)
ADDRESS = re.compile(r"^  dashboard  (http://\S+)/dashboard$", re.MULTILINE)


async def served(router: str) -> int:
    """Generations that the router has answered."""
    text = (await ask(router, "GET", "/metrics")).body.decode()
    return sum(int(float(count)) for count in SERVED.findall(text))


@pytest.mark.parametrize("keeps", [False, True], ids=["once", "keep"])
async def test_it_says_where_to_look_and_keeps_up_what_is_there_when_it_is_asked_to(
    keeps: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "miles_router.testing.demo", *FEW, *(["--keep"] if keeps else [])]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)  # noqa: ASYNC220
    try:
        await until(lambda: ADDRESS.search(log.read_text()) or process.poll() is not None, "where to look")
        found = ADDRESS.search(log.read_text())
        assert found is not None, log.read_text()
        if keeps:
            assert (await ask(found[1], "GET", "/dashboard")).status == 200
            first = await served(found[1])
            while await served(found[1]) < first + 20:
                assert process.poll() is None, log.read_text()
            process.send_signal(signal.SIGINT)
        await until(lambda: process.poll() is not None, "its end")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log.read_text()
    assert ("make demo KEEP=1 stays up" in log.read_text()) is not keeps
    assert refuses(found[1])
