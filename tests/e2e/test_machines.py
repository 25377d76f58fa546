"""One router on several machines: one fleet, one pause, and one owner of each session, whichever machine is asked."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.machines import Part, RunningMachines, machines
from tests.support.session_trial import SESSIONS, qwen3, user
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

LEASE = 3.0
HI = {"messages": [user("Hi.")], "max_tokens": 4}


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[RunningMachines, SimulatedWorker]]:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        machines(
            lease=LEASE,
            middlewares=(MiddlewareSpec(SESSIONS),),
            hf_checkpoint=tokenizer_directory("qwen3"),
            state_dir=str(directory),
        ) as made,
    ):
        answer = await made.nodes[0].ask("POST", f"/add_worker?url={worker.url}")
        assert answer.status == 200, made.control.log()
        yield made, worker


async def made(node: Part) -> str:
    """A new session of a machine, with one turn."""
    session: str = (await node.answers("POST", "/sessions")).json()["session_id"]
    await node.answers("POST", f"/sessions/{session}/v1/chat/completions", **HI)
    return session


async def turns(node: Part, session: str) -> int:
    return len((await node.answers("GET", f"/sessions/{session}")).json()["records"])


async def test_a_session_is_found_from_any_machine_and_goes_on_where_another_was_stopped(tmp_path: Path) -> None:
    async with running(tmp_path) as (all_, _):
        one, other = all_.nodes
        sessions = [await made(one), await made(other)]
        began = time.time()
        for session in sessions:
            for node in (one, other):
                assert await turns(node, session) == 1
                answer = await node.answers("POST", "/sessions", 409, session_id=session)
                assert b"exists" in answer.body, "the owner has said so"
        listed = [(await node.answers("GET", "/sessions")).json()["sessions"] for node in (one, other)]
        assert [{each["session_id"] for each in found} for found in listed] == [set(sessions)] * 2
        print("A", time.time() - began)
        one.send(signal.SIGSTOP)
        await other.answers("POST", f"/sessions/{sessions[0]}/v1/chat/completions", **HI)
        print("B", time.time() - began)
        assert await turns(other, sessions[0]) == 2
        one.send(signal.SIGCONT)
        await until(lambda: one.process.poll() is not None or "node_fenced" in one.log(), "the stopped one ends")
        assert await turns(other, sessions[0]) == 2
        print("C", time.time() - began, one.log())
