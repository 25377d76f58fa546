"""What a middleware layer costs: ten no-op ASGI layers around a trivial app, timed in-process against the bare app.

    python tests/benchmarks/layers.py [--layers 10] [--repeat 15]

Over HTTP a few microseconds drown in the noise of a hundred; here nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.benchmarks.noop import NoOp

CALLS = 20_000
SCOPE: Scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def receive() -> Message:
    return {"type": "http.disconnect"}


async def send(message: Message) -> None:
    return None


def stack(layers: int) -> ASGIApp:
    app: ASGIApp = inner
    for _ in range(layers):
        app = NoOp(app, router=None)
    return app


async def microseconds(app: ASGIApp) -> float:
    """Mean time of one call; nothing in it suspends, so the event loop adds nothing."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        await app(SCOPE, receive, send)
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    layered = stack(options.layers)
    pairs = [(asyncio.run(microseconds(inner)), asyncio.run(microseconds(layered))) for _ in range(options.repeat)]
    bare, full = (median(times) for times in zip(*pairs, strict=True))
    cost = median(with_layers - without for without, with_layers in pairs)
    print(f"bare app {bare:.2f} us, with {options.layers} no-op layers {full:.2f} us")
    print(f"{options.layers} layers cost {cost:.2f} us, one costs {cost / max(options.layers, 1):.3f} us per request")


if __name__ == "__main__":
    main()
