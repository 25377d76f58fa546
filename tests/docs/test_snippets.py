"""Commands, code and configurations in pages do what the pages say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_router import cli
from miles_router.app import create_app
from miles_router.reach import command as reach
from miles_router.settings.config import load
from miles_router.testing.demo import __main__ as demo
from miles_router.testing.worker import cli as worker_cli
from tests.benchmarks.placement import __main__ as placement
from tests.benchmarks.placement import even
from tests.docs.pages import PAGES, ROOT, Block, all_blocks, blocks, name_of
from tests.docs.shell import STARTS_ROUTER, Console, Step, steps

PLAYED = [page for page in PAGES if blocks(page, "console", "python")]


@pytest.mark.parametrize("page", PLAYED, ids=name_of)
def test_the_commands_and_programs_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    shown = blocks(page, "console", "python", "yaml")
    commands = [step.command for block in shown if block.kind == "console" for step in steps(block)]
    with Console(tmp_path) as console:
        if not any(STARTS_ROUTER.search(command) and command.endswith("&") for command in commands):
            console.start_router_and_workers()
        for block in shown:
            console.play(block)


def commands(block: Block) -> Iterator[list[str]]:
    """The simple commands of a bash block, split into words."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|\|\|?|;)\s", line):
            words = shlex.split(part, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


def runs_make(arguments: list[str]) -> None:
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)


def installs(arguments: list[str]) -> None:
    """`install -e .` or `install miles-router`, alone or with extras that exist."""
    optional = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = \[", optional.partition("\n\n")[0], re.MULTILINE)
    assert arguments[0] == "install"
    found = re.fullmatch(r"(?:-e \.|miles-router)(?:\[([\w,]+)\])?", " ".join(arguments[1:]))
    assert found
    assert {*filter(None, (found[1] or "").split(","))} <= {*extras}


def runs_python(arguments: list[str]) -> None:
    assert arguments[0] == "-m"
    if arguments[1] == "miles_router.testing.demo":
        demo.build_parser().parse_args(arguments[2:])
    elif arguments[1] == "tests.benchmarks.placement":
        placement.arguments(arguments[2:])
    elif arguments[1] == "tests.benchmarks.placement.even":
        even.arguments(arguments[2:])
    else:
        assert arguments[1] in ("sglang.launch_server", "tests.docs.generated")


def fetches(arguments: list[str]) -> None:
    assert any(re.match(r"http://[\w.]+:\d+/", argument) for argument in arguments)


def runs_router(arguments: list[str]) -> None:
    if arguments[0] == "reach":
        reach.parser().parse_args(arguments[1:])
    elif arguments[0] == "ray":
        cli.ray_parser().parse_args(arguments[1:])
    else:
        cli.parser().parse_args(arguments)


def runs_container(arguments: list[str]) -> None:
    """`docker build` of the Dockerfile here, or `docker run` with the router's arguments behind the image."""
    assert arguments[0] in ("build", "run")
    if arguments[0] == "run":
        cli.parser().parse_args(arguments[arguments.index("miles-router") + 1 :])


def has_file(arguments: list[str]) -> None:
    assert (ROOT / arguments[-1]).is_file()


CHECKS: dict[str, Callable[[list[str]], object]] = {
    "curl": fetches,
    "docker": runs_container,
    "make": runs_make,
    "nginx": has_file,
    "sbatch": has_file,
    "miles-router": runs_router,
    "miles-router-worker": lambda arguments: worker_cli.build_parser().parse_args(arguments),
    "pip": installs,
    "python": runs_python,
}


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_commands_that_are_not_run_are_still_right(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for name, *arguments in commands(block):
        CHECKS[name](arguments)


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


SETTINGS = sorted(file for file in (ROOT / "configs").glob("*.yaml") if file.name != "kustomization.yaml")


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_configurations_in_pages_load(block: Block, tmp_path: Path, checkpoint: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(block.text, encoding="utf-8")
    create_app(load({}, {"MILES_ROUTER_HF_CHECKPOINT": str(checkpoint)}, (), str(file)).config)


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: file.name)
def test_every_file_of_settings_in_configs_starts_a_router(file: Path, checkpoint: Path) -> None:
    loaded = load({}, {"MILES_ROUTER_HF_CHECKPOINT": str(checkpoint)}, (), str(file))
    create_app(loaded.config)
    assert str(file) in loaded.origins.values()


def test_the_stand_in_for_curl_is_enough(tmp_path: Path) -> None:
    curl, url = Path(__file__).with_name("curl.py"), "http://127.0.0.1:31000"
    with Console(tmp_path) as console:
        console.start_router_and_workers()
        asked = f"{curl} -s -i -X DELETE {url}/workers/none -H 'X-Request-Id: 7'"
        console.run(Step(asked, 'HTTP/1.1 404 ...x-request-id: 7...{"error":...}'), "DELETE")
        asked = f"{curl} -sN {url}/generate -H 'content-type: application/json' -d '{{\"text\": \"Hi\"}}'"
        console.run(Step(asked, '{"text":...}'), "POST")
