"""A model learns through the router: `make train` as it is typed, with real SGLang and a trained model."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.tiers import heavy
from tests.support.waiting import until
from tests.training.__main__ import ROOM, ROOT, Failed, built
from tests.vllm_worker import PYTHON

pytestmark = pytest.mark.sglang
#: Seconds; these take up to 8 minutes alone, and several times as long beside other tests.
LONG = pytest.mark.timeout(3600)


async def run(out: Path, *flags: str) -> tuple[int | None, str]:
    """Run the command; return its exit status and all that it printed."""
    process = await _start(out, *flags)
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def _start(out: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.training", "--out", str(out), *flags),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def _read_until(process: asyncio.subprocess.Process, start: str) -> str:
    """Read the command's lines up to one that starts like this; return them."""
    assert process.stdout is not None
    read: list[str] = []
    while not (read and read[-1].startswith(start)):
        read.append((await process.stdout.readline()).decode())
        assert read[-1], "".join(read)
    return "".join(read)


async def test_two_steps_are_exact(tmp_path: Path) -> None:
    status, said = await run(tmp_path, "--steps", "2", "--prompts", "2", "--group", "4", "--examined", "2")
    print(said)
    assert status == 0, said
    assert "samples          16 whole" in said


@LONG
@pytest.mark.skipif(not heavy() or PYTHON is None, reason="takes minutes, and vLLM")
async def test_two_steps_on_vllm_are_exact(tmp_path: Path) -> None:
    flags = ("--engine", "vllm", "--steps", "2", "--prompts", "2", "--group", "4", "--examined", "2")
    status, said = await run(tmp_path, *flags)
    print(said)
    assert status == 0, said
    assert "samples          16 whole" in said


@LONG
@pytest.mark.skipif(not heavy(), reason="takes minutes")
async def test_a_model_is_trained_on_exact_tokens(tmp_path: Path) -> None:
    status, said = await run(tmp_path, "--expect-learning")
    print(said)
    assert status == 0, said
    lines = said.splitlines()
    assert lines[0].startswith("dashboard  http://"), "where to look comes first"
    assert len([line for line in lines if line.startswith("step ")]) == 16
    assert (tmp_path / "training.svg").read_text().startswith("<svg")
    page = (tmp_path / "samples.html").read_text()
    assert 'id="sample-63"' in page, "every sample of the last step"


@LONG
@pytest.mark.skipif(not heavy(), reason="takes minutes")
@pytest.mark.parametrize("update", ["retract", "in_place"])
async def test_other_updates_lose_nothing(tmp_path: Path, update: str) -> None:
    status, said = await run(tmp_path, "--update", update, "--steps", "4")
    print(said)
    assert status == 0, said


@LONG
@pytest.mark.skipif(not heavy(), reason="takes minutes")
async def test_an_agent_of_two_turns_is_trained_on_exact_tokens(tmp_path: Path) -> None:
    status, said = await run(tmp_path, "--task", "lookup", "--steps", "8", "--expect-learning")
    print(said)
    assert status == 0, said


@pytest.mark.skipif(not heavy(), reason="takes minutes")
async def test_ctrl_c_ends_all_that_was_started(tmp_path: Path) -> None:
    process = await _start(tmp_path)
    ports = re.findall(r"http://127\.0\.0\.1:(\d+)", await _read_until(process, "held out"))
    assert len(ports) == 3, "of the router and of two workers"
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130

    async def is_free(port: str) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(port))
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    for port in ports:
        assert await is_free(port)
    await until(lambda: not _processes_of(tmp_path), "no process of it is left")


def _processes_of(out: Path) -> list[str]:
    """Return the commands of running processes that name a directory."""
    commands = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline") if os.access(each, os.R_OK)]
    return [each.decode(errors="replace") for each in commands if str(out).encode() in each]


@pytest.mark.skipif(not heavy(), reason="takes minutes")
async def test_a_worker_that_dies_is_one_line(tmp_path: Path) -> None:
    process = await _start(tmp_path)
    await _read_until(process, "held out")
    (nursery,) = (child for child in _children(process.pid) if "nursery.py" in _command(child))
    os.killpg(_children(nursery)[0], signal.SIGKILL)
    said, _ = await process.communicate()
    assert process.returncode == 1
    assert re.search(r"^make train: worker http://127.0.0.1:\d+ died; its log: /\S+\.log$", said.decode(), re.MULTILINE)
    assert b"Traceback" not in said


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


@pytest.mark.skipif(not heavy(), reason="fetches a model")
async def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        status, said = await run(tmp_path, "--port", str(server.sockets[0].getsockname()[1]))
    assert status == 1
    assert "Traceback" not in said
    assert "address already in use" in said.lower()


async def test_text_of_an_agent_is_refused(tmp_path: Path) -> None:
    status, said = await run(tmp_path, "--task", "lookup", "--tokens", "text")
    assert status == 2
    assert "--tokens text is for --task capitals" in said


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_ROUTER_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=ROOM - 1))
    with pytest.raises(Failed, match=f"^{tmp_path}.* has less than 4 GB free; free some, or set MILES_ROUTER_CACHE"):
        built()
