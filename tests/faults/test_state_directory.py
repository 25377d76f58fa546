"""What `--state-dir` rests on, with processes that are killed, disks that are full, and syncs that are watched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from miles_router.state.store import StateStore
from tests.support.apart import MOUNTS, STRACE, mounted, traced
from tests.support.committing import value
from tests.support.tiers import nightly
from tests.support.waiting import soon, until

#: After how many commits a process is killed.
KILLS = [20 + 37 * kill for kill in (range(8) if nightly() else (1, 4, 7))]
MODULE = (sys.executable, "-m", "tests.support.committing")


@contextlib.asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):  # with what it runs
            os.killpg(running.pid, signal.SIGKILL)
        assert running.stdout is not None
        await running.stdout.read()
        await running.wait()


async def line(running: asyncio.subprocess.Process) -> str:
    assert running.stdout is not None
    return (await soon(running.stdout.readline())).decode().strip()


@pytest.mark.parametrize("sync", ["process", "machine"])
async def test_no_kill_loses_what_was_acknowledged(tmp_path: Path, sync: str) -> None:
    directory = tmp_path / "state"
    acknowledged: set[tuple[str, int]] = set()
    for told in KILLS:
        async with process(*MODULE, str(directory), sync, "12") as running:
            said = [await line(running) for _ in range(told)]
            running.send_signal(signal.SIGKILL)
            assert running.stdout is not None
            said += [each for each in (await running.stdout.read()).decode().split("\n")[:-1] if each]
        acknowledged |= {(owner, int(number)) for owner, number in (each.split() for each in said)}
        store = StateStore(directory)
        for owner in {owner for owner, _ in acknowledged}:
            held = await store.load(owner)
            for number in (number for each, number in acknowledged if each == owner):
                assert held[number] == value(owner, number, 3000)
        await store.close()
    assert len(acknowledged) >= max(KILLS)


@mounted
async def test_a_full_disk_refuses_loses_nothing_and_goes_on_with_room(tmp_path: Path) -> None:
    fill = "mount -t tmpfs -o size=2m none /mnt && head -c 1000000 /dev/zero > /mnt/ballast"
    script = f'{fill} && exec "$0" -m tests.support.committing /mnt/state process 3 20000'
    async with process(*MOUNTS, "sh", "-c", script, sys.executable) as running:
        disk = Path(f"/proc/{running.pid}/root/mnt")
        acknowledged = []
        while (said := await line(running)) != "! state_full":
            acknowledged.append(said)
        assert len(acknowledged) > 3
        (disk / "ballast").unlink()
        while (said := await line(running)).startswith("!"):
            pass
        acknowledged.append(said)
        while (said := await line(running)) != "! state_full":
            acknowledged.append(said)
        running.send_signal(signal.SIGSTOP)  # nothing of it changes while it is copied
        shutil.copytree(disk / "state", tmp_path / "state")
    store = StateStore(tmp_path / "state")
    for owner in {said.split()[0] for said in acknowledged}:
        held = await store.load(owner)
        for number in (int(said.split()[1]) for said in acknowledged if said.split()[0] == owner):
            assert held[number] == value(owner, number, 20000)
    await store.close()


@traced
async def test_the_disk_is_told_to_keep_a_commit_before_anybody_hears_of_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    strace = (*STRACE, "-o", str(trace), "-e", "trace=fdatasync,fsync,write,pwrite64")
    async with process(*strace, *MODULE, str(tmp_path / "state"), "machine", "1") as running:
        said = [await line(running) for _ in range(20)]
        running.send_signal(signal.SIGKILL)
        await until(lambda: "killed by SIGKILL" in trace.read_text(), "all is written down")
    calls = trace.read_text().splitlines()
    unsynced: set[str] = set()
    told = 0
    for call in calls:
        if wrote := re.search(r"pwrite64\(\d+<([^>]*)>", call):
            unsynced.add(wrote[1])
        elif synced := re.search(r"f(?:data)?sync\(\d+<([^>]*)>\) += 0", call):
            unsynced.discard(synced[1])
        elif re.search(r'write\(1<.*"owner-0', call):
            assert not unsynced, f"told of commit {told} before these were on the disk"
            told += 1
    assert told >= len(said)
    assert sum("sqlite-wal>) = 0" in " ".join(call.split()) for call in calls) >= told
