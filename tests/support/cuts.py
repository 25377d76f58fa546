"""New weights in the middle of a turn: a pause that cuts what is being sampled, an update, and continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles_router.testing.worker.engine import Engine
from tests.sglang.scripted_sampling import SLOWLY
from tests.sglang_worker import RealWorker
from tests.support.brake import Brake
from tests.support.http import ask
from tests.support.session_trial import SessionTrial, exactly, simulated_sessions
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, soon, until


async def _order(trial: SessionTrial, path: str, **body: Any) -> None:
    answer = await trial.ask("POST", path, body)
    assert answer.status == 200, answer.body


async def pause(trial: SessionTrial, mode: str = "abort") -> None:
    await _order(trial, "/pause_generation", mode=mode)


async def new_version(trial: SessionTrial, version: str) -> None:
    await _order(trial, "/update_weight_version", new_version=version, abort_all_requests=False)


async def continue_(trial: SessionTrial, version: str | None = None) -> None:
    if version is not None:
        await new_version(trial, version)
    await _order(trial, "/continue_generation")


@asynccontextmanager
async def cuttable(
    stage: Stage, *, options: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **worker: Any
) -> AsyncIterator[tuple[SessionTrial, Brake]]:
    """Sessions before a worker that can be stopped between two tokens."""
    kind = {"token_latency_s": 0.0002, "reasoning_parser": "qwen3", **worker}
    resume = {"partial_rollout": "resume", **(settings or {})}
    async with simulated_sessions(stage, options=options, settings=resume, **kind) as trial:
        yield trial, Brake(trial.worker.engine)


async def reached(trial: SessionTrial, brake: Brake, tokens: int) -> None:
    """Every generation stands behind so many tokens, or a few more."""
    await soon(_reached(trial.worker.engine, tokens))
    brake.on = True


async def _reached(engine: Engine, tokens: int) -> None:
    while min((len(each.output_ids) for each in engine.running.values()), default=-1) < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def go_on(trial: SessionTrial, brake: Brake, version: str | None = None) -> None:
    """What was stopped and paused goes on, with new weights if there is a version."""
    brake.on = False
    await continue_(trial, version)


async def cut(trial: SessionTrial, brake: Brake, tokens: int, version: str | None = None) -> None:
    """Cut every generation behind so many tokens, or a few more, and let them go on."""
    await reached(trial, brake, tokens)
    await pause(trial)
    await go_on(trial, brake, version)


async def lose(trial: SessionTrial, brake: Brake) -> None:
    """The worker dies where it stands, and comes back without what it had."""
    await trial.worker.kill()
    brake.on = False
    await trial.worker.restart()


async def update_within(trial: SessionTrial, said: str, version: str) -> None:
    engine = trial.worker.engine
    brake = Brake(engine)
    brake.when = lambda generation: said in engine.model.tokenizer.decode(generation.output_ids)
    await until(lambda: brake.on, f"{said!r} is said", deadline=10 * PATIENCE)
    await pause(trial)
    await until(lambda: trial.router.app.router.gate.held, "it waits to be carried on")
    await go_on(trial, brake, version)


async def pause_within(trial: SessionTrial, said: str, agent: asyncio.Task[Any], *, seconds: float) -> None:
    """Pause the only simulated worker right behind this text, for longer than the agent would wait in silence."""
    engine = trial.worker.engine
    brake = Brake(engine)
    brake.when = lambda generation: said in engine.model.tokenizer.decode(generation.output_ids)
    await until(lambda: brake.on, f"{said!r} is said", deadline=10 * PATIENCE)
    await pause(trial)
    await asyncio.wait({agent}, timeout=seconds)
    await go_on(trial, brake)


async def check_cut(trial: SessionTrial, session: str, *, turns: int) -> None:
    """A session of so many turns, of which one took two requests, is one segment with every token once, and spans of
    both versions."""
    records = await trial.records(session)
    assert [(record["parent"], record["reason"]) for record in records] == [
        (place - 1 if place else None, None) for place in range(turns)
    ]
    made = [exchange.generation for exchange in trial.log]
    assert len(made) == turns + 1
    (sample,) = await trial.samples(session)
    exactly(sample, *made)
    sampled = [span.version for each in made for span in each.weight_versions for _ in range(span.start, span.end)]
    spans = sample["weight_versions"]
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == sampled
    assert {span["version"] for span in spans} == {"1", "2"}


class ScriptedCut:
    """The same of a real engine with this script (`tests/sglang/scripted_sampling.py`)."""

    def __init__(self, trial: SessionTrial, worker: RealWorker, script: Path) -> None:
        self._trial = trial
        self._worker = worker
        self._hold, self._held = script.with_name("hold"), script.with_name("held")

    def before(self, token: int, left: int | None = None) -> None:
        """Have a generation stop before one of its tokens: the next one that has it, or the one behind which so many
        are left in the script."""
        self._held.unlink(missing_ok=True)
        self._say(str(token) if left is None else f"{token} {left}")

    def _say(self, word: str) -> None:
        """At once: a file that is being written is empty for a moment."""
        written = self._hold.with_suffix(".new")
        written.write_text(word)
        written.replace(self._hold)

    async def update(self, version: str) -> None:
        """Cut it there, and give the engine new weights."""
        await until(self._held.exists, "the engine is stopped", deadline=10 * PATIENCE)
        pausing = asyncio.ensure_future(pause(self._trial))
        ready = 200
        while ready == 200:
            ready = (await ask(self._worker.url, "GET", "/ready")).status
        self._say(SLOWLY)  # the abort is on its way to an engine that hears nothing between two tokens
        await soon(pausing)
        self._hold.unlink()
        await continue_(self._trial, version)
