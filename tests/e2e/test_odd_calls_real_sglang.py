"""Tool calls that a real SGLang loses, leaves open, or fails over: it says what a script wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_worker import RealWorker
from tests.support.bare_calls import BARE, DATED, NAMES, NULL, UNKNOWN
from tests.support.real_sessions import real_sessions, write_script
from tests.support.session_apis import TALKS, Api, Said
from tests.support.session_trial import IM_END, SessionTrial, qwen3, user

pytestmark = pytest.mark.sglang

OPEN = (
    '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"}\n</tool_call>',
    '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"\n</tool_call>',
    '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"',
)
#: Half of a surrogate pair, as an escape.
SPOILED = DATED.replace("UTC", r"\ud83d")
Say = Callable[..., None]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealWorker, Path]]:
    script = tmp_path_factory.mktemp("scripted") / "script"
    with RealWorker.start("--script-file", str(script), "--chunked-prefill-size", "-1") as worker:
        yield worker, script


@pytest.fixture
def say(engine: tuple[RealWorker, Path]) -> Say:
    """Have the engine say these texts next."""
    return lambda *texts: write_script(engine[1], *texts)


@pytest.fixture
async def trial(engine: tuple[RealWorker, Path]) -> AsyncIterator[SessionTrial]:
    async with real_sessions(engine[0]) as (made, _):
        yield made


async def ask(trial: SessionTrial, session: str, api: Api, items: list[Any]) -> Said:
    return await api.turn(trial, session, items, stream=True, tools=api.tools(*NAMES))


async def test_a_real_engine_s_calls_without_arguments_are_all_shown(trial: SessionTrial, say: Say) -> None:
    texts = [f"{BARE}\n{DATED}", f"{NULL}\n{DATED}", f"{DATED}\n{UNKNOWN}\n{DATED}"]
    for api in TALKS:
        say(*texts)
        for text in texts:
            session = await trial.create()
            calls = (await ask(trial, session, api, [user("When?")])).calls
            assert [name for _, name, _ in calls][-1] == "get_date", text
            assert len(calls) == len({call_id for call_id, _, _ in calls}) == 2, text
            assert json.loads(calls[-1][2]) == {"zone": "UTC"}, text
            assert json.loads(calls[0][2] or "{}") in ({}, {"zone": "UTC"}), text
            (record,) = await trial.records(session)
            assert "shown_otherwise" not in record
            assert record["parsed"] == (["unknown_tool"] if UNKNOWN in text else "whole"), text


async def test_a_real_engine_s_open_call_comes_back_repaired(trial: SessionTrial, say: Say) -> None:
    for api in TALKS:
        for text in OPEN:
            say(text, "Now.")
            session = await trial.create()
            ((call_id, name, arguments),) = (await ask(trial, session, api, [user("When?")])).calls
            back = api.called((call_id, name, api.arguments('{"zone": "UTC"}')))
            await ask(trial, session, api, [user("When?"), *back, *api.results((call_id, "now"))])
            first, second = await trial.records(session)
            assert "shown_otherwise" in first
            assert first["parsed"] == ["invalid_json"], text
            assert (second["parent"], second["edit"]) == (0, None), (api, text, arguments)


async def test_a_real_engine_s_failure_at_an_escape_is_made_up_for(trial: SessionTrial, say: Say) -> None:
    for api in TALKS:
        say(SPOILED, "x", SPOILED)  # what fails, and what is asked for once more
        session = await trial.create()
        answer = await api.turn(trial, session, [user("When?")], tools=api.tools(*NAMES))
        assert "\ufffd" in json.dumps(answer.items, ensure_ascii=False)
        (sample,) = await trial.samples(session)
        sampled = [*qwen3().encode(SPOILED), IM_END]
        assert sample["tokens"][-len(sampled) :] == sampled
        assert sample["loss_mask"] == [0] * (len(sample["tokens"]) - len(sampled)) + [1] * len(sampled)
