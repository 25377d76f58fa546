"""The same of a real SGLang, which says what a script wants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sglang_worker import RealWorker
from tests.support.bare_calls import BARE, DATED, NAMES, NULL, UNKNOWN
from tests.support.real_sessions import real_sessions, write_script
from tests.support.session_apis import TALKS, Api, Said
from tests.support.session_trial import SessionTrial, user

pytestmark = pytest.mark.sglang


async def ask(trial: SessionTrial, session: str, api: Api, items: list[Any]) -> Said:
    return await api.turn(trial, session, items, stream=True, tools=api.tools(*NAMES))


async def test_a_real_engine_s_calls_without_arguments_are_all_shown(tmp_path: Path) -> None:
    said = tmp_path / "script"
    texts = [f"{BARE}\n{DATED}", f"{NULL}\n{DATED}", f"{DATED}\n{UNKNOWN}\n{DATED}"]
    with RealWorker.start("--script-file", str(said), "--chunked-prefill-size", "-1") as worker:
        async with real_sessions(worker) as (trial, _):
            for api in TALKS:
                write_script(said, *texts)
                for text in texts:
                    session = await trial.create()
                    calls = (await ask(trial, session, api, [user("When?")])).calls
                    assert [name for _, name, _ in calls][-1] == "get_date", text
                    assert len(calls) == len({call_id for call_id, _, _ in calls}) == 2, text
                    assert json.loads(calls[-1][2]) == {"zone": "UTC"}, text
                    assert json.loads(calls[0][2] or "{}") in ({}, {"zone": "UTC"}), text
                    (record,) = await trial.records(session)
                    assert "shown_otherwise" not in record


OPEN = (
    '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"}\n</tool_call>',
    '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"\n</tool_call>',
    '<tool_call>\n{"name": "get_date", "arguments": {"zone": "UTC"',
)


async def test_a_real_engine_s_open_call_comes_back_repaired(tmp_path: Path) -> None:
    said = tmp_path / "script"
    with RealWorker.start("--script-file", str(said), "--chunked-prefill-size", "-1") as worker:
        async with real_sessions(worker) as (trial, _):
            for api in TALKS:
                for text in OPEN:
                    write_script(said, text, "Now.")
                    session = await trial.create()
                    answer = await ask(trial, session, api, [user("When?")])
                    ((call_id, name, arguments),) = answer.calls
                    back = api.called((call_id, name, api.arguments('{"zone": "UTC"}')))
                    await ask(trial, session, api, [user("When?"), *back, *api.results((call_id, "now"))])
                    first, second = await trial.records(session)
                    assert "shown_otherwise" in first
                    assert (second["parent"], second["edit"]) == (0, None), (api, text, arguments)
