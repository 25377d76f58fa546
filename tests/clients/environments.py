"""The environments of the clients: `python -m tests.clients.environments [NAME ...]` builds those that are absent.

Each lives in the cache beside SGLang's, named by what is in it.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.clients.table import CLIENTS, Client
from tests.sglang.environment import built, cache_root, key, run

NEWEST = 14  # minor version of Python
RAY = "ray==2.60.0"
DRIVERS = Path(__file__).parent / "drivers"


def program(client: Client) -> tuple[Path, ...]:
    """What runs a client's driver."""
    driver = DRIVERS / client.driver
    if driver.suffix != ".mjs":
        python = python_for(client)
        if python is None:
            raise RuntimeError(f"{client.name} needs Python {'.'.join(map(str, client.python))} or later")
        return _venv(client.requirements, python) / "bin" / "python", driver
    # Node looks for packages beside the file.
    directory = _packages(client.requirements, driver)
    return Path("node"), directory / driver.name


def python_for(client: Client) -> Path | None:
    """An interpreter that is new enough for a client: our own, or one of a later version that lies beside it."""
    if sys.version_info >= client.python:
        return Path(sys.executable)
    for minor in range(client.python[1], NEWEST + 1):
        name = f"python3.{minor}"
        beside = Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/{name}")  # as pyenv has them
        on_path = shutil.which(name)
        candidates = [Path(on_path)] if on_path else []
        for found in (*candidates, *sorted(beside)):
            if subprocess.run([found, "--version"], capture_output=True).returncode == 0:  # pyenv's own may refuse
                return Path(found)
    return None


def _venv(requirements: Sequence[str], python: Path) -> Path:
    def build(directory: Path) -> None:
        run(f"an environment for {requirements[0]}", python, "-m", "venv", directory)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off")
        run(f"installing {requirements[0]}", directory / "bin" / "python", *install, *requirements)

    return built(cache_root() / f"client-{key(*requirements, platform.python_version())}", build)


def ray_python() -> Path:
    """A Python that has Ray, and beside it all that our own has."""

    def build(directory: Path) -> None:
        run("an environment for ray", sys.executable, "-m", "venv", directory)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off")
        run("installing ray", directory / "bin" / "python", *install, RAY)
        (beside,) = (directory / "lib").glob("python*/site-packages")
        (beside / "ours.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")

    return built(cache_root() / f"ray-{key(RAY, sys.prefix, platform.python_version())}", build) / "bin" / "python"


def _packages(packages: Sequence[str], driver: Path) -> Path:
    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / driver.name).write_text(driver.read_text(encoding="utf-8"), encoding="utf-8")
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
        subprocess.run([*command, *packages], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        for spare in directory.glob("node_modules/*-baseline*"):  # the same program for older processors
            shutil.rmtree(spare)

    return built(cache_root() / f"client-{key(*packages, driver)}", build)


if __name__ == "__main__":
    for each in CLIENTS:
        if each.driver and (len(sys.argv) == 1 or each.name in sys.argv[1:]):
            print(each.name, *(program(each) if python_for(each) else ["is left out: its Python is absent"]))
    if len(sys.argv) == 1 or "ray" in sys.argv[1:]:
        print("ray", ray_python())
