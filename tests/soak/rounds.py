"""A soak: load, then silence, then a look; round after round."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.soak.clients import KINDS, Clients, work
from tests.soak.oracle import Oracle
from tests.soak.probe import PATH
from tests.soak.processes import MAX_ROW_BYTES, MAX_TOKENS, Fleet, fleet
from tests.soak.trouble import Trouble
from tests.soak.verdict import MIB, Look, broken_rules
from tests.support.http import ask
from tests.support.waiting import PATIENCE

WORKERS = 3


@dataclass
class Outcome:
    """What a soak came to."""

    looks: list[Look] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


async def soak(
    seconds: float, round_seconds: float, *, seed: int, leak_bytes: int = 0, say: Callable[[str], None] = print
) -> Outcome:
    outcome, oracle = Outcome(), Oracle()
    async with fleet(WORKERS, leak_bytes=leak_bytes) as made:
        start, number = time.monotonic(), 0
        trouble = Trouble(made, random.Random(f"{seed}/trouble"))
        await trouble.update()
        while time.monotonic() - start < seconds and not outcome.broken:
            number += 1
            clients = Clients(made.router.url, oracle, random.Random(f"{seed}/{number}"), outcome.counts, f"{number}-")
            try:
                await _round(clients, trouble, round_seconds)
                look = await silence(made, start)
            except AssertionError as error:
                outcome.broken.append(f"round {number}: {error!r}"[:3000])
                break
            outcome.looks.append(look)
            say(_line(look, outcome, oracle))
        outcome.counts.update(trouble.counts)
        outcome.counts["positions compared"], outcome.counts["rows compared"] = oracle.positions, oracle.rows
        outcome.broken += broken_rules(outcome.looks, max_tokens=MAX_TOKENS, max_row_bytes=MAX_ROW_BYTES)
    return outcome


async def _round(clients: Clients, trouble: Trouble, seconds: float) -> None:
    """Load for so long, and until all that was begun is done. The first that fails ends it."""
    end = asyncio.get_running_loop().time() + seconds
    async with clients:
        tasks = [asyncio.ensure_future(work(clients, kind, end)) for kind, count in KINDS.items() for _ in range(count)]
        tasks.append(asyncio.ensure_future(trouble.make(end)))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def silence(made: Fleet, start: float) -> Look:
    """A look once nothing is in flight any more.

    Raises:
        AssertionError: something stays in flight.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        look = await _look(made, start)
        if not look.in_flight and not look.held:
            return look
        assert time.monotonic() < deadline, f"nobody asks, and this stays: {look}"
        await asyncio.sleep(0.1)


async def _look(made: Fleet, start: float) -> Look:
    url = made.router.url
    probe = (await ask(url, "GET", PATH)).json()
    info: Any = json.loads((await ask(url, "GET", "/router/info")).body)
    numbers, process = info["statistics"], psutil.Process(made.router.process.pid)
    return Look(
        seconds=time.monotonic() - start,
        rss=made.router.memory,
        descriptors=process.num_fds(),
        tasks=probe["tasks"],
        in_flight=sum(worker["in_flight"] for worker in info["workers"]),
        held=info["gate"]["held"],
        sessions=numbers["openai_sessions"]["sessions"],
        texts=numbers["radix_tree"]["entries"],
        tokens=numbers["radix_tree"]["tokens"],
        row_bytes=numbers["routed_experts"]["bytes"],
    )


def _line(look: Look, outcome: Outcome, oracle: Oracle) -> str:
    answers = sum(outcome.counts[name] for name in ("streams", "whole answers", "turns", "answers with rows"))
    return (
        f"{look.seconds:6.0f} s  {look.rss / MIB:6.1f} MiB  {look.descriptors:3} fds  {look.tasks:3} tasks  "
        f"{look.sessions} sessions  {look.texts:5} texts  {answers} answers, {oracle.positions} positions exact"
    )
