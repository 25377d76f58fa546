"""A router on a real port: in the test's own loop, or as the command that users start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, cast
from urllib.parse import urlsplit

import psutil
import pytest
import uvicorn

from miles_router.app import create_app
from miles_router.edge import RouterApp
from miles_router.errors import ConfigError
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Transition, Worker
from miles_router.serving.server import listen, uvicorn_config
from miles_router.settings.config import RouterConfig
from miles_router.shards.owners import ShardOwners
from miles_router.tasks import spawn
from tests.support.forks import fork_router
from tests.support.http import Pairs, RawReply, ask
from tests.support.outside import Outside
from tests.support.scripted_worker import ScriptedWorker
from tests.support.waiting import PATIENCE, STEP, until

COMMAND = Path(sys.executable).with_name("miles-router")
#: Longer than any test: unless one wants more, probes run once, at registration, and nothing moves, however slow the
#: machine is.
QUIET = 3600.0
QUIETLY = {"port": 0, "health_check_interval": QUIET, "move_after": QUIET}
#: How many processes a router under test has (`--processes`).
_processes = 1
REQUEST_TASKS = ("request", "watch client", "connect ", "probe ")


def use_processes(count: int) -> None:
    global _processes
    _processes = count


def processes_used() -> int:
    """How many they have, each with bounds of its own."""
    return _processes


class _Server(uvicorn.Server):
    """uvicorn's server without signals, stopped by an event instead of a poll."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)  # which sets the headers that the server adds, if it adds any
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, which polls every 0.1 s, in the same order."""
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in tuple(state.connections):
            connection.shutdown()
        with contextlib.suppress(AssertionError):
            await until(lambda: not state.connections and not state.tasks, "requests end", deadline=1.0)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


class RunningRouter:
    """A router in this process."""

    given_up = False

    def __init__(self, app: RouterApp, server: _Server, url: str) -> None:
        self._app = app
        self.url = url
        #: Every worker that was ever registered, removed ones included.
        self.ever: set[Worker] = set(app.router.pool)
        self._server = server
        app.router.pool.listeners.append(self._note)

    @property
    def app(self) -> RouterApp:
        return self._app

    @property
    def pool(self) -> WorkerPool:
        return self.app.router.pool

    @property
    def connections(self) -> tuple[Any, ...]:
        return tuple(self._server.server_state.connections)

    async def probed(self) -> None:
        """Until every worker has told its weight version."""
        known = lambda: all(worker.weight_version is not None for worker in self.pool)  # noqa: E731
        await until(known, "the workers' weight versions")

    def worker(self, scripted: ScriptedWorker) -> Worker:
        return self.pool.get(scripted.url)

    async def ask(self, method: str, target: str, headers: Pairs = (), body: bytes | None = None) -> RawReply:
        return await ask(self.url, method, target, headers, body)

    def _note(self, transition: Transition) -> None:
        self.ever.add(transition.worker)

    def errors(self) -> list[str]:
        """What it has logged as errors, where the test's own process does not see them."""
        return []

    def leftovers(self) -> list[str]:
        """What a router without requests must not have: leases, request tasks, client connections in a request."""
        left = [f"{worker!r}" for worker in self.ever if worker.in_flight]
        left += [f"pool.in_flight is {self.pool.in_flight}"] if self.pool.in_flight else []
        left += [f"task {t.get_name()}" for t in asyncio.all_tasks() if t.get_name().startswith(REQUEST_TASKS)]
        return left


class _GivenUpError(Exception):
    """A router is no longer of use."""


class RouterOfProcesses(RunningRouter):
    """A router of several processes, beside this one. What looks inside of a router is no test of such a one."""

    def __init__(self, url: str, key: str | None = None, log: Callable[[], str] = str) -> None:
        self.url = url
        self.ever = set()
        #: A test has looked inside, and stopped there: what it has begun has no end.
        self.given_up = False
        self._key = key
        self._log = log

    @property
    def app(self) -> Any:
        return Outside(self.url, self._key, self._hidden).app

    @property
    def pool(self) -> WorkerPool:
        return cast(WorkerPool, self.app.router.pool)

    def errors(self) -> list[str]:
        return re.findall(r"^\S+ \S+ ERROR .*(?:\n    .*)*", self._log(), re.MULTILINE)

    def _hidden(self, name: str) -> NoReturn:
        self.given_up = True
        pytest.skip(f"it looks inside of a router's one process: {name}")

    def __getattr__(self, name: str) -> Any:
        self._hidden(name)

    @property
    def connections(self) -> tuple[Any, ...]:
        self._hidden("connections")

    async def probed(self) -> None:
        """Until every worker has told its weight version."""
        while any(each["weight_version"] is None for each in await self._workers()):  # noqa: ASYNC110
            await asyncio.sleep(STEP)

    async def settled(self) -> None:
        """Until every worker was checked."""
        while any(each["last_check"] is None for each in await self._workers()):  # noqa: ASYNC110
            await asyncio.sleep(STEP)

    async def _workers(self) -> list[dict[str, Any]]:
        headers = [] if self._key is None else [("Authorization", f"Bearer {self._key}")]
        found: list[dict[str, Any]] = (await self.ask("GET", "/workers", headers)).json()["workers"]
        return found

    def leftovers(self) -> list[str]:
        """Nothing is seen from here; the workers say who is busy."""
        return []


@contextlib.asynccontextmanager
async def running_router(*workers: str | ScriptedWorker, **settings: Any) -> AsyncIterator[RunningRouter]:
    """Serve `create_app(RouterConfig(...))` as the command does, in the loop of the test; with `--processes`, on so
    many processes beside this one."""
    urls = tuple(worker if isinstance(worker, str) else worker.url for worker in workers)
    owners: ShardOwners | None = settings.pop("owners", None)  # of one of several
    config = RouterConfig(worker_urls=urls, **{**QUIETLY, **settings})
    if _processes > 1 and owners is None:
        async with _on_processes(config) as router:
            yield router
        return
    app = create_app(config, owners=owners)
    async with serving(uvicorn_config(app), listen(config.host, config.port)) as (server, url):
        yield RunningRouter(app, server, url)


@contextlib.asynccontextmanager
async def _on_processes(config: RouterConfig) -> AsyncIterator[RouterOfProcesses]:
    given = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    given["middlewares"] = [{"path": each.path, "options": dict(each.options)} for each in config.middlewares]
    given = {name: [*each] if isinstance(each, tuple) else each for name, each in given.items() if each is not None}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({**given, "processes": _processes}, file)
        file.flush()
        start = partial(fork_router, tokenizer=config.hf_checkpoint)
        interval = str(config.health_check_interval)
        process = router_process(
            "--config", file.name, "--host", config.host, "--health-check-interval", interval, start=start
        )
        with contextlib.suppress(_GivenUpError), _refusals():
            async with process as running:
                key = config.admin_api_key or config.api_key
                router = RouterOfProcesses(running.url, key, running.stderr)
                if key is None and config.api_key_file is None:
                    await router.settled()
                yield router
                if router.given_up:
                    raise _GivenUpError


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What a command says that does not start, as the error that it is inside."""
    try:
        yield
    except NoBannerError as end:
        if (refused := re.search(r"^miles-router: (.*)", str(end), re.MULTILINE)) is None:
            raise
        raise ConfigError(refused[1]) from None


@contextlib.asynccontextmanager
async def serving(config: uvicorn.Config, sock: socket.socket) -> AsyncIterator[tuple[_Server, str]]:
    """Serve an app in the loop of the test; the server and its URL."""
    server = _Server(config)
    running = spawn(server.serve(sockets=[sock]), name="server under test")
    try:
        await until(lambda: server.started or running.done(), "the server serves")
        yield server, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.stop.set()
        await running
        sock.close()


class _Command(Protocol):
    """A running process, as `subprocess.Popen` shows it."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sent: signal.Signals) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> object: ...


class NoBannerError(AssertionError):
    """A command has ended before it began to listen; with what it has written."""


@dataclass
class RouterProcess:
    """The command `miles-router`, running."""

    url: str
    process: _Command
    log: IO[bytes]
    _terminated: bool = False

    def stderr(self) -> str:
        if not self.log.closed:
            self.log.seek(0)
            self._written = self.log.read().decode()
        return self._written

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def terminate(self) -> None:
        """SIGTERM, once: a second one would kill a process that has done all and ends."""
        if not self._terminated and self.process.poll() is None:
            self._terminated = True
            self.process.send_signal(signal.SIGTERM)

    async def stop(self) -> int:
        self.terminate()
        await until(lambda: self.process.poll() is not None, "the router has ended")
        assert self.process.returncode is not None
        return self.process.returncode


#: Starts a router with these arguments, this log and this environment.
Start = Callable[[Sequence[str], str, Mapping[str, str]], _Command]


def command(*before: str) -> Start:
    """The command `miles-router` as users start it, or as what stands before it does."""

    def start(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> _Command:
        with open(log, "ab") as output:
            return subprocess.Popen([*before, str(COMMAND), *arguments], stderr=output, stdout=output, env=environment)

    return start


AS_USERS_DO = command()


@contextlib.asynccontextmanager
async def router_process(
    *arguments: str,
    expect_status: int = 0,
    open_files: int | None = None,
    start: Start = AS_USERS_DO,
) -> AsyncIterator[RouterProcess]:
    """Start the real command on a free port; at the end SIGTERM must end it with `expect_status`. The system lets it
    have `open_files` descriptors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILES_ROUTER_")}
    with tempfile.NamedTemporaryFile(prefix="miles-router-", suffix=".log") as log:
        given = ["--port", "0", "--health-check-interval", str(QUIET), *arguments]
        process = start(given, log.name, environment)
        if open_files is not None:  # before it looks: an interpreter takes long to start
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_files, open_files))
        running = RouterProcess("", process, log)
        try:
            await until(lambda: _listening(running) or process.poll() is not None, "a banner")
            if process.poll() is not None:
                raise NoBannerError(running.stderr())
            running.url = _listening(running) or ""
            await _answers(running)
            yield running
            assert await running.stop() == expect_status, running.stderr()
        finally:
            process.kill()
            process.wait()
            running.stderr()


def refuses(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET) as attempt:
        return attempt.connect_ex((parts.hostname, parts.port)) != 0


def _listening(running: RouterProcess) -> str | None:
    found = re.search(r"listening +(http://\S+)", running.stderr())
    return found and found[1]


async def _answers(running: RouterProcess) -> None:
    """uvicorn says that it listens a moment before it does."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            await ask(running.url, "GET", "/health")
            return
        await asyncio.sleep(STEP)
    raise AssertionError(f"the router does not answer\n{running.stderr()}")
