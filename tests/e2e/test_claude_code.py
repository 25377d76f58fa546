"""Claude Code as it comes from npm, over several turns: one segment on its main line, every sampled token in one
trained place, equal to what went through the worker's proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.clients.table import CLAUDE_CODE
from tests.support.agent_process import work_file
from tests.support.claude_code import COUNTING, claude_code, edits
from tests.support.cuts import check_cut, continue_, pause, pause_within, update_within
from tests.support.session_trial import by_ids, exactly, say, simulated_sessions
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

#: It asks for 128,000 tokens behind some 12,000.
CONTEXT = 200_000
#: Milliseconds that it waits for a head, and for bytes within an answer. It takes no limit below ten seconds for these.
LIMITS = {
    "API_TIMEOUT_MS": "3000",
    "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
    "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": "10000",
    "CLAUDE_CODE_MAX_RETRIES": "0",
}


async def test_it_edits_a_file_and_leaves_one_exact_segment_and_that_of_its_sub_agent(
    stage: Stage, tmp_path: Path
) -> None:
    file = work_file(tmp_path, "hello\n")
    script: list[Any] = [*edits(file), {"reasoning": "Easy.", "text": "One file.", "when": "Count the files."}]
    async with simulated_sessions(stage, script=script, reasoning_parser="qwen3", context_len=CONTEXT) as trial:
        session = await trial.create()
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Replace hello by goodbye", file.parent)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == "goodbye\n"
        records = await trial.records(session)
        (beside,) = [place for place, record in enumerate(records) if record["reason"] is not None]
        assert (records[beside]["reason"], records[beside]["parent"]) == ("sub_agent", None)
        main = [place for place in range(len(records)) if place != beside]
        assert [records[place]["parent"] for place in main] == [None, *main[:-1]]
        generations = [exchange.generation for exchange in trial.log]
        samples = {sample["metadata"]["side_call"]: sample for sample in await trial.samples(session)}
        assert samples.keys() == {True, False}
        exactly(samples[False], *(generations[place] for place in main))
        exactly(samples[True], generations[beside])
        assert await trial.samples(session, side_calls=False) == [samples[False]] * CLAUDE_CODE.segments
        assert (await trial.read(session))["metadata"]["untraced"] == []


async def test_it_edits_a_file_on_an_engine_whose_chat_has_no_ids(stage: Stage, tmp_path: Path) -> None:
    file = work_file(tmp_path, "hello\n")
    steps = edits(file)
    del steps[COUNTING]
    async with simulated_sessions(stage, **by_ids(CONTEXT)) as trial:
        say(trial, steps)
        session = await trial.create()
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Replace hello by goodbye", file.parent)
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == "goodbye\n"
        assert await trial.reasons(session) == [None] * len(steps)
        assert (await trial.read(session))["metadata"]["untraced"] == []
        (sample,) = await trial.samples(session)
        exactly(sample, *trial.worker.log.generations)


async def test_it_notices_nothing_of_new_weights_in_the_middle_of_a_call(stage: Stage, tmp_path: Path) -> None:
    file = work_file(tmp_path, "hello\n")
    steps = edits(file)
    del steps[COUNTING]
    kind: dict[str, Any] = {"script": steps, "reasoning_parser": "qwen3", "context_len": CONTEXT}
    async with simulated_sessions(stage, settings={"partial_rollout": "resume"}, **kind) as trial:
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}"
        async with under_way(claude_code(url, "Replace hello by goodbye", file.parent)) as running:
            await update_within(trial, '"new_string": "good', "2")
            run = await running
        assert (run.code, run.said.strip()) == (0, "Replaced it."), run
        assert file.read_text(encoding="utf-8") == "goodbye\n"
        await check_cut(trial, session, turns=len(steps))


async def test_it_outlives_pauses_longer_than_its_own_limits(stage: Stage, tmp_path: Path) -> None:
    steps = [{"reasoning": "Hm.", "text": "Here I am, with many words to say."}]
    kind: dict[str, Any] = {"script": steps, "reasoning_parser": "qwen3", "context_len": CONTEXT}
    directory = work_file(tmp_path, "").parent
    settings = {"partial_rollout": "resume", "heartbeat_interval": 0.5}
    async with simulated_sessions(stage, settings=settings, **kind) as trial:
        session = await trial.create()
        await pause(trial)
        url = f"{trial.router.url}/sessions/{session}"
        async with under_way(claude_code(url, "Hello", directory, **LIMITS)) as running:
            await until(lambda: trial.router.app.router.gate.held, "its turn waits")
            await asyncio.wait({running}, timeout=4.0)
            await continue_(trial)
            await pause_within(trial, "many", running, seconds=11.0)
            run = await running
        assert (run.code, run.said.strip()) == (0, "Here I am, with many words to say."), run
        assert len(await trial.records(session)) == 1
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.log))


async def test_it_asks_for_less_where_the_context_window_is_small(stage: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "work"
    directory.mkdir()
    steps = [{"reasoning": "Hm.", "text": "Here I am."}]
    async with simulated_sessions(stage, script=steps, reasoning_parser="qwen3", context_len=40_000) as trial:
        session = await trial.create()
        run = await claude_code(f"{trial.router.url}/sessions/{session}", "Hello", directory)
        assert (run.code, run.said.strip()) == (0, "Here I am."), run
        assert [record["reason"] for record in await trial.records(session)] == [None]
