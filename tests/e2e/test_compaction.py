"""Compaction of Responses agents: at the server it is refused with what to set; what an agent does itself is traced."""

from __future__ import annotations

import itertools

from tests.support.session_apis import BOTH, RESPONSES, Api, case
from tests.support.session_trial import simulated_sessions, user
from tests.support.stage import Stage

HINT = "has a `name` other than OpenAI"
KINDS = ("compaction", "compaction_trigger", "compaction_summary", "context_compaction")


async def test_compaction_at_the_server_is_refused_with_what_to_set(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        await Api(RESPONSES).turn(trial, session, "Hi", 8)
        for kind, stream, named in itertools.product(KINDS, BOTH, BOTH):
            with case(kind, stream, named):
                items = [user("Hi"), {"type": kind, "encrypted_content": "x"}]
                error = await Api(RESPONSES, named).refused(trial, session, items, stream=stream)
                assert (error["param"], HINT in error["message"]) == ("input[1].type", True), error
        body = {"model": "m", "input": [user("Hi")], "instructions": ""}
        for prefix, headers in ((f"/sessions/{session}", []), ("", [("X-Session-Id", session)])):
            refused = await trial.ask("POST", f"{prefix}{RESPONSES}/compact", body, headers)
            assert (refused.status, HINT in refused.json()["error"]["message"]) == (400, True), refused.body
        await Api(RESPONSES).turn(trial, session, "Hi", 8)
        assert len(await trial.records(session)) == 2
