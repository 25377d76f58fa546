"""Sessions before a real SGLang, and agents that edit a file in one, on an engine that says what a script wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from miles_router.settings.config import MiddlewareSpec
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.agent_process import Run
from tests.support.cuts import ScriptedCut
from tests.support.generations import Generation, whole_generations
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import running_router
from tests.support.session_trial import IM_END, SESSIONS, SessionTrial, qwen3
from tests.support.under_way import under_way

#: Numbers in a row of most weights.
HIDDEN = 64


@asynccontextmanager
async def real_sessions(worker: RealWorker, **settings: Any) -> AsyncIterator[tuple[SessionTrial, RecordingProxy]]:
    """A router with sessions before an engine behind a proxy."""
    given = {"middlewares": (MiddlewareSpec(SESSIONS),), "hf_checkpoint": str(ensure().dense_model), **settings}
    async with RecordingProxy(worker.url) as proxy, running_router(proxy.url, **given) as router:
        yield SessionTrial(router, ()), proxy


def rolled_model(directory: Path) -> Path:
    """Make the model with each row of its weights in the place of the one before, in this directory."""
    for file in ensure().dense_model.iterdir():
        (directory / file.name).symlink_to(file)
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    weights.unlink()
    begin = 8 + int.from_bytes(data[:8], "little")
    values = np.frombuffer(data, np.uint16, offset=begin)
    values[:] = np.roll(values, HIDDEN)
    weights.write_bytes(data)
    return directory


def write_script(script: Path, *texts: str) -> None:
    """Have the engine say these texts, one after the other (`tests/sglang/scripted_sampling.py`)."""
    script.write_text(json.dumps([[*qwen3().encode(text), IM_END] for text in texts]), encoding="utf-8")


class Cut(NamedTuple):
    """Where new weights come: in the text at this place, in front of these words."""

    place: int
    words: str


class Edit(NamedTuple):
    """What an agent's task left: the turns of its session, how each was generated, and the samples."""

    records: list[Any]
    generations: list[Generation]
    samples: list[Any]


async def edit(
    agent: Callable[[str], Coroutine[Any, Any, Run]], texts: Sequence[str], script: Path, cut: Cut | None
) -> Edit:
    """Have an agent, which is given the address of a session, do a task that takes these texts."""
    # Each chunk of a prompt would take a step off the script.
    flags = ("--reasoning-parser", "qwen3", "--script-file", str(script), "--chunked-prefill-size", "-1")
    with RealWorker.start(*flags) as worker:
        write_script(script, *texts)
        async with real_sessions(worker, partial_rollout="resume") as (trial, proxy):
            cutting = ScriptedCut(trial, worker, script)
            session = await trial.create()
            if cut is not None:
                before = texts[cut.place].partition(cut.words)[0]
                cutting.before(len(qwen3().encode(before)), len(texts) - 1 - cut.place)
            async with under_way(agent(f"{trial.router.url}/sessions/{session}")) as running:
                if cut is not None:
                    await cutting.update("1")
                run = await running
            assert (run.code, run.said.strip()) == (0, "Replaced it."), run
            generations = whole_generations(proxy.chats(version="default"))
            legs = [1 + (cut is not None and place == cut.place) for place in range(len(texts))]
            assert [generation.legs for generation in generations] == legs
            return Edit(await trial.records(session), generations, await trial.samples(session))


def versions_in(sample: Any) -> list[str]:
    return [version for version, _ in groupby(span["version"] for span in sample["weight_versions"])]
