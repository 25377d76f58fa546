"""A real SGLang whose model writes half of a surrogate pair, as an escape, into the arguments of a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sglang_worker import RealWorker
from tests.support.bare_calls import DATED, NAMES
from tests.support.real_sessions import real_sessions, write_script
from tests.support.session_apis import TALKS
from tests.support.session_trial import IM_END, qwen3, user

pytestmark = pytest.mark.sglang
SPOILED = DATED.replace("UTC", r"\ud83d")


async def test_a_real_engine_s_failure_at_an_escape_is_made_up_for(tmp_path: Path) -> None:
    said = tmp_path / "script"
    with RealWorker.start("--script-file", str(said), "--chunked-prefill-size", "-1") as worker:
        async with real_sessions(worker) as (trial, _):
            for api in TALKS:
                # What fails, and what is asked for once more.
                write_script(said, SPOILED, "x", SPOILED)
                session = await trial.create()
                answer = await api.turn(trial, session, [user("When?")], tools=api.tools(*NAMES))
                assert "\ufffd" in json.dumps(answer.items, ensure_ascii=False)
                (sample,) = await trial.samples(session)
                sampled = [*qwen3().encode(SPOILED), IM_END]
                assert sample["tokens"][-len(sampled) :] == sampled
                assert sample["loss_mask"] == [0] * (len(sample["tokens"]) - len(sampled)) + [1] * len(sampled)
