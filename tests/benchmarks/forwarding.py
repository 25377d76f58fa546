"""What it costs to forward a request to its owner: CPU of two routers, requests at their owner beside requests at the
other one.

    python -m tests.benchmarks.forwarding [--rounds 5] [--machines]

Of two processes of one machine; with `--machines` of two machines (both are this one). Both kinds are asked in turns,
so that what else the machine does falls on both. Each line is the median of the rounds, in CPU of both processes
together, user and system, as the scheduler counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from miles_router.settings.config import MiddlewareSpec
from miles_router.slots import slot_of
from tests.benchmarks.peers import REPO
from tests.benchmarks.process import HOST, free_port, started
from tests.benchmarks.procstat import scheduled_seconds
from tests.benchmarks.scale.loads import SAMPLED, Agent
from tests.benchmarks.session_turns import LAYER
from tests.support.cluster import cluster
from tests.support.http import request
from tests.support.machines import Part, machines
from tests.support.owned import OWNED, name_of
from tests.support.tokenizers import tokenizer_directory

LAYERS = (OWNED, MiddlewareSpec(LAYER))
END = b"0\r\n\r\n"
MB = 1 << 20
#: Seconds of a lease.
LEASE = 8.0


class Pair(NamedTuple):
    """Two routers, of which the one at `url` is asked for what is its own, or the other's."""

    url: str
    pids: tuple[int, int]
    own: str
    others: str

    def spent(self) -> float:
        """Seconds of CPU of both."""
        return sum(map(scheduled_seconds, self.pids))


def connections(url: str, target: str, each: int, count: int, body: bytes | None = None) -> None:
    """`count` connections one after the other, with `each` requests on every one."""
    host, port = url.removeprefix("http://").split(":")
    asked = request("POST", target, body=body or b"x")
    for _ in range(count):
        with socket.create_connection((host, int(port))) as sock:
            for _ in range(each):
                sock.sendall(asked)
                _read_reply(sock)


def _read_reply(sock: socket.socket) -> None:
    read = b""
    while not read.endswith(END):
        part = sock.recv(MB)
        if not part:
            raise ConnectionError("a reply was cut")
        read = (read + part)[-1024:]


def turns(url: str, like: str, sessions: int) -> int:
    """So many sessions one after the other, on one connection, that are where what is named so is; gives how many turns
    that were."""
    names = (name for name in iter(lambda: secrets.token_hex(8), "") if slot_of(name) == slot_of(like))
    with contextlib.closing(Agent(int(url.rpartition(":")[2]), kept=True)) as agent:
        return sum(agent.session(lambda: True, session_id=name) for name in itertools.islice(names, sessions))


def loads() -> dict[str, Callable[[Pair, bool], int]]:
    """By its title each load: asks a router for what is its own, or for the other's; gives how many requests."""

    def asking(
        each: int, count: int, query: str = "", body: bytes | None = None, clients: int = 1
    ) -> Callable[[Pair, bool], int]:
        def ask(pair: Pair, own: bool) -> int:
            target = f"/owned/{pair.own if own else pair.others}{query}"
            with ThreadPoolExecutor(clients) as threads:
                asked = [threads.submit(connections, pair.url, target, each, count, body) for _ in range(clients)]
                for client in asked:
                    client.result()
            return each * count * clients

        return ask

    return {
        "one small request a connection": asking(1, 1500),
        "the same by 16 clients at once": asking(1, 200, clients=16),
        "50 small requests a connection": asking(50, 40),
        "a reply of 1,600 parts": asking(1, 4, f"?bytes={100 * MB}"),
        "a body of 16 MB": asking(1, 12, body=b"x" * 16 * MB),
        "a reply of 16 MB": asking(1, 30, f"?bytes={16 * MB}"),
        "traced turns of 2,000 tokens": lambda pair, own: turns(pair.url, pair.own if own else pair.others, 10),
    }


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """Where an engine answers each turn at once."""
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.scale.engine", str(port), str(SAMPLED)]
    with tempfile.NamedTemporaryFile() as log, started(command, port, "/health", Path(log.name), directory=REPO):
        yield f"http://{HOST}:{port}"


@contextlib.asynccontextmanager
async def processes(worker: str) -> AsyncIterator[Pair]:
    """As processes of one router, though each has its port."""
    layers = [each.path for each in LAYERS]
    async with cluster(2, worker, middlewares=layers, hf_checkpoint=tokenizer_directory("qwen3"), processes=2) as made:
        one, other = made.members
        yield Pair(one.url, (one.process.pid, other.process.pid), name_of(0, 2), name_of(1, 2))


@contextlib.asynccontextmanager
async def two_machines(worker: str) -> AsyncIterator[Pair]:
    """A process of each of two machines, which are this one."""
    with tempfile.TemporaryDirectory(prefix="forwarding-") as state:
        settings: Any = {"middlewares": LAYERS, "hf_checkpoint": tokenizer_directory("qwen3"), "state_dir": state}
        async with machines(2, lease=LEASE, **settings) as made:
            one, other = made.nodes
            await one.answers("POST", f"/add_worker?url={worker}")
            names = [await _name_at(one, part.process.pid) for part in (one, other)]
            yield Pair(one.url, (one.process.pid, other.process.pid), *names)


async def _name_at(asked: Part, pid: int) -> str:
    for number in itertools.count():
        answer = await asked.answers("POST", f"/owned/n{number}")
        if orjson.loads(answer.values("x-told")[0])["pid"] == pid:
            return f"n{number}"
    raise AssertionError("names do not end")


async def measure(pair: Pair, rounds: int) -> None:
    print(f"{'':<34} {'own':>10} {'other':>10} {'ratio':>7}   CPU us a request")
    for title, load in loads().items():
        spent: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):
            for own in (True, False) if number % 2 else (False, True):
                before = pair.spent()
                done = await asyncio.to_thread(load, pair, own)
                if number:  # the first one warms up
                    spent[own].append((pair.spent() - before) / done * 1e6)
        own_us, other_us = statistics.median(spent[True]), statistics.median(spent[False])
        print(f"{title:<34} {own_us:>10.1f} {other_us:>10.1f} {other_us / own_us:>7.2f}", flush=True)


async def _main(rounds: int, *, of_machines: bool) -> None:
    begun = time.monotonic()
    with engine() as worker:
        async with two_machines(worker) if of_machines else processes(worker) as pair:
            await measure(pair, rounds)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machines", action="store_true", help="two machines, with a state directory that they share")
    options = parser.parse_args()
    asyncio.run(_main(options.rounds, of_machines=options.machines))
