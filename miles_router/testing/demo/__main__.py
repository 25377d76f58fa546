"""A demo of rollouts over two workers: `python -m miles_router.testing.demo`.

It starts a router and two workers as processes, registers the workers over HTTP, runs GRPO-style rollouts of two turns
through the router, retrieves the exact tokens of every rollout and prints a report. The exit status is 0 if every
sample is complete and exact and both workers served requests. With `--keep` rollouts go on until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from miles_router.testing.demo.cache import Exactness, Rollout, Turn, cache_lines, checkpoint, router_options
from miles_router.testing.demo.processes import POLL, DemoFleet, ProcessError, free_port

WORKERS = 2
TURNS = 2
PROMPT = "<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"
#: Seconds; the first start after an installation compiles a tokenizer library's modules.
ROUTER_PATIENCE = 60.0
#: Seconds until a worker must be registered; a real one loads a model first.
WORKER_PATIENCE = {"simulated": 20.0, "sglang": 300.0, "vllm": 600.0}
#: Placeholder for the worker's number in `--worker-command`.
NUMBER = "{number}"
BAR_WIDTH = 32
#: Seconds between progress lines if the output is not a terminal.
LINE_INTERVAL = 2.0
LISTENING = re.compile(r"^\s+listening\s+(http://\S+)$", re.MULTILINE)
SERVED = re.compile(r'^miles_router_requests_total\{route="generate",status="\d+",worker="(.+)"\} (\S+)$', re.MULTILINE)

T = TypeVar("T")


# Processes


async def start_router(fleet: DemoFleet, options: argparse.Namespace) -> str:
    """Start `miles-router` on a free port and return its URL once it answers."""
    command = [sys.executable, "-m", "miles_router", "--port", "0", *router_options(options.hf_checkpoint)]
    router = fleet.start("router", *command)

    async def listening() -> str | None:
        found = LISTENING.search(router.output)
        return found[1] if found and await answers(f"{found[1]}/health") else None

    return await router.until("listen", ROUTER_PATIENCE, listening)


async def start_workers(fleet: DemoFleet, options: argparse.Namespace, router: str) -> list[str]:
    """Start the workers in parallel and return their URLs once all are registered."""
    start = start_simulated_worker if options.worker == "simulated" else start_real_worker
    return await gather(*(start(fleet, options, router, number) for number in range(1, WORKERS + 1)))


async def start_simulated_worker(fleet: DemoFleet, options: argparse.Namespace, router: str, number: int) -> str:
    """Start `miles-router-worker`, which registers itself, and return its URL once the router lists it."""
    port = free_port()
    command = [sys.executable, "-m", "miles_router.testing.worker.cli", "--port", str(port), "--router", router]
    command += ["--tokenizer", options.hf_checkpoint] if options.hf_checkpoint else []
    worker = fleet.start(f"worker {number}", *command, "--token-latency-ms", str(options.token_latency_ms))
    url = f"http://127.0.0.1:{port}"

    async def registered() -> str | None:
        return url if url in (await get_json(f"{router}/list_workers"))["urls"] else None

    return await worker.until("register", WORKER_PATIENCE["simulated"], registered)


async def start_real_worker(fleet: DemoFleet, options: argparse.Namespace, router: str, number: int) -> str:
    """Start a real engine server, register it as a training launcher does, and return its URL."""
    port = free_port()
    command = shlex.split(options.worker_command.replace(NUMBER, str(number)))
    worker = fleet.start(f"worker {number}", *command, "--port", str(port))
    url = f"http://127.0.0.1:{port}"

    async def healthy() -> str | None:
        return url if await answers(f"{url}/health") else None

    await worker.until("become healthy", WORKER_PATIENCE[options.worker], healthy)
    async with session() as http, http.post(f"{router}/add_worker", params={"url": url}) as response:
        response.raise_for_status()
    return url


# HTTP


def session(connections: int = 1) -> aiohttp.ClientSession:
    """Return an HTTP client without a timeout, since a generation may take long."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections), timeout=aiohttp.ClientTimeout(total=None)
    )


async def answers(url: str) -> bool:
    """Return True if a GET is answered with 200 now."""
    try:
        async with session() as http, http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def get_json(url: str) -> Any:
    async with session() as http, http.get(url) as response:
        return await response.json()


async def gather(*work: Awaitable[T]) -> list[T]:
    """Return all results in order. If one fails, or the caller is cancelled, cancel the others and wait for them."""
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
    """The results of the rollouts so far."""

    wanted: int
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    tokens: int = 0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        return len(self.latencies) + len(self.failures)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at


async def rollouts(router: str, options: argparse.Namespace, tally: Tally) -> None:
    """Run rollouts as GRPO does: a group of samples for each prompt, with bounded concurrency."""
    prompts = [PROMPT.format(a=17 * number, b=23 + number) for number in range(1, options.prompts + 1)]
    free = asyncio.Semaphore(options.concurrency)
    async with session(options.concurrency) as http:

        async def one(prompt: str) -> None:
            async with free:
                await rollout(http, router, prompt, options.max_new_tokens, tally)

        await gather(*(one(prompt) for prompt in prompts for _ in range(options.samples)))


async def rollout(http: aiohttp.ClientSession, router: str, prompt: str, max_new_tokens: int, tally: Tally) -> None:
    """Run one sample of two turns: send text, receive text, tokens and logprobs. Record the result in `tally`."""
    sampling = {"temperature": 1.0, "max_new_tokens": max_new_tokens}
    started_at = time.monotonic()
    made = Rollout(prompt)
    for turn in range(TURNS):
        made.text += AGAIN if turn else ""
        asked = {"text": made.text, "sampling_params": sampling, "return_logprob": True}
        answer = await post(http, f"{router}/generate", asked)
        if isinstance(answer, str) or (problem := unusable(answer)):
            tally.failures.append(answer if isinstance(answer, str) else str(problem))
            return
        made.text += answer["text"]
        made.rid = answer["meta_info"]["id"]
        made.turns.append(Turn.of(answer))
        tally.tokens += len(answer["output_ids"])
    tally.latencies.append(time.monotonic() - started_at)
    tally.rollouts.append(made)


async def post(http: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> Any:
    """Return the answer's JSON object, or a string that describes the failure."""
    try:
        async with http.post(url, json=payload) as response:
            if response.status != 200:
                return f"status {response.status}: {(await response.text())[:200]}"
            return await response.json()
    except (aiohttp.ClientError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


async def retrieve(router: str, tally: Tally) -> Exactness:
    """Retrieve every rollout's tokens by its text, as a trainer does, and compare them with the workers' answers."""
    exactness = Exactness()
    async with session() as http:
        for made in tally.rollouts:
            asked = {"text": made.text, "rid": made.rid, "strict": True}
            retrieved = await post(http, f"{router}/retrieve_from_text", asked)
            if isinstance(retrieved, str):
                tally.failures.append(f"not retrieved: {retrieved}")
            else:
                exactness.take(made, retrieved)
    return exactness


def unusable(sample: dict[str, Any]) -> str | None:
    """Return why a trainer cannot use this sample, or None if it can."""
    meta, ids = sample["meta_info"], sample["output_ids"]
    if meta["finish_reason"]["type"] not in ("stop", "length"):
        return f"finished with {meta['finish_reason']}"
    if not ids or [token for _, token, _ in meta["output_token_logprobs"]] != ids:
        return "its logprobs do not belong to its tokens"
    return None


async def with_progress(work: Awaitable[None], tally: Tally) -> None:
    """Run `work` and show its progress: a line redrawn on a terminal, else a line every `LINE_INTERVAL` seconds."""
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
    """Return the progress line, such as `rollouts [######----] 40/64  2,512 tokens  1.2 s`."""
    filled = BAR_WIDTH * tally.done // tally.wanted
    failed = f"  {len(tally.failures)} failed" if tally.failures else ""
    counts = f"{tally.done}/{tally.wanted}  {tally.tokens:,} tokens  {tally.seconds:.1f} s{failed}"
    return f"  rollouts [{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {counts}"


# The report


async def requests_served(router: str, workers: Sequence[str]) -> dict[str, int]:
    """Return how many generations each worker answered, from the router's `GET /metrics`."""
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
    whole = len(tally.latencies)
    yield f"samples    {whole} of {tally.wanted} complete, in groups of {options.samples}, {TURNS} turns each"
    yield f"failures   {len(tally.failures)}"
    yield f"tokens     {tally.tokens:,} generated, {tally.tokens / seconds:,.0f} per second"
    if whole:
        yield "latency    " + ", ".join(f"{name} {value:.2f} s" for name, value in percentiles(tally.latencies).items())


def percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else list(values) * 19
    return {"p50": cuts[9], "p95": cuts[18], "max": max(values)}


def print_block(lines: Iterator[str]) -> None:
    shown = [f"  {line}" for line in lines]
    if shown:
        print("\n".join(shown) + "\n")


# The command


async def demo(options: argparse.Namespace, fleet: DemoFleet) -> int:
    """Run all steps in order and return the exit status."""
    wanted = options.prompts * options.samples
    print(f"{options.prompts} prompts x {options.samples} samples over {WORKERS} {options.worker} workers\n")
    router = await start_router(fleet, options)
    print(f"  router   {router}  (dashboard: {router}/dashboard)", flush=True)
    started_at = time.monotonic()
    workers = await start_workers(fleet, options, router)
    print("\n".join(f"  worker   {url}" for url in workers))
    print(f"  registered after {time.monotonic() - started_at:.1f} s\n", flush=True)

    tally = Tally(wanted)
    await with_progress(rollouts(router, options, tally), tally)
    seconds = tally.seconds
    served = await requests_served(router, workers)
    exactness = await retrieve(router, tally) if options.hf_checkpoint else None
    cache = cache_lines(exactness, await get_json(f"{router}/router/info"))
    for lines in (worker_lines(served), sample_lines(options, tally, seconds), cache):
        print_block(lines)
    status = verdict(tally, served, exactness)
    print_block(where_lines(router, keeps=options.keep))
    if options.keep:
        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C, which is how it ends
            await go_on(router, options)
    return status


def where_lines(router: str, *, keeps: bool) -> Iterator[str]:
    """Yield the lines with the URLs to look at."""
    if not keeps:
        yield "the demo ends now; make demo KEEP=1 stays up, with rollouts to look at:"
    yield f"dashboard  {router}/dashboard"
    yield f"metrics    {router}/metrics  (configs/grafana-dashboard.json shows them in Grafana)"
    yield f"state      {router}/router/info"
    yield "key        none is set: every program on this machine has access"
    if keeps:
        yield "rollouts go on until Ctrl-C"


async def go_on(router: str, options: argparse.Namespace) -> None:
    """Run rollouts forever and print their failures."""
    sys.stdout.flush()
    while True:
        tally = Tally(options.prompts * options.samples)
        await rollouts(router, options, tally)
        for reason in dict.fromkeys(tally.failures):
            print(f"  failed: {reason}", file=sys.stderr, flush=True)
        if tally.failures:
            await asyncio.sleep(LINE_INTERVAL)


def verdict(tally: Tally, served: dict[str, int], exactness: Exactness | None) -> int:
    """Print the problems to stderr and return the exit status: 0 without problems, else 1."""
    inexact = exactness.rollouts - exactness.exact if exactness is not None else 0
    problems = [f"failed: {reason}" for reason in dict.fromkeys(tally.failures)]
    problems += [f"{worker} served nothing" for worker, count in served.items() if not count]
    problems += [f"{inexact} rollouts are not what the workers sampled"] if inexact else []
    for problem in problems[:5]:
        print(f"  {problem}", file=sys.stderr)
    return 1 if problems else 0


async def interruptible(options: argparse.Namespace) -> int:
    """Run the demo and return the exit status. Ctrl-C and SIGTERM stop all processes first."""
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
        options.hf_checkpoint = checkpoint(options.hf_checkpoint, Path(logs))
        fleet = DemoFleet(Path(logs))
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
    add(
        "--worker-command",
        metavar="COMMAND",
        help="how a real worker is started, {number} its number; `--port N` is added",
    )
    add("--hf-checkpoint", metavar="DIR", help="the workers' tokenizer (default: a tiny one, made for the demo)")
    add("--prompts", type=_positive, default=8, help="groups (default: %(default)s)")
    add("--samples", type=_positive, default=8, help="samples of each prompt (default: %(default)s)")
    add("--max-new-tokens", type=_positive, default=64, help="longest sample (default: %(default)s)")
    add("--concurrency", type=_positive, default=16, help="requests at once (default: %(default)s)")
    add("--token-latency-ms", type=float, default=8.0, help="of simulated workers (default: %(default)s)")
    add("--keep", action="store_true", help="stay up with live traffic until Ctrl-C")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.worker == "sglang" and not (options.worker_command and options.hf_checkpoint):
        example = "--worker-command 'python -m sglang.launch_server ...'"
        parser.error(f"--worker sglang needs --worker-command and --hf-checkpoint, for example {example}")
    return asyncio.run(interruptible(options))


if __name__ == "__main__":
    sys.exit(main())
