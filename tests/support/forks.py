"""Routers of several processes that start in a tenth of the time: a process that has imported everything forks them.

What they do is what the command does, but for how their processes begin: those are forked as well, where the command
starts interpreters. Tests of the command itself do not use this.

It is run as `python -m tests.support.forks`: it takes a line of JSON for each router, and ends, with all of them, when
nothing more can be asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from miles_router import cli
from miles_router.errors import ConfigError
from miles_router.middlewares import router as routers
from miles_router.serving import process as one
from miles_router.settings.config import RouterConfig
from tests.support.tokenizers import loaded_once

#: What else a router may import.
WANTED = (
    "middleware_hub.indexer_topk_middleware",
    "middleware_hub.openai_session_middleware",
    "middleware_hub.radix_tree_middleware",
    "middleware_hub.routed_experts_middleware",
    "miles_router.compat",
    "transformers",
)
STANDARD = 3  # standard input, output and error
DESCRIPTORS = 1024  # more than there are


class ForkedRouter:
    """A router's supervisor, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(self._status.read_text())
        return None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, sent: signal.Signals) -> None:
        """Nothing, where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sent)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Whoever forked it waits."""


def fork_router(
    arguments: Sequence[str], log: str, environment: Mapping[str, str], tokenizer: str | None = None
) -> ForkedRouter:
    """Start `miles-router` with these arguments; `tokenizer` is one that it will load."""
    status = Path(f"{log}.status")
    given = {
        "arguments": [*arguments],
        "log": log,
        "status": str(status),
        "environment": {**environment},
        "directory": os.getcwd(),
        "tokenizer": tokenizer,
    }
    forking = _forking()
    assert forking.stdin is not None
    assert forking.stdout is not None
    forking.stdin.write(json.dumps(given).encode() + b"\n")
    forking.stdin.flush()
    return ForkedRouter(int(forking.stdout.readline()), status)


@functools.cache
def _forking() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# In the process that forks


def main() -> None:
    for name in WANTED:
        importlib.import_module(name)
    vars(one)["subprocess"] = SimpleNamespace(Popen=_Forked, DEVNULL=subprocess.DEVNULL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with loaded_once():
        for line in sys.stdin.buffer:
            given = json.loads(line)
            with contextlib.suppress(ConfigError):  # there may be none, and the router need none
                vars(routers)["load_tokenizer"](RouterConfig(hf_checkpoint=given["tokenizer"]))
            read, write = os.pipe()
            forking = os.getpid()
            if os.fork() == 0:
                one.die_with_parent(forking)
                _watch(write, given)
            os.close(write)
            with os.fdopen(read, "rb") as told:
                sys.stdout.write(f"{int(told.read())}\n")
                sys.stdout.flush()


def _watch(write: int, given: dict[str, Any]) -> NoReturn:
    """Fork a router, and write down how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watching = os.getpid()
    router = os.fork()
    if router == 0:
        one.die_with_parent(watching)
        os.close(write)
        _route(given)
    os.write(write, b"%d" % router)
    os.close(write)
    _, status = os.waitpid(router, 0)
    Path(given["status"]).write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _route(given: dict[str, Any]) -> NoReturn:
    log = os.open(given["log"], os.O_WRONLY | os.O_APPEND)
    for each, into in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(each, into)
    os.closerange(STANDARD, DESCRIPTORS)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["directory"])
    _run(lambda: cli.main(given["arguments"]))


def _run(work: Callable[[], object]) -> NoReturn:
    """Do it in a process that was forked for it, and end as an interpreter does."""
    status: object = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        if (crash := sys.exc_info())[0] is not None:
            sys.excepthook(*crash)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


class _Forked:
    """In the supervisor: one of its processes, forked, with what it uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: object) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(lambda: self._begin(int(command[-1]), pass_fds))

    def _begin(self, given: int, inherited: Sequence[int]) -> None:
        asyncio._set_running_loop(None)  # the supervisor's is not this one's
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        logging.getLogger().handlers.clear()  # whose thread is not here
        os.setsid()
        kept = sorted(inherited)
        for before, after in zip([STANDARD - 1, *kept], [*kept, DESCRIPTORS], strict=True):
            os.closerange(before + 1, after)
        with os.fdopen(given, "rb") as pipe:
            sys.path[:] = pickle.load(pipe)
            one.main(pipe)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
