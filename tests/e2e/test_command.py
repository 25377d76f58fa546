"""The command `miles-router` as people run it: a process, its output, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_router import cli
from tests.support.running_router import COMMAND
from tests.support.waiting import PATIENCE

WORKING = "tests.support.plugins.working"


def run(*arguments: str, directory: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MILES_ROUTER_")}
    return subprocess.run(
        [str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**inherited, **environment},
        cwd=directory,
        check=False,
    )


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """What the command writes to standard error before it ends with status 2, without a process for each."""
    for name in [name for name in os.environ if name.startswith("MILES_ROUTER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("--access-log",), "access_log true"),
        (("--access-log=off",), "access_log false"),
        (("--access-log", "--no-access-log"), "access_log false"),
        (("--set", "access_log=true", "--no-access-log"), "access_log true"),
        (("--worker-urls", "http://a:1,http://b:2"), "worker_urls http://a:1, http://b:2"),
        (("--worker-urls", "http://a:1,", "http://b:2"), "worker_urls http://a:1, http://b:2"),
    ],
    ids=str,
)
def test_a_switch_needs_no_value_and_urls_spaces_or_commas(given: tuple[str, ...], shown: str) -> None:
    lines = [" ".join(line.split()) for line in run("config", *given).stdout.splitlines()]
    assert [line for line in lines if line.startswith(f"{shown} ")]


def test_nothing_heavy_is_imported_for_help_or_for_a_start_without_tokenizer() -> None:
    code = (
        "import sys; from miles_router.cli import parser; parser().format_help(); "
        "assert not {'uvicorn', 'starlette', 'aiohttp', 'numpy', 'yaml'} & set(sys.modules), 'help'; "
        "from miles_router import create_app; from miles_router.serving import server; create_app(); "
        "assert not {'transformers', 'torch', 'tokenizers'} & set(sys.modules), 'start'"
    )
    python = COMMAND.with_name("python")
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prot", "1"), "unrecognized arguments: --prot; did you mean '--port'?"),
        (("--port", "abc"), "--port: port: expected int, got 'abc'"),
        (("--no-otel", "true"), "--no-otel takes no value, got 'true'"),
        (("--worker-urls", "http://a:1,ftp://x"), "worker_urls: url 'ftp://x' must start with http:// or https://"),
        (("--middleware-paths", "no.such.Class"), "there is no module 'no'"),
        (("--config", "/nowhere.yaml"), "--config /nowhere.yaml: cannot be read"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_line(
    refused: Callable[..., list[str]], arguments: tuple[str, ...], message: str
) -> None:
    (line,) = refused("--port", "0", *arguments)
    assert line.startswith("miles-router: ")
    assert message in line


def _nested_aliases(head: str) -> str:
    """A list whose last item stands for 9**11 texts."""
    lists = [f"  - &a{level} [{','.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 11)]
    return "\n".join([head, "  - &a0 [x,x,x,x,x,x,x,x,x]", *lists])


DIGITS, HEX = "9" * 5000, "0x" + "F" * 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"port: {DIGITS}", "this value cannot be read, or is too long in"),
        (f"port: {HEX}", "port: expected int, got an integer of more than 64 bits"),
        (f"worker_urls: [{HEX}]", "worker_urls: expected str, got an integer of more than 64 bits"),
        (f"readmit: [{HEX}]", "readmit: expected one of same-weights | healthy | never, got a list with an integer"),
        (f"? {HEX}\n: 1", "the name of a setting must be text"),
        ("port: 2026-13-45", "this value cannot be read"),
        ("worker_urls: " + "[" * 20_000, "nested too deep"),
        (_nested_aliases("middlewares:"), "middlewares: expected a dotted path or {path, options}, got ['x',"),
        ("worker_urls: &a [*a]", "worker_urls: expected str, got ["),
        (
            "middlewares: [{path: a.B, options: {5: 1}}]",
            "middlewares: expected {path, options} with a mapping of options by name",
        ),
        ('api_key_file: "a\\0b"', "api_key_file: expected"),
        ('host: "\\ud800"', "host: expected text without null characters and lone surrogates"),
        ("host: a..b", "host: must name a host or an address"),
        (f"readmit: {'x' * 100_000}", "readmit: expected one of same-weights | healthy | never, got 'xxx"),
    ],
    ids=lambda given: given[:25],
)
def test_an_odd_value_in_a_file_is_one_short_line(
    refused: Callable[..., list[str]], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "router.yaml").write_text(text, encoding="utf-8")
    (line,) = refused("config", "--config", str(tmp_path / "router.yaml"))
    assert message in line
    assert len(line) < 1000


def test_an_address_that_is_not_this_machine_s_stops_the_start_with_one_line() -> None:
    done = run("--port", "0", "--host", "256.1.1.1")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("miles-router: ")]
    assert done.returncode == 2
    assert "host, port: cannot listen on 256.1.1.1" in line


def test_config_shows_the_merged_values_and_where_each_came_from(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "port: 1\nmax_retries: 1\nconnect_timeout: 1\nlog_level: error\n", encoding="utf-8"
    )
    done = run(
        "config",
        *("--config", "r.yaml", "--connect-timeout", "3", "--log-level", "debug", "--set", "log-level=info"),
        directory=tmp_path,
        MILES_ROUTER_MAX_RETRIES="2",
        MILES_ROUTER_CONNECT_TIMEOUT="2",
        MILES_ROUTER_API_KEY="not-to-be-shown",
    )
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["host"] == ["127.0.0.1", "default"]
    assert rows["port"] == ["1", "r.yaml"]
    assert rows["max_retries"] == ["2", "MILES_ROUTER_MAX_RETRIES"]
    assert rows["connect_timeout"] == ["3.0", "--connect-timeout"]
    assert rows["log_level"] == ["info", "--set"]
    assert rows["api_key"] == ["set", "(hidden)", "MILES_ROUTER_API_KEY"]
    assert "not-to-be-shown" not in done.stdout


def test_middlewares_lists_the_stack_with_every_option(tmp_path: Path) -> None:
    text = f"middlewares:\n  - path: {WORKING}.Tagging\n    options: {{tag: from-file}}\n  - {WORKING}.Plain\n"
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    arguments = ("--config", str(tmp_path / "r.yaml"), "--set", "tagging.times=3", "--set", "plain.mode=off")
    rows = [line.split() for line in run("middlewares", *arguments).stdout.splitlines()]
    assert ["1.", "tagging", f"{WORKING}.Tagging"] in rows
    assert ["tagging.tag", "str", "'a'", "'from-file'"] in rows
    assert ["tagging.times", "int", "1", "3"] in rows
    assert ["plain.mode", "on", "|", "off", "'on'", "'off'"] in rows


def test_a_class_in_the_current_directory_can_be_loaded_and_checked(tmp_path: Path) -> None:
    text = "class Mine:\n    def __init__(self, app, *, router): self.app = app\n"
    text += "    async def __call__(self, scope, receive, send): await self.app(scope, receive, send)\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    done = run("check", "mine.Mine", directory=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("ok ") == 8
    (tmp_path / "mine.py").write_text(text.replace("await self.app", "await send"), encoding="utf-8")
    assert run("check", "mine.Mine", directory=tmp_path).returncode == 1
