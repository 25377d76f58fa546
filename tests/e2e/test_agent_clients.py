"""Agents as other people publish them, unmodified, over several turns with tools: as many segments as the table of
docs/agents.md says, and every sampled token in one trained place, equal to what went through the worker's proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import program, python_for
from tests.clients.table import CLIENTS, STREAMED, Client
from tests.support.agent_process import run_agent
from tests.support.session_trial import SessionTrial, exactly, simulated_sessions
from tests.support.stage import Stage
from tests.support.tiers import size

#: Those whose environment is quickly made, and that are quickly done.
QUICK = ("Vercel AI SDK",)
DRIVEN = [client for client in CLIENTS if client.driver]
TRIED = size(heavy=DRIVEN, otherwise=[client for client in DRIVEN if client.name in QUICK])
CASES = [pytest.param(client, mode, False, id=f"{client.name}, {mode}") for client in TRIED for mode in client.modes]

pytestmark = pytest.mark.clients
#: Agents that would ask others for prices, or report.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_ANALYTICS": "false", "ANONYMIZED_TELEMETRY": "false"}


async def driven(client: Client, mode: str, base_url: str, directory: Path) -> str:
    """What an agent says in the end; it reaches nobody but the router."""
    command = [*map(str, program(client)), base_url, mode]
    run = await run_agent(command, directory, directory, {"NO_PROXY": "*", **QUIET})
    assert run.code == 0, run.complained[-4000:] + run.said[-4000:]
    return run.said.strip()


async def check_exact(trial: SessionTrial, session: str) -> None:
    """Each sample is what its turns were given and sampled at the proxy; each turn is trained once."""
    by_rid = {exchange.generation.rid: exchange.generation for exchange in trial.log}
    trained = []
    for sample in await trial.samples(session):
        turns, untrained = sample["metadata"]["turns"], sample["metadata"]["untrained_turns"]
        assert [turn["turn"] for turn in turns[: len(untrained)]] == untrained
        exactly(sample, *(by_rid[turn["rid"]] for turn in turns), elsewhere=len(untrained))
        trained += [turn["rid"] for turn in turns if turn["turn"] not in untrained]
    assert sorted(trained) == sorted(by_rid)


#: Also with heartbeats between the tokens of a slow answer.
BEATING = [pytest.param(each, STREAMED, True, id=f"{each.name}, beats") for each in TRIED if STREAMED in each.modes]


@pytest.mark.parametrize(("client", "mode", "beats"), [*CASES, *BEATING])
async def test_a_client_leaves_as_many_exact_segments_as_the_table_says(
    stage: Stage, client: Client, mode: str, beats: bool, tmp_path: Path
) -> None:
    if python_for(client) is None:
        pytest.skip(f"{client.name} needs Python {'.'.join(map(str, client.python))}")
    kind: Any = {"script": client.script(), "reasoning_parser": "qwen3"}
    if beats:
        kind |= {"settings": {"heartbeat_interval": 0.004}, "token_latency_s": 0.01}
    async with simulated_sessions(stage, **kind) as trial:
        session = await trial.create()
        said = await driven(client, mode, f"{trial.router.url}/sessions/{session}/v1", tmp_path)
        assert said.endswith(client.said)
        found = await trial.read(session)
        assert len(found["records"]) == len(trial.log) >= 5
        assert found["metadata"]["untraced"] == []
        reasons = [(record["reason"], record["edit"]) for record in found["records"] if record["parent"] is None]
        assert len(reasons) == client.segments, reasons
        assert all(edit is not None or reason == "sub_agent" for reason, edit in reasons[1:])
        await check_exact(trial, session)
