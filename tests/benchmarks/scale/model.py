"""What measured costs make beyond the machine that they were measured on. Only arithmetic: no I/O.

A process is one server with a queue of its own: a session belongs to one process, a connection to the one that took it.
So N processes are N queues (M/G/1), and not one queue with N servers. Agents that come at random are not spread evenly:
the busiest process has more than the mean, by some standard deviations of a random deal, and by slots where their
number is not divided by that of the processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_router.slots import SLOTS

#: How busy the busiest process may be: beyond it turns wait longer for each other than they take.
BUSY = 0.6
#: A machine for the router: cores, bytes of memory that sessions may have, and bytes a second of its network, each way.
CORES, MEMORY, NETWORK = 32, 256e9, 12.5e9


@dataclass(frozen=True)
class Costs:
    """Measured: seconds of CPU, bytes."""

    request: float  # a small request that is passed through
    turn: float  # a traced turn
    store: float  # what `--state-dir` adds to it
    row_byte: float  # seconds for a byte of an answer with routed experts, as it comes from the worker
    disk_token: float  # bytes written for a token
    idle: float  # bytes of a session with one short turn
    held_token: float  # bytes of memory for a token of a session


@dataclass(frozen=True)
class Rollout:
    """Assumed: how agents go about."""

    seconds: float = 20.0  # from one turn of an agent to its next: generation and tools
    new_tokens: int = 500  # given or sampled in a turn
    held_tokens: int = 16_000  # of a session, on the average over its life
    turn_bytes: float = 100e3  # that a turn's request has: the whole history, and its answer
    row_bytes: float = 60 * 8 * 4 * 4 / 3  # of a token, base64: 60 layers, 8 experts, int32


@dataclass(frozen=True)
class Need:
    """What so many agents need."""

    turns: float  # a second
    cores: float
    processes: int
    wait: float  # seconds that a turn waits for the process on the average
    memory: float
    network: float  # bytes a second, each way
    disk: float  # bytes written a second
    machines: int
    first: str  # what is used most of what such a machine has; "slots" where no number of processes is enough


def busiest(processes: int, agents: float) -> float:
    """The load of the busiest process by the mean, where agents are dealt at random (the expected largest of so many
    Poisson counts, to first order) and slots by number."""
    if processes == 1:
        return 1.0
    uneven = math.ceil(SLOTS / processes) * processes / SLOTS
    return max(uneven, 1 + math.sqrt(2 * math.log(processes) * processes / agents))


def wait(service: float, busy: float) -> float:
    """Mean wait in a queue whose service times spread as their mean (Pollaczek-Khinchine, M/M/1)."""
    return math.inf if busy >= 1 else service * busy / (1 - busy)


def needed(agents: int, costs: Costs, rollout: Rollout, *, rows: bool, state: bool) -> Need:
    """For so many agents at a time."""
    turns = agents / rollout.seconds
    row_bytes = rollout.new_tokens * rollout.row_bytes if rows else 0.0
    service = costs.turn + (costs.store if state else 0.0) + row_bytes * costs.row_byte
    cores = turns * service
    processes = 1
    while cores / processes * busiest(processes, agents) > BUSY and processes < SLOTS:
        processes += 1
    memory = agents * (costs.idle + rollout.held_tokens * costs.held_token)
    network = turns * (rollout.turn_bytes + row_bytes)
    shares = {"cores": processes / CORES, "memory": memory / MEMORY, "network": network / NETWORK}
    machines = max(1, math.ceil(max(shares.values())))
    disk = turns * rollout.new_tokens * costs.disk_token if state else 0.0
    busy = cores / processes * busiest(processes, agents)
    first = "slots" if busy > BUSY else max(shares, key=lambda name: shares[name])
    return Need(turns, cores, processes, wait(service, busy), memory, network, disk, machines, first)


def bound(processes: int, cores: int, router: float, harness: float) -> float:
    """Requests a second that this machine can at most show, with clients and workers on the same cores."""
    return min(processes / router, cores / (router + harness))
