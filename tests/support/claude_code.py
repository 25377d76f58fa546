"""Claude Code, unmodified: fetched from npm once, pinned, and run without a terminal against a session.

run = await claude_code(session_url, "Replace hello by goodbye in a.txt", directory)
run.said
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.sglang.environment import built, cache_root
from tests.support.waiting import PATIENCE

PACKAGE = "@anthropic-ai/claude-code"
VERSION = "2.1.330"
#: Of a user who allows everything, and of a machine that reaches nobody but the router.
ENVIRONMENT = {
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "ANTHROPIC_API_KEY": "none",
}


@functools.cache
def program() -> Path:
    """The program for this machine."""

    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", directory]
        subprocess.run([*command, f"{PACKAGE}@{VERSION}"], cwd=directory, check=True, stdout=subprocess.DEVNULL)

    directory = built(cache_root() / f"claude-code-{VERSION}", build)
    (found,) = directory.glob(f"node_modules/{PACKAGE}-*/claude")
    return found


@dataclass(frozen=True)
class Run:
    """How a run ended."""

    code: int | None
    said: str
    complained: str


async def claude_code(base_url: str, prompt: str, directory: Path, **environment: str) -> Run:
    """One task in a directory, with a home of its own beside it."""
    home = directory.with_name(f"{directory.name}.home")
    home.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(program(), "-p", prompt, "--dangerously-skip-permissions"),
        cwd=directory,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            **ENVIRONMENT,
            "ANTHROPIC_BASE_URL": base_url,
            **environment,
        },
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
