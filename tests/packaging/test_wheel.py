"""The wheel, installed into an empty environment: what users get, and not this checkout."""

from __future__ import annotations

import asyncio
import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from packaging.requirements import Requirement

from miles_router.version import __version__
from tests.support.cache_trial import checkpoint
from tests.support.fleet import JSON
from tests.support.http import ask
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LISTENING = re.compile(r"(?:listening +|worker at )(http://\S+)")
MIDDLEWARES = (
    "middleware_hub.radix_tree_middleware.RadixTreeMiddleware",
    "middleware_hub.openai_session_middleware.OpenAISessionMiddleware",
    "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware",
)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command outside of this checkout's import path, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist() -> Iterator[Path]:
    """A directory with the wheel and the sdist."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder)
        yield Path(folder)


def interpreter(version: str) -> str | None:
    """The path of this version of Python, or None."""
    found = [shutil.which(f"python{version}"), *glob.glob(f"{Path.home()}/.pyenv/versions/{version}.*/bin/python")]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def installed(folder: Path, python: str, dist: Path, extras: str = "") -> Path:
    """Install the wheel into an empty environment, and return the directory of its commands."""
    run(python, "-m", "venv", folder / "venv")
    (wheel,) = dist.glob("*.whl")
    pip = (folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, f"{wheel}{extras}", cwd=folder)
    return folder / "venv" / "bin"


@asynccontextmanager
async def serving(*command: str | Path, log: Path) -> AsyncIterator[str]:
    """Run a server of the wheel; its URL."""

    def shown() -> str:
        return log.read_text(encoding="utf-8")

    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            "--port",
            "0",
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env={"PATH": os.environ["PATH"]},
        )
    try:
        await until(lambda: LISTENING.search(shown()) or process.returncode is not None, "a banner")
        (url,) = LISTENING.findall(shown())
        yield url
        process.terminate()
        assert await process.wait() == 0, shown()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_the_package_is_fit_for_an_index(dist: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name == f"miles_router-{__version__}-py3-none-any.whl"
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in files} == {
        *("miles_router", "middleware_hub", f"miles_router-{__version__}.dist-info")
    }
    assert {"middleware_hub/dashboard/assets/page.html", "miles_router/py.typed", "middleware_hub/py.typed"} <= {*files}
    with tarfile.open(source) as packed:
        inside = {name.partition("/")[2].partition("/")[0] for name in packed.getnames()}
    assert {"miles_router", "middleware_hub", "LICENSE", "README.md", "pyproject.toml", "CHANGELOG.md"} <= inside
    assert "tests" not in inside
    assert f"\n## {__version__} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", PYTHONS)
async def test_a_plain_install_serves_and_has_only_what_the_server_needs(
    version: str, dist: Path, tmp_path: Path
) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"Python {version} is not installed")
    commands = installed(tmp_path, python, dist)
    assert run(commands / "miles-router", "--version") == f"miles-router {__version__}\n"
    listed = orjson.loads(run(commands / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    names = {re.sub(r"[-_.]+", "-", each["name"]).lower() for each in listed} - {"pip", "setuptools"}
    script = "from importlib.metadata import requires; print(*requires('miles-router'), sep='\\n')"
    lines = [Requirement(line) for line in run(commands / "python", "-c", script, cwd=tmp_path).splitlines()]
    direct = {each.name.lower() for each in lines if each.marker is None or each.marker.evaluate({"extra": ""})}
    theirs = {"anyio", "click", "h11", "idna", "sniffio", "typing-extensions", "exceptiongroup"}
    assert direct | {"miles-router"} <= names <= direct | {"miles-router"} | theirs
    async with serving(commands / "miles-router", log=tmp_path / "log") as url:
        assert (await ask(url, "GET", "/readiness")).status == 503
        page = await ask(url, "GET", "/dashboard")
        assert (page.status, b"<html" in page.body) == (200, True)
        assert (await ask(url, "GET", "/metrics")).status == 200


async def test_with_its_extras_the_wheel_has_the_three_middlewares_and_a_worker(dist: Path, tmp_path: Path) -> None:
    commands = installed(tmp_path, sys.executable, dist, "[testing,tito]")
    model = checkpoint()
    checked = run(commands / "miles-router", "check", MIDDLEWARES[2], cwd=tmp_path)
    assert "passed" in checked or "ok" in checked, checked
    async with serving(
        commands / "miles-router-worker", "--tokenizer", model, "--moe", "4x8x2", log=tmp_path / "worker"
    ) as worker:
        given = ("--worker-urls", worker, "--hf-checkpoint", model, "--middleware-paths", *MIDDLEWARES)
        async with serving(commands / "miles-router", *given, log=tmp_path / "router") as url:
            text = b'{"text": "Hi", "sampling_params": {"max_new_tokens": 4}}'
            assert (await ask(url, "POST", "/generate", JSON, text)).status == 200
            assert (await ask(url, "POST", "/retrieve_from_text", JSON, b'{"text": "Hi"}')).status == 200
            session = orjson.loads((await ask(url, "POST", "/sessions", JSON, b"{}")).body)
            chat = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
            path = f"/sessions/{session['session_id']}/v1/chat/completions"
            assert (await ask(url, "POST", path, JSON, chat)).status == 200
