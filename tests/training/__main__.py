"""`python -m tests.training`, which is `make train`: a router, two real workers and a trainer, start to finish.

Exit status 0: the run met the thresholds of `measures`; 1: it did not, or something that it needs failed; 2: a bad
option; 130: Ctrl-C. Whatever it started has ended then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from miles_router.client import RouterClient
from miles_router.tasks import spawn
from miles_router.testing.demo.processes import DemoFleet, ProcessError
from tests.sglang import environment
from tests.sglang_worker import RealWorker, real_workers
from tests.training import measures, picture
from tests.training.tasks import TASKS
from tests.vllm import environment as vllm_environment
from tests.vllm_worker import RealVLLM, vllm_workers

Worker: TypeAlias = RealWorker | RealVLLM

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2
#: Of each engine: float32, so that trainer and engine compute alike.
SGLANG = ("--dtype", "float32", "--context-length", "2048", "--max-total-tokens", "16384", "--max-running-requests")
VLLM = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs")
LISTENING = re.compile(r"^\s+listening\s+(http://\S+)$", re.MULTILINE)
ROUTER_PATIENCE = 60.0
BAR = 20
#: Bytes on disk that an installation from nothing takes.
ROOM = 4 << 30
#: Bytes of a line that the trainer says.
LINE = 1 << 20


class Failed(Exception):
    """Something that the run needs does not work; the message is one line."""


@dataclass
class Progress:
    """What the trainer has said so far."""

    steps: list[measures.Step]
    examined: dict[str, Mapping[str, Any]]

    @property
    def run(self) -> measures.Run:
        """The run, once its last line has come."""
        return measures.Run(self.examined["before"]["reward"], self.examined["after"]["reward"], self.steps)


async def train(options: argparse.Namespace, fleet: DemoFleet) -> int:
    """Run all of it; return the exit status."""
    model = await asyncio.to_thread(built, options.engine)
    out: Path = options.out
    router = await start_router(fleet, options, model)
    print(f"dashboard  {router}/dashboard", flush=True)
    began = time.monotonic()
    with started(options, model) as workers, tempfile.TemporaryDirectory() as scratch:
        async with RouterClient(router) as client:
            for worker in workers:
                await client.add_worker(worker.url)
        print(f"workers    {', '.join(each.url for each in workers)}  ({time.monotonic() - began:.0f} s)\n", flush=True)
        progress = await follow(options, router, model, Path(scratch), workers)
        samples = shutil.move(Path(scratch) / "samples.safetensors", out / "samples.safetensors")
    print(f"\n{time.monotonic() - began:.0f} s in all\n")
    return report(options, progress, model, Path(samples))


def started(options: argparse.Namespace, model: Path) -> AbstractContextManager[Sequence[Worker]]:
    """Start the workers, which all a step's requests and those of the next may reach."""
    most = str(max(64, 2 * options.prompts * options.group))
    if options.engine == "vllm":
        return vllm_workers(WORKERS, *VLLM, most, checkpoint=model)
    return real_workers(WORKERS, *SGLANG, most, model=model)


def built(engine: str = "sglang") -> Path:
    """Build what is absent: SGLang's environment, which the trainer runs in, the engine's, and the model.

    Raises:
        Failed: it cannot be built.
    """
    cache = environment.cache_root()
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("model-trained-*")) and shutil.disk_usage(cache).free < ROOM:
        raise Failed(
            f"{cache} has less than {ROOM >> 30} GB free; free some, or set MILES_ROUTER_CACHE to another disk"
        )
    try:
        environment.venv()
        if engine == "vllm":
            vllm_environment.venv()
        return environment.trained_model()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise Failed(f"the engine or the model could not be installed: {first_line(error)}") from error


async def start_router(fleet: DemoFleet, options: argparse.Namespace, model: Path) -> str:
    """Start the router; return its URL once it listens.

    Raises:
        ProcessError: it did not.
    """
    command = [sys.executable, "-m", "miles_router", "--config", str(ROOT / TASKS[options.task].config)]
    command += ["--hf-checkpoint", str(model), "--partial-rollout", "resume", "--port", str(options.port)]
    router = fleet.start("router", *command)

    async def listening() -> str | None:
        found = LISTENING.search(router.output)
        return found[1] if found else None

    return await router.until("listen", ROUTER_PATIENCE, listening)


async def follow(
    options: argparse.Namespace, router: str, model: Path, scratch: Path, workers: Sequence[Worker]
) -> Progress:
    """Run the trainer, show each step, and return what it said.

    Raises:
        Failed: the trainer or a worker ended too early.
    """
    given = {"router": router, "model": model, "scratch": scratch, "task": options.task, "tokens": options.tokens}
    given |= {"update": options.update, "steps": options.steps, "prompts": options.prompts, "group": options.group}
    given |= {"examined": options.examined, "seed": options.seed, "engine": options.engine}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    log = options.out / "trainer.log"
    with log.open("wb") as errors:
        trainer = await asyncio.create_subprocess_exec(
            str(environment.venv()),
            *("-m", "tests.training.trainer", *flags),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            limit=LINE,
        )
        watching = spawn(lost(workers), name="workers")
        reading = spawn(read(trainer, options), name="the trainer")
        try:
            await asyncio.wait({watching, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise Failed(f"worker {watching.result().url} died; its log: {watching.result().log_path}")
            progress: Progress = reading.result()
            if await trainer.wait() or "after" not in progress.examined:
                raise Failed(f"the trainer ended with status {trainer.returncode}: {last_line(log)} (log: {log})")
            return progress
        finally:
            for task in (watching, reading):
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)
            await trainer.wait()


async def lost(workers: Sequence[Worker]) -> Worker:
    """Return the first worker whose process has ended."""
    while True:
        for worker in workers:
            if not worker.alive:
                return worker
        await asyncio.sleep(1)


async def read(trainer: asyncio.subprocess.Process, options: argparse.Namespace) -> Progress:
    """Read the trainer's lines until its output ends, and show them."""
    progress = Progress([], {})
    assert trainer.stdout is not None
    async for line in trainer.stdout:
        said = orjson.loads(line)
        event = said.pop("event")
        if event == "examined":
            progress.examined[said["when"]] = said
            print(f"held out, {said['when']}: reward {said['reward']:.2f}", flush=True)
        else:
            progress.steps.append(measures.read_step(said))
            print(step_line(progress.steps[-1], options.steps), flush=True)
    return progress


def step_line(step: measures.Step, steps: int) -> str:
    """Return `step  7/16 [#########-----------]  reward 0.78  two versions 64/64  distance 1e-06  20.1 s`."""
    done = step.number + 1
    filled = BAR * done // steps
    near = "-" if step.current is None else f"{step.current[0]:.0e}"
    seconds = step.sampling_s + step.training_s + step.update_s
    return (
        f"step {done:>3}/{steps} [{'#' * filled}{'-' * (BAR - filled)}]  reward {step.reward:.2f}  "
        f"two versions {step.spanning}/{step.samples}  distance {near}  {seconds:.1f} s"
    )


def report(options: argparse.Namespace, progress: Progress, model: Path, samples: Path) -> int:
    """Print what came of the run and write its picture and its page; return the exit status."""
    run = progress.run
    title = f"{options.task}: mean reward, {options.prompts} prompts x {options.group} samples"
    drawn = options.out / "training.svg"
    drawn.write_text(picture.draw(run, title), encoding="utf-8")
    page = options.out / "samples.html"
    command = (sys.executable, "-m", "miles_router", "view", str(samples), "--output", str(page))
    quiet = {**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # it says that torch is absent, which nobody needs
    viewed = subprocess.run([*command, "--hf-checkpoint", str(model)], stdout=subprocess.PIPE, env=quiet)
    print("\n".join(answer_lines(progress)) + "\n")
    print(f"held-out reward  {run.before:.2f} before, {run.after:.2f} after")
    spanning = sum(step.spanning for step in run.steps)
    print(f"samples          {sum(step.whole for step in run.steps)} whole, {spanning} of two weight versions")
    print(f"distance         {measures.distances(run.steps)}")
    print(f"encoding again   changes {sum(step.changed for step in run.steps) / len(run.steps):.1%} of the samples")
    print(f"picture          {drawn}\ntokens           {page}")
    problems = measures.exactness_problems(run.steps, keeps_cache=options.update == "in_place")
    problems += [f"the page could not be written: status {viewed.returncode}"] if viewed.returncode else []
    if options.expect_learning:
        problems += measures.learning_problems(run)
    for problem in problems:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def answer_lines(progress: Progress) -> Iterator[str]:
    """Lay the answers of before and after side by side."""
    yield f"{'question':<12} {'before':<44} after"
    for (name, before), (_, after) in zip(
        progress.examined["before"]["answers"], progress.examined["after"]["answers"], strict=True
    ):
        yield f"{name:<12} {before[:42]!r:<44} {after[:42]!r}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    return (log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]


async def interruptible(options: argparse.Namespace) -> int:
    """Run until the end, or until Ctrl-C or SIGTERM; end what was started; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="miles-router-training-") as logs:
        fleet = DemoFleet(Path(logs))
        task = asyncio.ensure_future(train(options, fleet))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except (Failed, ProcessError) as error:
            print(f"make train: {error}", file=sys.stderr)
            return 1
        except asyncio.CancelledError:
            print("\nstopped", file=sys.stderr)
            return 130
        finally:
            fleet.stop()


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="make train", description="Train a small model through the router.")
    add = made.add_argument
    add("--engine", choices=("sglang", "vllm"), default="sglang", help="of the workers (default: %(default)s)")
    add("--task", choices=sorted(TASKS), default="capitals", help="one turn of text, or two turns of an agent")
    add("--tokens", choices=("exact", "text"), default="exact", help="text: train on the text encoded again")
    add("--update", choices=("abort", "retract", "in_place"), default="abort", help="what a pause does to generations")
    add("--steps", type=_positive, help="weight updates (default: 16; of lookup 10)")
    for name, default, said in (
        ("prompts", 8, "groups of a step"),
        ("group", 8, "samples of a prompt"),
        ("examined", 32, "held-out questions"),
    ):
        add(f"--{name}", type=_positive, default=default, help=f"{said} (default: %(default)s)")
    add("--seed", type=int, default=0, help="which questions are drawn (default: %(default)s)")
    add("--port", type=int, default=0, help="of the router (default: a free one)")
    add("--out", type=Path, default=Path("training"), help="directory of what is written (default: %(default)s)")
    add("--expect-learning", action="store_true", help="fail where the reward has not risen")
    return made


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main() -> int:
    """Run the command line."""
    made = parser()
    options = made.parse_args()
    options.steps = options.steps or TASKS[options.task].steps
    if options.tokens == "text" and options.task != "capitals":
        made.error("--tokens text is for --task capitals: an agent's samples have no text of their own")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        made.error(f"--out: {error}")
    return asyncio.run(interruptible(options))


if __name__ == "__main__":
    sys.exit(main())
