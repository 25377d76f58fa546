"""What a stamp costs on a request that one machine forwards to another: CPU to make and to read it, timed in-process.

python -m tests.benchmarks.stamps [--processes 8] [--repeat 15]

Reading is all that the other machine does with it: the stamp and its body are checked, and it is looked for among what
the processes of that machine have taken before.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from miles_router.asgi.exchange import Scope
from miles_router.cluster.nodes.machines import HEADER
from miles_router.cluster.nodes.seen import Seen
from miles_router.cluster.nodes.stamps import FORWARD, Address, Stamps, checked
from miles_router.cluster.peers import Peers

STAMPS = 300
#: Of a turn: some that a client sends, and those that the router adds.
HEADERS = [
    (b"authorization", b"Bearer " + b"k" * 40),
    (b"content-type", b"application/json"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"user-agent", b"OpenAI/Python 2.0.0"),
    (b"x-request-id", b"mr-0123456789abcdef-12"),
]
TARGET = b"/sessions/0123456789abcdef0123456789abcdef/v1/chat/completions"
SIZES = {"1 kB": 1 << 10, "100 kB": 100 << 10, "1 MB": 1 << 20}


def machines(processes: int, directory: Path) -> tuple[Stamps, Stamps]:
    """A process of one machine, and one of another."""
    made = []
    for node in range(2):
        place = directory / str(node)
        place.mkdir()
        seen = [Seen(Peers(index, processes, place)) for index in range(processes)]
        made.append(Stamps("secret", Address(node, f"life-{node}"), "life-{}".format, lambda: 1, seen[0]))
    return made[0], made[1]


def timed(work: Callable[[], None]) -> float:
    """Its seconds of CPU."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


async def costs(one: Stamps, other: Stamps, body: bytes) -> tuple[float, float]:
    """Microseconds to make one, and to read it."""
    made: list[bytes] = []
    making = timed(lambda: made.extend(one.made(FORWARD, 1, "POST", TARGET, HEADERS, body) for _ in range(STAMPS)))

    async def receive() -> Scope:
        return {"type": "http.request", "body": body, "more_body": False}

    begin = time.thread_time()
    for stamp in made:
        scope = {"method": "POST", "raw_path": TARGET, "query_string": b"", "headers": [*HEADERS, (HEADER, stamp)]}
        await checked(receive, other.read(stamp, scope)[1])()
    return making / STAMPS * 1e6, (time.thread_time() - begin) / STAMPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        one, other = machines(options.processes, Path(place))
        for name, size in SIZES.items():
            body = bytes(size)
            times = [asyncio.run(costs(one, other, body)) for _ in range(options.repeat)]
            making, reading = (min(each) for each in zip(*times, strict=True))
            print(f"a body of {name:6}  made in {making:7.1f} us, read in {reading:7.1f} us")


if __name__ == "__main__":
    main()
