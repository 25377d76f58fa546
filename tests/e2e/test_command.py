"""The command `miles-router` as people run it: a process, its output, its exit status."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_router import cli
from miles_router.settings.config import DASHBOARD
from tests.support.http import Client, request
from tests.support.running_router import COMMAND, refuses, router_process
from tests.support.scripted_worker import chunk, chunked_head, script
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, until

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


def test_help_names_every_flag_of_the_contract() -> None:
    shown = run("--help").stdout
    flags = """--host --port --worker-urls --middleware-paths --config --hf-checkpoint --chat-template-path
        --health-check-interval --health-check-timeout --health-check-failure-threshold --readmit --connect-timeout
        --request-timeout --max-retries --max-request-bytes --api-key --admin-api-key --log-level --log-format
        --version --set"""
    assert [flag for flag in flags.split() if flag not in shown] == []


def test_help_shows_flags_in_groups_with_what_they_take() -> None:
    shown = run("--help").stdout
    assert not re.search(r"--[a-z-]+ X\b", shown)
    for title in ("listening:", "health of workers:", "placement and pauses:", "shutdown, paths and keys:"):
        assert f"\n{title}\n" in shown
    for flag in ("--port N", "--host TEXT", "--readmit same-weights|healthy|never", "--no-otel", "--otel [true|false]"):
        assert flag in shown


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (("--access-log",), "true"),
        (("--access-log", "true"), "true"),
        (("--access-log=off",), "false"),
        (("--no-access-log",), "false"),
        (("--access-log", "--no-access-log"), "false"),
        (("--set", "access_log=true", "--no-access-log"), "true"),
    ],
    ids=" ".join,
)
def test_a_switch_needs_no_value(given: tuple[str, ...], value: str) -> None:
    line = next(line for line in run("config", *given).stdout.splitlines() if line.startswith("access_log"))
    assert line.split()[1] == value


@pytest.mark.parametrize(
    "given", [("http://a:1,http://b:2",), ("http://a:1", "http://b:2"), ("http://a:1,", "http://b:2")]
)
def test_urls_are_separated_by_spaces_or_commas(given: tuple[str, ...]) -> None:
    line = next(line for line in run("config", "--worker-urls", *given).stdout.splitlines() if "worker_urls" in line)
    assert line.split()[1:3] == ["http://a:1,", "http://b:2"]


def test_version_is_printed() -> None:
    assert run("--version").stdout.startswith("miles-router 0.")


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
        (("--port", "70000"), "--port: port: must be between 0 and 65535, got 70000"),
        (("--readmit", "always"), "--readmit: readmit: expected one of same-weights | healthy | never, got 'always'"),
        (("--worker-urls", "ftp://x"), "worker_urls: url 'ftp://x' must start with http:// or https://"),
        (("--set", "prot=1"), "--set: unknown setting 'prot'; did you mean 'port'?"),
        (("--otel", "perhaps"), "--otel: otel: expected true or false, got 'perhaps'"),
        (("--no-otel", "true"), "--no-otel takes no value, got 'true'"),
        (("--worker-urls", "http://a:1,ftp://x"), "worker_urls: url 'ftp://x' must start with http:// or https://"),
        (("--set", "port"), "--set 'port': write --set setting=value"),
        (("--set", "tagging.tag=1"), "--set: no middleware called 'tagging' is listed"),
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
        (f"connect_timeout: {HEX}", "connect_timeout: expected float, got an integer of more than 64 bits"),
        (f"worker_urls: [{HEX}]", "worker_urls: expected str, got an integer of more than 64 bits"),
        (f"readmit: [{HEX}]", "readmit: expected one of same-weights | healthy | never, got a list with an integer"),
        (f"? {HEX}\n: 1", "the name of a setting must be text"),
        ("2026: 1", "the name of a setting must be text, got 2026"),
        ("port: 2026-13-45", "this value cannot be read"),
        ("otel: !!bool maybe", "this value cannot be read"),
        ("port: !!int ''", "this value cannot be read"),
        ("worker_urls: " + "[" * 20_000, "nested too deep"),
        ("a: " + "{a: " * 20_000, "nested too deep"),
        (_nested_aliases("worker_urls:"), "worker_urls: expected str, got ['x',"),
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


@pytest.mark.parametrize("flag", ["--port", "--max-retries", "--connect-timeout", "--worker-urls", "--set=port"])
def test_a_flag_of_5000_digits_is_one_short_line(refused: Callable[..., list[str]], flag: str) -> None:
    given = [f"{flag}={DIGITS}"] if "=" in flag else [flag, DIGITS]
    (line,) = refused("config", *given)
    assert flag.replace("=port", "") in line
    assert len(line) < 1000


def test_an_address_that_is_not_this_machine_s_stops_the_start_with_one_line() -> None:
    done = run("--port", "0", "--host", "256.1.1.1")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("miles-router: ")]
    assert done.returncode == 2
    assert "host, port: cannot listen on 256.1.1.1" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown setting 'prot'; did you mean 'port'?"),
        ('port: "1"', "port: expected int, got '1'"),
        ("health_check_interval: 0", "health_check_interval: must be greater than 0"),
        ("- a", "the top level must be a mapping"),
        ("a: [", "not YAML"),
        ("middlewares: [{path: a.B, option: {}}]", "middlewares: expected {path, options}"),
        ("middlewares: []\nmiddleware_paths: []", "give either middlewares or middleware_paths, not both"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    refused: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "router.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (line,) = refused("config", "--config", "router.yaml")
    assert message in line
    assert "router.yaml" in line


def test_a_wrong_environment_variable_is_named() -> None:
    done = run("config", MILES_ROUTER_MAX_RETRIES="many")
    assert done.returncode == 2
    assert done.stderr == "miles-router: MILES_ROUTER_MAX_RETRIES: max_retries: expected int, got 'many'\n"


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


def test_bare_paths_keep_the_options_that_the_file_gave(tmp_path: Path) -> None:
    text = f"middlewares: [{{path: {WORKING}.Tagging, options: {{tag: from-file}}}}]"
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    paths = ("--middleware-paths", f"{WORKING}.Plain", f"{WORKING}.Tagging")
    shown = run("middlewares", "--config", str(tmp_path / "r.yaml"), *paths).stdout
    assert shown.index("1. plain") < shown.index("2. tagging")
    assert "'from-file'" in shown


def test_a_class_in_the_current_directory_can_be_loaded_and_checked(tmp_path: Path) -> None:
    text = "class Mine:\n    def __init__(self, app, *, router): self.app = app\n"
    text += "    async def __call__(self, scope, receive, send): await self.app(scope, receive, send)\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    done = run("check", "mine.Mine", directory=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("ok ") == 8
    (tmp_path / "mine.py").write_text(text.replace("await self.app", "await send"), encoding="utf-8")
    assert run("check", "mine.Mine", directory=tmp_path).returncode == 1


async def test_the_banner_says_where_who_and_in_which_order(stage: Stage) -> None:
    worker = await stage.worker()
    layers = ("--middleware-paths", f"{WORKING}.Plain", f"{WORKING}.Tagging")
    async with router_process("--worker-urls", worker.url, *layers) as router:
        shown = router.stderr()
        assert f"listening    {router.url}" in shown
        assert f"1. {WORKING}.Plain -> 2. {WORKING}.Tagging -> 3. {DASHBOARD} -> worker" in shown
        assert f"workers      {worker.url}" in shown


async def test_sigterm_lets_requests_in_flight_finish_and_exits_0(stage: Stage) -> None:
    worker = await stage.worker()
    gate = asyncio.Event()
    worker.always(script(chunked_head(), chunk(b"one "), gate, chunk(b"two"), b"0\r\n\r\n"))
    async with router_process("--worker-urls", worker.url) as router:
        async with await Client.connect(router.url) as client:
            await client.send(request("GET", "/stream"))
            await client.read_head()
            assert await client.read_part() == b"one "
            router.terminate()
            await until(lambda: refuses(router.url), "new connections are refused")
            gate.set()
            assert await client.read_part() == b"two"
            assert await client.read_part() == b""
        assert await router.stop() == 0


async def test_what_does_not_finish_in_time_is_cut_off_after_sigterm(stage: Stage) -> None:
    worker = await stage.worker()
    worker.always(script(chunked_head(), chunk(b"one "), asyncio.Event()))
    async with (
        router_process("--worker-urls", worker.url, "--shutdown-timeout", "1") as router,
        await Client.connect(router.url) as client,
    ):
        await client.send(request("GET", "/stream"))
        await client.read_head()
        started = time.monotonic()
        assert await router.stop() == 0
        assert time.monotonic() - started >= 1
    await until(lambda: not worker.busy, "the worker is told")
