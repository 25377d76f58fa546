"""The loads: each asks one router for some seconds, as fast as it answers, and counts what that took.

Workers have fixed answers, so that they take little of the machine; what they and the clients do take is counted too,
for on few cores it bounds what is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tests.benchmarks.backend import answering, reply
from tests.benchmarks.load import LOADS, WRK_SCRIPT, request_body, wrk
from tests.benchmarks.peers import REPO, running_router
from tests.benchmarks.process import HOST, fetch, free_port, started
from tests.benchmarks.procstat import own_seconds, scheduled_seconds
from tests.benchmarks.routed_experts import EXPERTS, make_answer
from tests.benchmarks.session_turns import CHAT, LAYER
from tests.support.tokenizers import tokenizer_directory

TURNS, SAMPLED = 20, 100
TEXTS = "middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
#: A rollout's routed experts: 8,192 tokens through 60 layers, 8 experts each.
R3 = argparse.Namespace(tokens=8192, layers=60, top_k=8, experts=256)


@dataclass(frozen=True)
class Router:
    """A running one."""

    port: int
    pid: int


@dataclass(frozen=True)
class Round:
    """What some seconds of a load have taken."""

    requests: int
    seconds: float
    router: float  # seconds of CPU, of all its processes
    harness: float  # of clients and workers

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def cost(self) -> float:
        """Seconds of the router's CPU for a request."""
        return self.router / self.requests

    @property
    def beside(self) -> float:
        """Seconds of CPU that clients and workers take for one."""
        return self.harness / self.requests


@dataclass(frozen=True)
class Load:
    """`drive(port, seconds, clients)` asks a router, each client as soon as it has its last answer, and gives how many
    answers came."""

    title: str
    unit: str
    arguments: tuple[str, ...]
    answers: Mapping[str, bytes]  # of the worker, by path; none: it is an engine that answers turns
    clients: int
    drive: Callable[[int, float, int], int]


def measured(load: Load, router: Router, seconds: float, clients: int) -> Round:
    spent, all_spent, begun = scheduled_seconds(router.pid), own_seconds(), time.perf_counter()
    done = load.drive(router.port, seconds, clients)
    took = time.perf_counter() - begun
    spent, all_spent = scheduled_seconds(router.pid) - spent, own_seconds() - all_spent
    return Round(done, took, spent, all_spent - spent)


@contextlib.contextmanager
def running_worker(root: Path, answers: Mapping[str, bytes]) -> Iterator[int]:
    """nginx that answers these paths, whatever it is asked; or the engine."""
    if answers:
        with answering(root, answers) as port:
            yield port
        return
    port = free_port()
    engine = [sys.executable, "-m", "tests.benchmarks.scale.engine", str(port), str(SAMPLED)]
    with started(engine, port, "/health", root / "worker.log", directory=REPO):
        yield port


@contextlib.contextmanager
def running(processes: int, worker: int, log: Path, *arguments: str) -> Iterator[Router]:
    """A router of so many processes in front of the worker."""
    several = ("--processes", str(processes)) if processes > 1 else ()
    with running_router(worker, log, *several, *arguments) as (port, pid):
        while processes > 1 and len(orjson.loads(fetch(port, "GET", "/router/info")[1])["processes"]) < processes:
            time.sleep(0.05)
        yield Router(port, pid)


def loads(root: Path) -> list[Load]:
    model = ("--hf-checkpoint", tokenizer_directory("qwen3"), "--middleware-paths")
    rows = make_answer(R3)
    return [
        Load("small requests, 64 kept connections", "request", (), {"/generate": reply(133)}, 64, _passthrough(root)),
        Load("traced turns, 8 kept connections", "turn", (*model, LAYER), {}, 8, _turns(kept=True)),
        Load("traced turns, a connection each", "turn", (*model, LAYER), {}, 8, _turns(kept=False)),
        Load("turns named by a header", "turn", (*model, LAYER), {}, 8, _turns(kept=True, named=True)),
        Load("texts of two turns", "text", (*model, TEXTS), {}, 8, _texts()),
        Load(
            f"R3 answers of {len(rows.body) / 1e6:.0f} MB", "answer", ("--middleware-paths", EXPERTS),
            {"/generate": rows.body}, 4, _rollouts(len(rows.stripped)),
        ),
    ]  # fmt: skip


def _passthrough(root: Path) -> Callable[[int, float, int], int]:
    script = root / "load.lua"
    script.write_text(WRK_SCRIPT % request_body(False).decode())

    def drive(port: int, seconds: float, clients: int) -> int:
        result = wrk(port, replace(LOADS["small-64"], connections=clients), seconds, script)
        if result["bad"]:
            raise RuntimeError(f"{result['bad']} requests failed")
        return int(result["requests"])

    return drive


def _together(clients: int, seconds: float, client: Callable[[Callable[[], bool]], int]) -> int:
    """What all clients count, each in a thread, until the time is over."""
    over = threading.Event()
    with ThreadPoolExecutor(clients) as threads:
        counting = [threads.submit(client, lambda: not over.is_set()) for _ in range(clients)]
        over.wait(seconds)
        over.set()
        return sum(each.result() for each in counting)


class Agent:
    """Takes turns, on one connection or on one each."""

    def __init__(self, port: int, *, kept: bool, named: bool = False) -> None:
        self._named = named
        self._client = http.client.HTTPConnection(HOST, port, timeout=60)
        self._headers = {"content-type": "application/json", **({} if kept else {"connection": "close"})}

    def session(self, going: Callable[[], bool], **named: str) -> int:
        """The turns of one session, each with its whole history, as long as it goes on; gives how many there were."""
        path = CHAT
        if self._named:
            self._headers["x-session-id"] = uuid.uuid4().hex
        else:
            path = f"/sessions/{self._post('/sessions', named)['session_id']}{CHAT}"
        said = {"role": "user", "content": "the sum of item 42 " * (SAMPLED // 5)}
        messages, done = [said], 0
        while going() and done < TURNS:
            answer = self._post(path, {"model": "m", "messages": messages, "max_tokens": 500})
            messages += [answer["choices"][0]["message"], said]
            done += 1
        return done

    def _post(self, path: str, body: Any) -> Any:
        self._client.request("POST", path, orjson.dumps(body), self._headers)
        if self._client.sock is not None:
            self._client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = self._client.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {data[:300]!r}")
        return orjson.loads(data)

    def close(self) -> None:
        self._client.close()


def _turns(*, kept: bool, named: bool = False) -> Callable[[int, float, int], int]:
    """Agents with one session after the other."""

    def agent(port: int, going: Callable[[], bool]) -> int:
        with contextlib.closing(Agent(port, kept=kept, named=named)) as agent:
            return sum(agent.session(going) for _ in iter(going, False))

    return lambda port, seconds, clients: _together(clients, seconds, partial(agent, port))


def _rollouts(expected: int) -> Callable[[int, float, int], int]:
    """Rollouts whose rows are taken out of their answers."""

    def client(port: int, going: Callable[[], bool]) -> int:
        done = 0
        while going():
            status, body = fetch(port, "POST", "/generate", b'{"input_ids":[1],"sampling_params":{}}')
            if status != 200 or len(body) != expected:
                raise RuntimeError(f"{status}, {len(body)} bytes")
            done += 1
        return done

    return lambda port, seconds, clients: _together(clients, seconds, partial(client, port))


def _texts() -> Callable[[int, float, int], int]:
    """Rollouts of two turns, the second behind what the first has sampled."""

    def client(port: int, going: Callable[[], bool]) -> int:
        done = 0
        while going():
            text = f"Question {uuid.uuid4().hex}: " + "the sum of item 42 " * (SAMPLED // 5)
            for _ in range(2):
                asked = {"text": text, "sampling_params": {"max_new_tokens": SAMPLED}, "return_logprob": True}
                status, body = fetch(port, "POST", "/generate", orjson.dumps(asked))
                if status != 200:
                    raise RuntimeError(f"{status} {body[:300]!r}")
                text += orjson.loads(body)["text"] + " And the next?"
                done += 1
        return done

    return lambda port, seconds, clients: _together(clients, seconds, partial(client, port))
