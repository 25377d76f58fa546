"""Compaction of Responses agents: at the server it is refused with what to set; what an agent does itself is traced."""

from __future__ import annotations

import pytest

from tests.support.session_apis import RESPONSES
from tests.support.session_trial import simulated_sessions
from tests.support.stage import Stage

HINT = "has a `name` other than OpenAI"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["compaction", "compaction_trigger", "compaction_summary", "context_compaction"])
async def test_an_item_of_compaction_is_refused_with_what_to_set(stage: Stage, kind: str, stream: bool) -> None:
    async with simulated_sessions(stage, token_latency_s=0.0) as trial:
        session = await trial.create()
        path, body = f"/sessions/{session}{RESPONSES}", {"model": "m", "stream": stream, "max_output_tokens": 8}
        first = await trial.ask("POST", path, {**body, "input": "Hi"})
        assert first.status == 200
        items = [{"role": "user", "content": "Hi"}, {"type": kind, "encrypted_content": "x"}]
        for address, headers in ((path, []), (RESPONSES, [("X-Session-Id", session)])):
            refused = await trial.ask("POST", address, {**body, "input": items}, headers)
            assert refused.status == 400
            error = refused.json()["error"]
            assert (error["param"], HINT in error["message"]) == ("input[1].type", True), error
        assert len(await trial.records(session)) == 1
        assert (await trial.ask("POST", path, {**body, "input": "Hi"})).status == 200


async def test_the_path_of_compaction_is_refused_with_what_to_set(stage: Stage) -> None:
    async with simulated_sessions(stage, token_latency_s=0.0) as trial:
        session = await trial.create()
        body = {"model": "m", "input": [{"role": "user", "content": "Hi"}], "instructions": ""}
        for address, headers in (
            (f"/sessions/{session}{RESPONSES}/compact", []),
            (f"{RESPONSES}/compact", [("X-Session-Id", session)]),
        ):
            refused = await trial.ask("POST", address, body, headers)
            assert (refused.status, HINT in refused.json()["error"]["message"]) == (400, True), refused.body
        assert await trial.records(session) == []
