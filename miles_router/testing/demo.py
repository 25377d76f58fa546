"""Rollouts over two workers, start to finish: `python -m miles_router.testing.demo`.

Starts a router and two workers as processes of their own, registers the workers over HTTP, runs a GRPO-style rollout
client against the router and prints what came of it. Exit status 0: every sample is whole and both workers served.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from miles_router.testing.fleet import POLL, Fleet, ProcessError, free_port

WORKERS = 2
PROMPT = "Question: what is {a} + {b}?\nAnswer:"
ROUTER_PATIENCE = 20.0
#: Seconds until a worker must be registered; a real one loads a model first.
WORKER_PATIENCE = {"simulated": 20.0, "sglang": 300.0}
BAR_WIDTH = 32
#: Seconds between progress lines where no terminal redraws one.
LINE_INTERVAL = 2.0
LISTENING = re.compile(r"^\s+listening\s+(http://\S+)$", re.MULTILINE)
SERVED = re.compile(r'^miles_router_requests_total\{route="generate",status="\d+",worker="(.+)"\} (\S+)$', re.MULTILINE)

T = TypeVar("T")


# Processes


async def start_router(fleet: Fleet) -> str:
    """Start `miles-router` on a free port; gives its URL once it answers."""
    router = fleet.start("router", sys.executable, "-m", "miles_router", "--port", "0")

    async def listening() -> str | None:
        found = LISTENING.search(router.output)
        return found[1] if found and await answers(f"{found[1]}/health") else None

    return await router.until("listen", ROUTER_PATIENCE, listening)


async def start_workers(fleet: Fleet, options: argparse.Namespace, router: str) -> list[str]:
    """Start the workers side by side; gives their URLs once the router lists all of them."""
    start = start_sglang_worker if options.worker == "sglang" else start_simulated_worker
    return await gather(*(start(fleet, options, router, f"worker {number}") for number in range(1, WORKERS + 1)))


async def start_simulated_worker(fleet: Fleet, options: argparse.Namespace, router: str, name: str) -> str:
    """Start `miles-router-worker`, which registers itself."""
    port = free_port()
    command = [sys.executable, "-m", "miles_router.testing.worker_cli", "--port", str(port), "--router", router]
    worker = fleet.start(name, *command, "--token-latency-ms", str(options.token_latency_ms))
    url = f"http://127.0.0.1:{port}"

    async def registered() -> str | None:
        return url if url in (await get_json(f"{router}/list_workers"))["urls"] else None

    return await worker.until("register", WORKER_PATIENCE["simulated"], registered)


async def start_sglang_worker(fleet: Fleet, options: argparse.Namespace, router: str, name: str) -> str:
    """Start a real SGLang server and register it, as its launcher does in training."""
    port = free_port()
    worker = fleet.start(name, *shlex.split(options.worker_command), "--port", str(port))
    url = f"http://127.0.0.1:{port}"

    async def healthy() -> str | None:
        return url if await answers(f"{url}/health") else None

    await worker.until("become healthy", WORKER_PATIENCE["sglang"], healthy)
    async with session() as http, http.post(f"{router}/add_worker", params={"url": url}) as response:
        response.raise_for_status()
    return url


# HTTP


def session(connections: int = 1) -> aiohttp.ClientSession:
    """A client without a time limit: a generation takes as long as it takes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections), timeout=aiohttp.ClientTimeout(total=None)
    )


async def answers(url: str) -> bool:
    """Whether a GET is answered with 200 now."""
    try:
        async with session() as http, http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def get_json(url: str) -> Any:
    async with session() as http, http.get(url) as response:
        return await response.json()


async def gather(*work: Awaitable[T]) -> list[T]:
    """All results; when one fails or we are cancelled, the others are cancelled first."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# Rollouts


@dataclass
class Tally:
    """What the rollouts came to, as far as they are."""

    wanted: int
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        return len(self.latencies) + len(self.failures)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at


async def rollouts(router: str, options: argparse.Namespace, tally: Tally) -> None:
    """GRPO's pattern: a group of samples for each prompt, a bounded number of requests at once."""
    prompts = [PROMPT.format(a=17 * number, b=23 + number) for number in range(1, options.prompts + 1)]
    free = asyncio.Semaphore(options.concurrency)
    async with session(options.concurrency) as http:

        async def one(prompt: str) -> None:
            async with free:
                await rollout(http, f"{router}/generate", prompt, options.max_new_tokens, tally)

        await gather(*(one(prompt) for prompt in prompts for _ in range(options.samples)))


async def rollout(http: aiohttp.ClientSession, url: str, prompt: str, max_new_tokens: int, tally: Tally) -> None:
    """One sample: prompt out, tokens and logprobs in."""
    sampling = {"temperature": 1.0, "max_new_tokens": max_new_tokens}
    started_at = time.monotonic()
    try:
        payload = {"text": prompt, "sampling_params": sampling, "return_logprob": True}
        async with http.post(url, json=payload) as response:
            if response.status != 200:
                tally.failures.append(f"status {response.status}: {(await response.text())[:200]}")
                return
            sample = await response.json()
    except (aiohttp.ClientError, ValueError) as error:
        tally.failures.append(f"{type(error).__name__}: {error}")
        return
    if problem := unusable(sample):
        tally.failures.append(problem)
        return
    tally.latencies.append(time.monotonic() - started_at)
    tally.tokens += len(sample["output_ids"])


def unusable(sample: dict[str, Any]) -> str | None:
    """Why a trainer could not take this sample, or None."""
    meta, ids = sample["meta_info"], sample["output_ids"]
    if meta["finish_reason"]["type"] not in ("stop", "length"):
        return f"finished with {meta['finish_reason']}"
    if not ids or [token for _, token, _ in meta["output_token_logprobs"]] != ids:
        return "its logprobs are not those of its tokens"
    return None


async def with_progress(work: Awaitable[None], tally: Tally) -> None:
    """Run `work` and show how far it is: one line redrawn on a terminal, else a line now and then."""
    redraws = sys.stdout.isatty()
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=POLL if redraws else LINE_INTERVAL)
            print(f"\r\033[K{bar(tally)}" if redraws else bar(tally), end="" if redraws else "\n", flush=True)
        await task
    finally:
        task.cancel()
        print("\n" if redraws else "")


def bar(tally: Tally) -> str:
    """`rollouts [######----] 40/64  2,512 tokens  1.2 s`."""
    filled = BAR_WIDTH * tally.done // tally.wanted
    failed = f"  {len(tally.failures)} failed" if tally.failures else ""
    counts = f"{tally.done}/{tally.wanted}  {tally.tokens:,} tokens  {tally.seconds:.1f} s{failed}"
    return f"  rollouts [{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {counts}"


# The report


async def requests_served(router: str, workers: Sequence[str]) -> dict[str, int]:
    """Generations that each worker answered, from `GET /metrics`."""
    async with session() as http, http.get(f"{router}/metrics") as response:
        text = await response.text()
    served = dict.fromkeys(workers, 0)
    for worker, count in SERVED.findall(text):
        served[worker] = served.get(worker, 0) + int(float(count))
    return served


def worker_lines(served: dict[str, int]) -> Iterator[str]:
    width, total = max(map(len, served)), sum(served.values()) or 1
    yield f"{'worker':<{width}}  requests  share"
    for worker, count in served.items():
        yield f"{worker:<{width}}  {count:>8}  {count / total:>5.0%}"


def sample_lines(options: argparse.Namespace, tally: Tally, seconds: float) -> Iterator[str]:
    yield f"samples   {len(tally.latencies)} whole of {tally.wanted}, in groups of {options.samples}"
    yield f"failures  {len(tally.failures)}"
    yield f"tokens    {tally.tokens:,} generated, {tally.tokens / seconds:,.0f} per second"
    if tally.latencies:
        yield "latency   " + ", ".join(f"{name} {value:.2f} s" for name, value in percentiles(tally.latencies).items())


def cache_lines() -> Iterator[str]:
    """What a prefix cache saved. Empty: this release has no radix-tree middleware, which will report here."""
    yield from ()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else list(values) * 19
    return {"p50": cuts[9], "p95": cuts[18], "max": max(values)}


def print_block(lines: Iterator[str]) -> None:
    shown = [f"  {line}" for line in lines]
    if shown:
        print("\n".join(shown) + "\n")


# The command


async def demo(options: argparse.Namespace, fleet: Fleet) -> int:
    """All of it, in order. Gives the exit status."""
    wanted = options.prompts * options.samples
    print(f"{options.prompts} prompts x {options.samples} samples over {WORKERS} {options.worker} workers\n")
    router = await start_router(fleet)
    print(f"  router   {router}  (dashboard: {router}/dashboard)", flush=True)
    started_at = time.monotonic()
    workers = await start_workers(fleet, options, router)
    print("\n".join(f"  worker   {url}" for url in workers))
    print(f"  registered after {time.monotonic() - started_at:.1f} s\n", flush=True)

    tally = Tally(wanted)
    await with_progress(rollouts(router, options, tally), tally)
    seconds = tally.seconds
    served = await requests_served(router, workers)
    for lines in (worker_lines(served), sample_lines(options, tally, seconds), cache_lines()):
        print_block(lines)
    return verdict(tally, served)


def verdict(tally: Tally, served: dict[str, int]) -> int:
    """Say whether all is well; the exit status."""
    problems = [f"failed: {reason}" for reason in dict.fromkeys(tally.failures)]
    problems += [f"{worker} served nothing" for worker, count in served.items() if not count]
    for problem in problems[:5]:
        print(f"  {problem}", file=sys.stderr)
    return 1 if problems else 0


async def interruptible(options: argparse.Namespace) -> int:
    """Run the demo; Ctrl-C and SIGTERM end it in good order."""
    task = asyncio.ensure_future(_with_fleet(options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        print("\nstopped", file=sys.stderr)
        return 130
    except ProcessError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


async def _with_fleet(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="miles-router-demo-") as logs:
        fleet = Fleet(Path(logs))
        try:
            return await demo(options, fleet)
        finally:
            fleet.stop()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles_router.testing.demo", description="GRPO-style rollouts through a router and two workers."
    )
    add = parser.add_argument
    add("--worker", choices=list(WORKER_PATIENCE), default="simulated", help="kind of worker (default: %(default)s)")
    add("--worker-command", metavar="COMMAND", help="how a SGLang worker is started; `--port N` is added to it")
    add("--prompts", type=_positive, default=8, help="groups (default: %(default)s)")
    add("--samples", type=_positive, default=8, help="samples of each prompt (default: %(default)s)")
    add("--max-new-tokens", type=_positive, default=64, help="longest sample (default: %(default)s)")
    add("--concurrency", type=_positive, default=16, help="requests at once (default: %(default)s)")
    add("--token-latency-ms", type=float, default=8.0, help="of simulated workers (default: %(default)s)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.worker == "sglang" and not options.worker_command:
        parser.error("--worker sglang needs --worker-command, for example 'python -m sglang.launch_server ...'")
    return asyncio.run(interruptible(options))


if __name__ == "__main__":
    sys.exit(main())
