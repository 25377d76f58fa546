"""What it costs to hand a connection over: CPU of two routers, requests at their owner beside requests at the other.

    python -m tests.benchmarks.handover [--rounds 5]

Both kinds are asked in turns, so that what else the machine does falls on both; each line is the median of the rounds.
The CPU is that of both processes together, user and system, as the scheduler counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.benchmarks.procstat import scheduled_seconds
from tests.support.cluster import Cluster, Member, cluster
from tests.support.http import request
from tests.support.owned import name_of

LAYER = ["tests.support.owned.Owned"]
END = b"0\r\n\r\n"
MB = 1 << 20


def connections(member: Member, targets: Sequence[str], each: int, count: int, body: bytes | None = None) -> None:
    """`count` connections one after the other, with `each` requests on every one."""
    host, port = member.url.removeprefix("http://").split(":")
    asked = [request("POST", target, body=body or b"x") for target in targets]
    for number in range(count):
        with socket.create_connection((host, int(port))) as sock:
            for turn in range(each):
                sock.sendall(asked[(number + turn) % len(asked)])
                _read_reply(sock)


def _read_reply(sock: socket.socket) -> None:
    read = b""
    while not read.endswith(END):
        part = sock.recv(MB)
        if not part:
            raise ConnectionError("a reply was cut")
        read = (read + part)[-1024:]


def loads() -> dict[str, Callable[[Member, bool], int]]:
    """By its title each load: asks a process for what is its own, or for the other's; gives how many requests."""

    def names(member: Member, own: bool) -> str:
        return name_of(member.index if own else 1 - member.index, 2)

    def asking(
        each: int, count: int, query: str = "", body: bytes | None = None, clients: int = 1
    ) -> Callable[[Member, bool], int]:
        def ask(member: Member, own: bool) -> int:
            targets = [f"/owned/{names(member, own)}{query}"]
            with ThreadPoolExecutor(clients) as threads:
                asked = [threads.submit(connections, member, targets, each, count, body) for _ in range(clients)]
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
    }


def spent_by(made: Cluster) -> float:
    """Seconds of CPU of all processes."""
    return sum(scheduled_seconds(each.process.pid) for each in made.members)


async def measure(made: Cluster, rounds: int) -> None:
    """Print a line for each load."""
    member = made.members[0]
    print(f"{'':<34} {'own':>10} {'handed':>10} {'ratio':>7}   CPU us a request")
    for title, load in loads().items():
        spent: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):
            for own in (True, False) if number % 2 else (False, True):
                before = spent_by(made)
                done = await asyncio.to_thread(load, member, own)
                if number:  # the first one warms up
                    spent[own].append((spent_by(made) - before) / done * 1e6)
        own_us, handed_us = statistics.median(spent[True]), statistics.median(spent[False])
        print(f"{title:<34} {own_us:>10.1f} {handed_us:>10.1f} {handed_us / own_us:>7.2f}", flush=True)


async def _main(rounds: int) -> None:
    started = time.monotonic()
    async with cluster(
        2, middlewares=LAYER, processes=2
    ) as made:  # as processes of one router, though each has its port
        await measure(made, rounds)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(_main(parser.parse_args().rounds))
