"""The environments of the clients: `python -m tests.clients.environments [NAME ...]` builds those that are absent.

Each lives in the cache beside SGLang's, named by what is in it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients.table import CLIENTS, Client
from tests.sglang.environment import built, cache_root, key, run

DRIVERS = Path(__file__).parent / "drivers"


def program(client: Client) -> tuple[Path, ...]:
    """What runs a client's driver."""
    driver = DRIVERS / client.driver
    if driver.suffix != ".mjs":
        return _venv(client.requirements) / "bin" / "python", driver
    # Node looks for packages beside the file.
    directory = _packages(client.requirements, driver)
    return Path("node"), directory / driver.name


def _venv(requirements: Sequence[str]) -> Path:
    def build(directory: Path) -> None:
        run(f"an environment for {requirements[0]}", sys.executable, "-m", "venv", directory)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off")
        run(f"installing {requirements[0]}", directory / "bin" / "python", *install, *requirements)

    return built(cache_root() / f"client-{key(*requirements, platform.python_version())}", build)


def _packages(packages: Sequence[str], driver: Path) -> Path:
    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / driver.name).write_text(driver.read_text(encoding="utf-8"), encoding="utf-8")
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
        subprocess.run([*command, *packages], cwd=directory, check=True, stdout=subprocess.DEVNULL)

    return built(cache_root() / f"client-{key(*packages, driver)}", build)


if __name__ == "__main__":
    for each in CLIENTS:
        if each.driver and (len(sys.argv) == 1 or each.name in sys.argv[1:]):
            print(each.name, *program(each))
