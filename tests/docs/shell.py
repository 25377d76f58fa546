"""A page's console, as its reader has it: one bash, an empty directory, ports of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.docs.pages import ROOT, Block
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE

MARK = "--- status"
#: The ports that pages use: the router's, and the workers' in a row.
ROUTER_PORT, WORKER_PORTS = 31000, range(30001, 30005)
STARTS_ROUTER = re.compile(r"(^|\s)miles-router(?!-)(?! config| middlewares| check| view| audit)")


@dataclass(frozen=True)
class Step:
    """One command and the output that the page shows for it."""

    command: str
    output: str

    @property
    def background(self) -> bool:
        return self.command.endswith("&")


def steps(block: Block) -> Iterator[Step]:
    """The commands of a console block. A line that ends in a backslash continues on the next."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        found = re.match(r"(?:.*\\\n)*.*\n?", part)
        assert found is not None
        yield Step(found[0].strip(), part[found.end() :])


def matches(expected: str, said: str) -> bool:
    """Whether a page's output fits: white space counts as one space, `...` stands for anything."""
    parts = re.split(r"\s*\.\.\.\s*", " ".join(expected.split()))
    return bool(re.fullmatch(".*".join(map(re.escape, parts)), " ".join(said.split()), re.DOTALL))


class Console:
    """Runs the blocks of one page."""

    def __init__(self, directory: Path) -> None:
        self._ports = dict(zip((ROUTER_PORT, *WORKER_PORTS), free_ports(1 + len(WORKER_PORTS)), strict=True))
        self._directory = directory
        self._started = 0
        self._workers = 0
        shutil.copytree(ROOT / "configs", directory / "configs")
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=_environment(directory),
            start_new_session=True,
        )

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGTERM)
        self._bash.communicate(timeout=PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)

    def substituted(self, text: str) -> str:
        """`text` with this console's ports."""
        for written, real in self._ports.items():
            text = re.sub(rf"\b{written}\b", str(real), text)
        return text

    def play(self, block: Block) -> None:
        """Run a block, or write it to the file it names."""
        if block.file_name is not None:
            (self._directory / block.file_name).write_text(self.substituted(block.text), encoding="utf-8")
        elif block.kind == "python":
            (self._directory / "snippet.py").write_text(self.substituted(block.text), encoding="utf-8")
            self.run(Step("python snippet.py", ""), str(block))
        elif block.kind == "console":
            for step in steps(block):
                self.run(step, str(block))

    def run(self, step: Step, where: str) -> None:
        """One command: it succeeds, and says what the page says it does."""
        if step.background:
            return self._start(step.command)
        said, status = self._type(self.substituted(step.command))
        shown = f"{where}: $ {step.command}\n{said}"
        assert status == 0, f"status {status} of {shown}"
        expected = self.substituted(step.output)
        assert not expected.strip() or matches(expected, said), f"expected:\n{expected}\n{shown}"

    def start_router_and_workers(self) -> None:
        """What pages take as given that do not start their own."""
        self._start(f"miles-router --port {ROUTER_PORT} &")
        url = f"http://127.0.0.1:{ROUTER_PORT}"
        self._start(f"miles-router-worker --port {WORKER_PORTS[0]} --count 2 --router {url} &")

    def _start(self, command: str) -> None:
        self._started += 1
        log = f"process-{self._started}.log"
        (self._directory / log).touch()
        said, status = self._type(f"{self.substituted(command).removesuffix('&')} >{log} 2>&1 &")
        assert status == 0, said
        if "--router " in command:
            count = re.search(r"--count (\d+)", command)
            self._workers += int(count[1]) if count else 1
        port = re.search(r"--port (\d+)", command)
        self._wait(lambda: self._listens(int(port[1]) if port else ROUTER_PORT), command, log)
        if self._workers and self._listens(ROUTER_PORT):
            self._wait(lambda: self._registered() >= self._workers, f"registration: {command}", log)

    def _wait(self, condition: Callable[[], bool], what: str, log: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            said = (self._directory / log).read_text(encoding="utf-8", errors="replace")
            assert time.monotonic() < deadline, f"still waiting for {what}\n{said}"
            time.sleep(0.05)

    def _listens(self, port: int) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self._ports.get(port, port))) == 0

    def _registered(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[ROUTER_PORT]}/health", timeout=PATIENCE) as reply:
            return int(json.load(reply)["workers_routable"])

    def _type(self, command: str) -> tuple[str, int]:
        """What a command printed, and its exit status."""
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{command}\nprintf '\\n{MARK} %d\\n' $?\n".encode())
        self._bash.stdin.flush()
        said = b""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(rf"\n{MARK} (\d+)\n".encode(), said)):
            assert self._bash.stdout is not None
            ready, _, _ = select.select([self._bash.stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._bash.stdout.fileno(), 65536) if ready else b""
            assert chunk, f"no end after {PATIENCE:g} s: {command}\n{said.decode()}"
            said += chunk
        return said[: found.start()].decode(), int(found[1])


def _environment(directory: Path) -> dict[str, str]:
    """A clean one, with our commands on the path, and a stand-in for curl where the machine has none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILES_ROUTER_")}
    path = [str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]
    if shutil.which("curl") is None:
        (directory / "curl").symlink_to(Path(__file__).with_name("curl.py"))
        path.insert(0, str(directory))
    return {**kept, "PATH": os.pathsep.join(path), "HOME": str(directory)}
