"""What keeping routed experts costs: RoutedExpertsMiddleware beside plain passthrough and beside re-encoding the JSON.

    python tests/benchmarks/routed_experts.py [--tokens 32768] [--layers 60] [--top-k 8] [--experts 256] [--quick]

One worker (nginx, a fixed answer) in front of which each router is asked the same `/generate`, several rollouts at a
time, with the byte budget full. CPU is the router's own, per answer; memory is what its peak rose by, per rollout at a
time. Routers take turns, medians are shown. Needs nginx; uses 127.0.0.1 alone.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from tests.benchmarks.backend import answering
from tests.benchmarks.peers import running_router
from tests.benchmarks.process import HOST, fetch
from tests.benchmarks.procstat import cpu_seconds, peak_rss_mb
from tests.benchmarks.report import environment

EXPERTS = "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware"
REENCODE = "tests.benchmarks.reencode.ReEncode"
MB = 1e6


@dataclass(frozen=True)
class Peer:
    """A router, and what its client asks for."""

    name: str
    middlewares: tuple[str, ...]
    asks: bool = True  # the client wants the field itself


PEERS = (
    Peer("passthrough", ()),
    Peer("R3", (EXPERTS,), asks=False),
    Peer("R3, client asks too", (EXPERTS,)),
    Peer("decode and re-encode", (REENCODE,)),
)


@dataclass(frozen=True)
class Answer:
    """The worker's answer, and what of it a client that did not ask for the field should see."""

    body: bytes
    stripped: bytes
    rows: int
    int32_bytes: int


def make_answer(options: argparse.Namespace) -> Answer:
    """A rollout of `tokens` tokens, a quarter of them sampled, with logprobs."""
    rng = np.random.default_rng(0)
    rows = options.tokens - 1
    shape = (rows, options.layers, options.top_k)
    offset = rng.integers(0, options.experts, size=shape[:2], dtype=np.int32)[:, :, None]
    ids = (offset + np.arange(options.top_k, dtype=np.int32)) % options.experts
    sampled = options.tokens // 4
    output = rng.integers(0, 150_000, size=sampled).tolist()
    logprobs = [[-float(value), token, None] for value, token in zip(rng.random(sampled), output, strict=True)]
    meta = {
        "id": "bench",
        "finish_reason": {"type": "length", "length": sampled},
        "prompt_tokens": options.tokens - sampled,
        "completion_tokens": sampled,
        "output_token_logprobs": logprobs,
    }
    document = {"text": "", "output_ids": output, "meta_info": meta}
    stripped = orjson.dumps(document)  # numbers are spelled as the peer spells them that writes them again
    field = b',"routed_experts":"' + base64.b64encode(ids.tobytes()) + b'"'
    return Answer(stripped[:-2] + field + b"}}", stripped, rows, ids.nbytes)


@contextlib.contextmanager
def running(peer: Peer, worker: int, budget: int, log: Path) -> Iterator[tuple[int, int]]:
    """The router's port and process id."""
    arguments = ["--middleware-paths", *peer.middlewares] if peer.middlewares else []
    if EXPERTS in peer.middlewares:
        arguments += ["--set", f"routed_experts_middleware.max_bytes={budget}"]
    with running_router(worker, log, *arguments) as found:
        yield found


def ask(port: int, peer: Peer) -> str:
    """One rollout; the digest of what the client got."""
    body: dict[str, object] = {"input_ids": [1], "sampling_params": {}}
    if peer.asks:
        body["return_routed_experts"] = True
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    digest, block = sha256(), bytearray(1 << 20)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        while (size := reply.readinto(block)) > 0:
            digest.update(memoryview(block)[:size])
    finally:
        connection.close()
    return digest.hexdigest()


@dataclass
class Sample:
    """One round of one router."""

    cpu_ms: float  # of an answer
    rate: float  # answers a second
    peak_mb: float  # for each rollout at a time
    held: float | None  # bytes held of an answer, of its int32


def measure(peer: Peer, answer: Answer, worker: int, options: argparse.Namespace, root: Path) -> Sample:
    expected = sha256(answer.body if peer.asks else answer.stripped).hexdigest()
    budget = options.concurrent * answer.int32_bytes
    with (
        running(peer, worker, budget, root / "router.log") as (port, pid),
        ThreadPoolExecutor(options.concurrent) as clients,
    ):
        before = peak_rss_mb(pid)
        got = list(clients.map(lambda _: ask(port, peer), range(options.concurrent)))
        peak = (peak_rss_mb(pid) - before) / options.concurrent
        # A router that has run for a while has its memory: what it holds next takes the place of what has gone.
        got += clients.map(lambda _: ask(port, peer), range(4 * options.concurrent))
        cpu, begin = cpu_seconds(pid), time.perf_counter()
        got += clients.map(lambda _: ask(port, peer), range(options.answers))
        spent, took = cpu_seconds(pid) - cpu, time.perf_counter() - begin
        if any(digest != expected for digest in got):
            raise SystemExit(f"{peer.name}: a client got something else than the worker's answer")
        held = None
        if EXPERTS in peer.middlewares:
            facts = json.loads(fetch(port, "GET", "/router/info")[1])["statistics"]["routed_experts"]
            held = facts["bytes"] / facts["generations"] / answer.int32_bytes
    return Sample(spent / options.answers * 1000, options.answers / took, peak, held)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--concurrent", type=int, default=4, help="rollouts at a time")
    parser.add_argument("--answers", type=int, default=24, help="measured answers of one round")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, of which the median is reported")
    parser.add_argument("--quick", action="store_true", help="one small round: a smoke test, not a measurement")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.answers, options.repeat = 2048, 4, 1
    return options


def main() -> int:
    options = arguments()
    if shutil.which("nginx") is None:
        print("not installed: nginx", file=sys.stderr)
        return 2
    answer = make_answer(options)
    rounds: dict[str, list[Sample]] = {peer.name: [] for peer in PEERS}
    with tempfile.TemporaryDirectory(prefix="routed-experts-") as folder:
        root = Path(folder)
        with answering(root, {"/generate": answer.body}) as worker:
            for turn in range(options.repeat):
                for peer in PEERS[turn % len(PEERS) :] + PEERS[: turn % len(PEERS)]:
                    sample = measure(peer, answer, worker, options, root)
                    rounds[peer.name].append(sample)
                    print(f"[{turn + 1}/{options.repeat}] {peer.name}: {sample}", file=sys.stderr, flush=True)
    report(rounds, answer, options)
    return 0


def report(rounds: dict[str, list[Sample]], answer: Answer, options: argparse.Namespace) -> None:
    shape = f"{options.tokens} tokens x {options.layers} layers x top-{options.top_k} of {options.experts}"
    sizes = f"{answer.int32_bytes / MB:.1f} MB of int32, {len(answer.body) / MB:.1f} MB of JSON"
    print(f"{shape}: {sizes}; {options.concurrent} rollouts at a time, median of {options.repeat}")
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    base = median(sample.cpu_ms for sample in rounds["passthrough"])
    print(f"{'':24}{'CPU/answer':>12}{'ratio':>8}{'answers/s':>11}{'peak/rollout':>14}{'held':>8}")
    for name, samples in rounds.items():
        cpu, rate, peak = (median(getattr(each, of) for each in samples) for of in ("cpu_ms", "rate", "peak_mb"))
        held = f"{100 * samples[0].held:.1f} %" if samples[0].held is not None else ""
        print(f"{name:24}{cpu:9.1f} ms{cpu / base:8.2f}{rate:11.1f}{peak:11.1f} MB{held:>8}")


if __name__ == "__main__":
    sys.exit(main())
