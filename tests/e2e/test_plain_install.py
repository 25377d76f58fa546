"""What `pip install miles-router` brings is what the server needs, and no more; what needs an extra says which."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.http import ask
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, until

LISTENING = re.compile(r"listening +(http://\S+)")
SETTINGS = """\
port: 0
worker_urls: [%s]
middlewares:
  - path: middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware
    options: {moe_shape: 4x8x2}
"""
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
WITHOUT = """
import sys

ABSENT = frozenset(%r)


class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent)
"""
EACH = """
import sys

for code in %r:
    end = None
    try:
        exec(code)
    except SystemExit as exit:
        end = exit.code
    except ImportError as error:
        end = type(error).__name__
        print(error, file=sys.stderr)
    print(end)
"""
SERVE = """
import sys
from miles_router.cli import main

try:
    main(sys.argv[1:])
finally:
    print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct() -> set[str]:
    """The distributions that a plain install asks for."""
    listed = PYPROJECT.read_text(encoding="utf-8").partition("\ndependencies = [")[2].partition("\n]")[0]
    return {normal(Requirement(line).name) for line in re.findall('"(.+)"', listed)}


def with_theirs(names: set[str]) -> Iterator[str]:
    """Distributions, and what they require without extras."""
    for name in names:
        yield name
        every = [Requirement(line) for line in distribution(name).requires or ()]
        needed = [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
        yield from with_theirs({normal(each.name) for each in needed})


def modules_of(names: set[str]) -> set[str]:
    """The top-level modules of these distributions."""
    files = {file for name in names for file in distribution(name).files or ()}
    return {file.parts[0].partition(".")[0] for file in files if file.suffix in (".py", ".so")}


def plain(code: str) -> list[str]:
    """The command for `code` in an interpreter that has what a plain install has."""
    installed = {normal(each.metadata["Name"]) for each in distributions()}
    had = {"miles-router", *with_theirs(direct())}
    absent = modules_of(installed - had) - modules_of(had)
    return [sys.executable, "-c", WITHOUT % (sorted(absent),) + code]


def without_hub(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter without the middlewares that ship with the router."""
    command = [sys.executable, "-c", WITHOUT % (["middleware_hub"],) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(plain(code), capture_output=True, text=True, timeout=PATIENCE, check=False)


async def test_a_plain_install_has_what_the_server_needs_and_no_more(stage: Stage, tmp_path: Path) -> None:
    worker = await stage.worker()
    settings = tmp_path / "router.yaml"
    settings.write_text(SETTINGS % worker.url, encoding="utf-8")
    log = tmp_path / "log"

    def shown() -> str:
        return log.read_text(encoding="utf-8")

    command = [*plain(SERVE), "--config", str(settings)]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:  # noqa: ASYNC220
        try:
            await until(lambda: LISTENING.search(shown()) or process.poll() is not None, "a banner")
            assert process.poll() is None, shown()
            (url,) = LISTENING.findall(shown())
            assert (await ask(url, "POST", "/generate", body=b"{}")).body == b"{}"
            assert (await ask(url, "GET", "/metrics")).status == 200
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None, "its end")
        finally:
            process.kill()
    assert process.returncode == 0, shown()
    loaded = set(shown().rpartition("loaded: ")[2].split())
    assert {name for name in direct() if not modules_of({name}) & loaded} == set(), "required and not used"


def test_a_plain_install_has_what_the_other_ways_in_need() -> None:
    modules = "miles_router.compat, miles_router.check, middleware_hub.view.command"
    done = run(f"import {modules}, middleware_hub.radix_tree_middleware")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_needs_an_extra_says_which_in_one_line() -> None:
    commands = (
        "from miles_router.client import RouterClient",
        "from miles_router.testing import SimulatedWorker",
        "from miles_router.testing.worker.cli import main; sys.exit(main(['--port', '0']))",
        "from miles_router.cli import main; main(['--port', '0', '--otel', 'true'])",
    )
    done = run(EACH % (commands,))
    assert done.stdout.splitlines() == ["ImportError", "ImportError", "2", "2"]
    said = [line for line in done.stderr.splitlines() if "pip install" in line]
    client, testing, command, traces = said
    assert client.endswith("needs aiohttp: pip install 'miles-router[client]'")
    assert testing.endswith("needs aiohttp: pip install 'miles-router[testing]'")
    assert command.endswith("needs aiohttp: pip install 'miles-router[testing]'")
    assert "traces need the module 'opentelemetry'" in traces
    assert traces.endswith("pip install 'miles-router[otel]'")


def test_what_ships_beside_the_router_is_named_where_it_is_missing() -> None:
    arguments = (["view", "samples.json"], ["audit", "--router", "http://127.0.0.1:1"], ["--port", "0"])
    commands = [f"from miles_router.cli import main; main({each!r})" for each in arguments]
    alone = "from miles_router import create_app, RouterConfig; create_app(RouterConfig(dashboard=False))"
    done = without_hub(EACH % ([*commands, alone],))
    assert done.stdout.splitlines() == ["2", "2", "2", "None"], "the router alone needs nothing of it"
    view, audit, router = done.stderr.splitlines()
    assert view.endswith("view: No module named 'middleware_hub'")
    assert audit.endswith("audit: No module named 'middleware_hub'")
    assert router.endswith("DashboardMiddleware': there is no module 'middleware_hub'")
