"""Codex as it comes from npm, over several turns: one segment on its main line, every sampled token in one trained
place, equal to what went through the worker's proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.table import CODEX
from tests.support.agent_process import work_file
from tests.support.codex import KNOWN_MODEL, UNKNOWN_MODEL, codex, edits
from tests.support.cuts import check_cut, pause_within, update_within
from tests.support.session_trial import by_ids, exactly, say, simulated_sessions
from tests.support.stage import Stage
from tests.support.under_way import under_way

CONTEXT = 200_000
#: Milliseconds without an event after which it gives up.
LIMIT = "model_providers.router.stream_idle_timeout_ms={limit}"


@pytest.mark.parametrize("model", [UNKNOWN_MODEL, KNOWN_MODEL])
async def test_it_edits_a_file_and_leaves_one_exact_segment(stage: Stage, tmp_path: Path, model: str) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    async with simulated_sessions(stage, script=edits(model), reasoning_parser="qwen3", context_len=CONTEXT) as trial:
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}/v1"
        run = await codex(url, "Replace hello by goodbye", file.parent, model=model)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == 'goodbye "you"\n', run
        records = await trial.records(session)
        assert [(record["parent"], record["reason"], record["streamed"]) for record in records] == [
            (place, None, True) for place in (None, 0, 1, 2)
        ]
        found = await trial.read(session)
        assert (found["metadata"]["segments"], found["metadata"]["untraced"]) == (CODEX.segments, [])
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.log))


async def test_it_edits_a_file_on_an_engine_whose_chat_has_no_ids(stage: Stage, tmp_path: Path) -> None:
    file, steps = work_file(tmp_path, 'hello "you"\n'), edits(KNOWN_MODEL)
    async with simulated_sessions(stage, **by_ids(CONTEXT)) as trial:
        say(trial, steps)
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}/v1"
        run = await codex(url, "Replace hello by goodbye", file.parent, model=KNOWN_MODEL)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == 'goodbye "you"\n', run
        assert await trial.reasons(session) == [None] * len(steps)
        assert (await trial.read(session))["metadata"]["untraced"] == []
        (sample,) = await trial.samples(session)
        exactly(sample, *trial.worker.log.generations)


async def test_it_notices_nothing_of_new_weights_in_the_middle_of_a_call(stage: Stage, tmp_path: Path) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    steps = edits(KNOWN_MODEL)
    kind: dict[str, Any] = {"script": steps, "reasoning_parser": "qwen3", "context_len": CONTEXT}
    async with simulated_sessions(stage, settings={"partial_rollout": "resume"}, **kind) as trial:
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}/v1"
        async with under_way(codex(url, "Replace hello by goodbye", file.parent, model=KNOWN_MODEL)) as running:
            await update_within(trial, "-hello ", "2")
            run = await running
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == 'goodbye "you"\n', run
        await check_cut(trial, session, turns=len(steps))


async def test_it_outlives_a_pause_longer_than_its_own_limit(stage: Stage, tmp_path: Path) -> None:
    steps = [{"reasoning": "Hm.", "text": "Here I am, with many words to say."}]
    kind: dict[str, Any] = {"script": steps, "reasoning_parser": "qwen3", "context_len": CONTEXT}
    directory = work_file(tmp_path, "").parent
    settings = {"partial_rollout": "resume", "heartbeat_interval": 0.3}
    async with simulated_sessions(stage, settings=settings, **kind) as trial:
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}/v1"
        async with under_way(codex(url, "Hello", directory, "-c", LIMIT.format(limit=1500))) as running:
            await pause_within(trial, "many", running, seconds=4.0)
            run = await running
        assert (run.code, run.said.strip()) == (0, "Here I am, with many words to say."), run
        assert len(await trial.records(session)) == 1
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.log))
