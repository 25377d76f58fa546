"""One router on several machines: one fleet, one pause, and one owner of each session, whichever machine is asked."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.http import CutReply
from tests.support.machines import Part, RunningMachines, machines
from tests.support.session_trial import SESSIONS, qwen3, user
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

LEASE = 3.0
HI: dict[str, Any] = {"messages": [user("Hi.")], "max_tokens": 4}


@contextlib.asynccontextmanager
async def running(directory: Path, **settings: Any) -> AsyncIterator[RunningMachines]:
    """Two machines before one worker, which was registered at one of them."""
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        machines(lease=LEASE, state_dir=str(directory), **settings) as made,
    ):
        answer = await made.nodes[0].ask("POST", f"/add_worker?url={worker.url}")
        assert answer.status == 200, made.control.log()
        yield made


async def turn(node: Part, session: str) -> None:
    await node.answers("POST", f"/sessions/{session}/v1/chat/completions", 200, **HI)


async def turns(node: Part, session: str) -> int:
    return len((await node.answers("GET", f"/sessions/{session}")).json()["records"])


async def outcome(node: Part, session: str) -> int:
    """The status of a turn; 0 where its connection ended."""
    try:
        return (await node.ask("POST", f"/sessions/{session}/v1/chat/completions", **HI)).status
    except (CutReply, OSError):
        return 0


async def test_a_session_is_found_from_any_machine_and_goes_on_at_another_while_its_own_is_stopped(
    tmp_path: Path,
) -> None:
    sessions = {"middlewares": (MiddlewareSpec(SESSIONS),), "hf_checkpoint": tokenizer_directory("qwen3")}
    async with running(tmp_path, **sessions) as router:
        one, other = router.nodes
        made = [(await node.answers("POST", "/sessions")).json()["session_id"] for node in (one, other)]
        for session in made:
            for count, node in enumerate((one, other), 1):
                await turn(node, session)
                assert await turns(node, session) == count
                again = await node.answers("POST", "/sessions", 409, session_id=session)
                assert b"exists" in again.body, "its owner says so, whom its body alone names"
        for node in (one, other):
            listed = (await node.answers("GET", "/sessions")).json()["sessions"]
            assert {each["session_id"] for each in listed} == {*made}

        one.send(signal.SIGSTOP)
        late = [asyncio.ensure_future(outcome(one, session)) for session in made]
        await turn(other, made[0])
        assert await turns(other, made[0]) == 3
        one.send(signal.SIGCONT)
        assert not {200} & {*await asyncio.gather(*late)}, "it does nothing of what came while it was stopped"
        await until(lambda: one.process.poll() is not None, "it ends, for what it knows is no longer true")
        assert [await turns(other, session) for session in made] == [3, 2]


async def test_a_pause_holds_on_all_machines_and_outlives_the_control_plane(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        one, other = router.nodes
        await other.answers("POST", "/generate", text="Hi", sampling_params={"max_new_tokens": 2})
        await one.answers("POST", "/pause_generation", mode="in_place")
        waiting = asyncio.ensure_future(other.ask("POST", "/generate", text="Hi"))
        assert (await one.answers("GET", "/router/info")).json()["gate"]["closed"]
        router.control.send(signal.SIGKILL)
        router.start_control()
        info = (await other.answers("GET", "/router/info")).json()
        assert (info["gate"]["closed"], info["workers_total"], len(info["processes"])) == (True, 1, 2)
        assert not waiting.done()
        await other.answers("POST", "/continue_generation")
        assert (await waiting).status == 200


async def test_who_does_not_know_the_secret_is_no_process_of_the_router(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        port = router.control.listener.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(64))
        assert len(await reader.read()) == 32, "a random text, and then the end"
        writer.close()
        assert "stranger_refused" in router.control.log()
