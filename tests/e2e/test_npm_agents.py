"""Claude Code and Codex as they come from npm, over several turns: one segment on the main line, every sampled token in
one trained place, equal to what went through the worker's proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.table import CLAUDE_CODE, CODEX
from tests.support.agent_process import Run, work_file
from tests.support.claude_code import COUNTING, claude_code
from tests.support.claude_code import edits as claude_edits
from tests.support.codex import KNOWN_MODEL, UNKNOWN_MODEL, codex
from tests.support.codex import edits as codex_edits
from tests.support.cuts import check_cut, continue_, pause, pause_within, update_within
from tests.support.session_trial import SessionTrial, by_ids, exactly, say, simulated_sessions
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import until

#: Claude Code asks for 128,000 tokens behind some 12,000.
KIND: dict[str, Any] = {"reasoning_parser": "qwen3", "context_len": 200_000}
MANY_WORDS = "Here I am, with many words to say."
SMALL = {"budget": {"max_context": 500}}


class NpmAgent(NamedTuple):
    """One that replaces `hello` by `goodbye` in a file."""

    run: Callable[..., Coroutine[Any, Any, Run]]
    text: str
    steps: Callable[[Path], list[Any]]
    within_a_call: str
    longer_than_limits: tuple[float, float]  # seconds before a head, and within an answer
    when_full: str


def without_sub_agent(file: Path) -> list[Any]:
    return [step for place, step in enumerate(claude_edits(file)) if place != COUNTING]


async def run_claude(url: str, prompt: str, directory: Path, limited: bool = False) -> Run:
    """Below ten seconds it takes no limit for bytes within an answer."""
    limits = {"API_TIMEOUT_MS": "3000", "CLAUDE_ENABLE_BYTE_WATCHDOG": "1", "CLAUDE_CODE_MAX_RETRIES": "0"}
    limits["CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS"] = "10000"
    return await claude_code(url, prompt, directory, **limits if limited else {})


async def run_codex(url: str, prompt: str, directory: Path, limited: bool = False) -> Run:
    more = ("-c", "model_providers.router.stream_idle_timeout_ms=1500") if limited else ()
    return await codex(f"{url}/v1", prompt, directory, *more, model=KNOWN_MODEL)


def codex_steps(_: Path) -> list[Any]:
    return codex_edits(KNOWN_MODEL)


OUT_OF_ROOM = "ran out of room in the model's context window"
CLAUDE = NpmAgent(run_claude, "hello\n", without_sub_agent, '"new_string": "good', (4.0, 11.0), "Prompt is too long")
AGENTS = {
    "Claude Code": CLAUDE,
    "Codex": NpmAgent(run_codex, 'hello "you"\n', codex_steps, "-hello ", (2.0, 4.0), OUT_OF_ROOM),
}
each_agent = pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)


def address(trial: SessionTrial, session: str) -> str:
    return f"{trial.router.url}/sessions/{session}"


def edited(run: Run, file: Path, text: str) -> None:
    assert (run.code, run.said.strip()) == (0, "Replaced it."), run
    assert file.read_text(encoding="utf-8") == text.replace("hello", "goodbye"), run


async def test_claude_code_leaves_one_exact_segment_and_that_of_its_sub_agent(stage: Stage, tmp_path: Path) -> None:
    file = work_file(tmp_path, "hello\n")
    script: list[Any] = [*claude_edits(file), {"reasoning": "Easy.", "text": "One file.", "when": "Count the files."}]
    async with simulated_sessions(stage, script=script, **KIND) as trial:
        session = await trial.create()
        run = await claude_code(address(trial, session), "Replace hello by goodbye", file.parent)
        edited(run, file, "hello\n")
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


@pytest.mark.parametrize("model", [UNKNOWN_MODEL, KNOWN_MODEL])
async def test_codex_leaves_one_exact_segment(stage: Stage, tmp_path: Path, model: str) -> None:
    file = work_file(tmp_path, 'hello "you"\n')
    async with simulated_sessions(stage, script=codex_edits(model), **KIND) as trial:
        session = await trial.create()
        run = await codex(f"{address(trial, session)}/v1", "Replace hello by goodbye", file.parent, model=model)
        edited(run, file, 'hello "you"\n')
        assert [
            (record["parent"], record["reason"], record["streamed"]) for record in await trial.records(session)
        ] == [(place, None, True) for place in (None, 0, 1, 2)]
        found = await trial.read(session)
        assert (found["metadata"]["segments"], found["metadata"]["untraced"]) == (CODEX.segments, [])
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.log))


@each_agent
async def test_it_edits_a_file_on_an_engine_whose_chat_has_no_ids(
    stage: Stage, tmp_path: Path, agent: NpmAgent
) -> None:
    file = work_file(tmp_path, agent.text)
    steps = agent.steps(file)
    async with simulated_sessions(stage, **by_ids(KIND["context_len"])) as trial:
        say(trial, steps)
        session = await trial.create()
        edited(await agent.run(address(trial, session), "Replace hello by goodbye", file.parent), file, agent.text)
        assert await trial.reasons(session) == [None] * len(steps)
        assert (await trial.read(session))["metadata"]["untraced"] == []
        (sample,) = await trial.samples(session)
        exactly(sample, *trial.worker.log.generations)


@each_agent
async def test_it_notices_nothing_of_new_weights_in_the_middle_of_a_call(
    stage: Stage, tmp_path: Path, agent: NpmAgent
) -> None:
    file = work_file(tmp_path, agent.text)
    steps = agent.steps(file)
    async with simulated_sessions(stage, settings={"partial_rollout": "resume"}, script=steps, **KIND) as trial:
        session = await trial.create()
        running = agent.run(address(trial, session), "Replace hello by goodbye", file.parent)
        async with under_way(running) as task:
            await update_within(trial, agent.within_a_call, "2")
            edited(await task, file, agent.text)
        await check_cut(trial, session, turns=len(steps))


@each_agent
async def test_it_outlives_pauses_longer_than_its_own_limits(stage: Stage, tmp_path: Path, agent: NpmAgent) -> None:
    directory, (before, within) = work_file(tmp_path, "").parent, agent.longer_than_limits
    settings = {"partial_rollout": "resume", "heartbeat_interval": 0.3}
    script = [{"reasoning": "Hm.", "text": MANY_WORDS}]
    async with simulated_sessions(stage, settings=settings, script=script, **KIND) as trial:
        session = await trial.create()
        await pause(trial)
        async with under_way(agent.run(address(trial, session), "Hello", directory, True)) as running:
            await until(lambda: trial.router.app.router.gate.held, "its turn waits")
            await asyncio.wait({running}, timeout=before)
            await continue_(trial)
            await pause_within(trial, "many", running, seconds=within)
            run = await running
        assert (run.code, run.said.strip()) == (0, MANY_WORDS), run
        assert len(await trial.records(session)) == 1
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.log))


async def test_claude_code_asks_for_less_where_the_context_window_is_small(stage: Stage, tmp_path: Path) -> None:
    directory = work_file(tmp_path, "").parent
    script = [{"reasoning": "Hm.", "text": "Here I am."}]
    async with simulated_sessions(stage, script=script, **{**KIND, "context_len": 40_000}) as trial:
        session = await trial.create()
        run = await claude_code(address(trial, session), "Hello", directory)
        assert (run.code, run.said.strip()) == (0, "Here I am."), run
        assert await trial.reasons(session) == [None]


@each_agent
async def test_it_knows_that_the_context_of_its_contract_is_full(stage: Stage, tmp_path: Path, agent: NpmAgent) -> None:
    """As it does when its own API says so."""
    directory = work_file(tmp_path, "").parent
    async with simulated_sessions(stage) as trial:
        session = await trial.create(contract=SMALL)
        run = await agent.run(address(trial, session), "Hello", directory)
        assert agent.when_full in run.said + run.complained, run
        assert trial.log == []
        assert (await trial.read(session))["metadata"]["end_reason"] == "context"
