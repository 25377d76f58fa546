"""The source as tools see it: beside the other tests, so that their findings stand among the other failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.static

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "types": ("mypy",),
    "imports": ("lint-imports",),
    "format": ("ruff", "format", "--check", "."),
    "lint": ("ruff", "check", "."),
}


@pytest.mark.parametrize("check", TOOLS)
def test_the_tools_find_nothing(check: str) -> None:
    name, *arguments = TOOLS[check]
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
