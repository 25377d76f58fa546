"""Agents of others as they are published: fetched from npm once, pinned, and run without a terminal."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.sglang.environment import built, cache_root
from tests.support.waiting import PATIENCE


def npm_program(name: str, package: str, version: str, place: str) -> Path:
    """The program for this machine; `place` is where it lies in the part of the package that is this machine's."""

    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
        subprocess.run([*command, f"{package}@{version}"], cwd=directory, check=True, stdout=subprocess.DEVNULL)

    directory = built(cache_root() / f"{name}-{version}", build)
    (found,) = directory.glob(f"node_modules/{package}-*/{place}")
    return found


@dataclass(frozen=True)
class Run:
    """How a run ended."""

    code: int | None
    said: str
    complained: str


async def run_agent(command: Sequence[str], directory: Path, home: Path, environment: Mapping[str, str]) -> Run:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complained = await asyncio.wait_for(process.communicate(), 10 * PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Run(process.returncode, said.decode(), complained.decode())


def work_file(parent: Path, text: str) -> Path:
    file = parent / "work" / "a.txt"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    return file


def home_beside(directory: Path) -> Path:
    home = directory.with_name(f"{directory.name}.home")
    home.mkdir(exist_ok=True)
    return home
