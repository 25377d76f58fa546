"""The loads, and one measurement: a bounded run against one peer, its answers checked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.backend import REPLIES
from tests.benchmarks.peers import Running
from tests.benchmarks.process import HOST, PeerError, fetch
from tests.benchmarks.procstat import cpu_seconds, machine_busy_seconds, own_seconds, peak_rss_mb
from tests.benchmarks.sse_backend import EVENT
from tests.benchmarks.sse_client import run_streams

BODY_BYTES = 1024

WRK_SCRIPT = """
wrk.method = "POST"
wrk.path = "/generate"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[%s]==]
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    'RESULT {"requests": %%d, "seconds": %%.6f, "bytes": %%d, "p50_ms": %%.4f, "p99_ms": %%.4f, "bad": %%d}\\n',
    summary.requests, summary.duration / 1e6, summary.bytes, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class Load:
    """`connections` clients that ask for one kind of reply, each as soon as it has its last one."""

    name: str
    title: str
    connections: int
    reply: str
    unit: str = "requests"


LOADS = {
    load.name: load
    for load in (
        Load("small-1", "1 kB request, 133 B reply, 1 connection", 1, "small"),
        Load("small-64", "1 kB request, 133 B reply, 64 connections", 64, "small"),
        Load("small-512", "1 kB request, 133 B reply, 512 connections", 512, "small"),
        Load("medium-64", "1 kB request, 25 kB reply, 64 connections", 64, "medium"),
        Load("large-4", "1 kB request, 16 MiB reply, 4 connections", 4, "large"),
        Load("sse-256", "256 SSE streams, a 200 B event every 20 ms each", 256, "sse", "events"),
    )
}


@dataclass(frozen=True)
class Sample:
    """What one run measured; for streams a request is an event and a latency the gap between two of them."""

    rate: float = 0.0
    mb_per_s: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    cpu_us: float | None = None
    cores: float | None = None
    rss_mb: float | None = None
    others: float = 0.0  # cores taken by what is no part of the benchmark: over 0.1 the rates mean little
    bad: int = 0
    failure: str | None = None


def request_body(stream: bool) -> bytes:
    document = {"text": "", "sampling_params": {"max_new_tokens": 8, "temperature": 1.0}, "stream": stream}
    document["text"] = "A" * (BODY_BYTES - len(json.dumps(document)))
    return json.dumps(document).encode()


def check_answer(port: int, load: Load) -> None:
    """One request outside the measured time: an answer must be what the worker sent, byte for byte."""
    expected = EVENT * 3 if load.reply == "sse" else REPLIES[load.reply]
    limit = len(expected) if load.reply == "sse" else None
    status, answer = fetch(port, "POST", "/generate", request_body(load.reply == "sse"), limit)
    if status != 200:
        raise PeerError(f"status {status}: {answer[:120]!r}")
    if len(answer) != len(expected):
        raise PeerError(f"{len(answer)} bytes of {len(expected)}")
    if answer != expected:
        raise PeerError("the answer's bytes were changed")


class Meter:
    """CPU time of a peer, and of everything that is no part of the benchmark, between two calls of `edge`."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self.peer: list[float] = []
        self.others: list[float] = []

    def edge(self) -> None:
        self.others.append(machine_busy_seconds() - own_seconds())
        self.peer.append(cpu_seconds(self.pid) if self.pid is not None else 0.0)

    def apply(self, sample: Sample, seconds: float, done: int) -> Sample:
        sample = replace(sample, others=max(0.0, self.others[-1] - self.others[0]) / seconds)
        if self.pid is None:
            return sample
        spent = self.peer[-1] - self.peer[0]
        return replace(sample, cpu_us=spent / max(done, 1) * 1e6, cores=spent / seconds, rss_mb=peak_rss_mb(self.pid))


def wrk(port: int, load: Load, seconds: float, script: Path) -> dict[str, float]:
    command = [
        "wrk", "-t1", f"-c{load.connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s",
        "-s", str(script), f"http://{HOST}:{port}",
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True).stdout
    _, found, figures = output.partition("RESULT ")
    if not found:
        raise PeerError(f"wrk gave no result: {output[-200:]}")
    result: dict[str, float] = json.loads(figures)
    return result


def measure_requests(running: Running, load: Load, seconds: float, warmup: float, root: Path) -> Sample:
    script = root / "load.lua"
    script.write_text(WRK_SCRIPT % request_body(False).decode())
    wrk(running.port, load, warmup, script)
    meter = Meter(running.pid)
    meter.edge()
    result = wrk(running.port, load, seconds, script)
    meter.edge()
    done, elapsed = int(result["requests"]), result["seconds"]
    failure = f"{result['bad']:.0f} failed requests" if result["bad"] else None
    if result["bytes"] < done * len(REPLIES[load.reply]):
        failure = "answers shorter than the worker's"
    sample = Sample(
        done / elapsed, result["bytes"] / elapsed / 1e6, result["p50_ms"], result["p99_ms"],
        bad=int(result["bad"]), failure=failure if done else "no request succeeded",
    )  # fmt: skip
    return meter.apply(sample, elapsed, done)


def measure_streams(running: Running, load: Load, seconds: float, warmup: float, root: Path) -> Sample:
    body = request_body(True)
    request = (
        b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    meter = Meter(running.pid)
    result = run_streams(running.port, request, load.connections, warmup, seconds, meter.edge)
    gaps = result.gaps_ms or [0.0]
    rate = result.events / result.seconds
    failure = f"{result.bad} failed streams" if result.bad else None
    sample = Sample(
        rate, rate * len(EVENT) / 1e6, gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)],
        bad=result.bad, failure=failure if result.events else "no event came",
    )  # fmt: skip
    return meter.apply(sample, result.seconds, result.events)


def measure(running: Running, load: Load, seconds: float, warmup: float, root: Path) -> Sample:
    """One checked run: the answer is compared before and after it."""
    run: Callable[[Running, Load, float, float, Path], Sample]
    run = measure_streams if load.reply == "sse" else measure_requests
    try:
        check_answer(running.port, load)
        sample = run(running, load, seconds, warmup, root)
        check_answer(running.port, load)
    except (OSError, PeerError, subprocess.SubprocessError) as error:
        return Sample(failure=f"{type(error).__name__}: {error}")
    return sample
