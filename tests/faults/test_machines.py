"""Several machines of one router that are lost, alone, wrong or late: what others do then, and what they do not."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from miles_router.settings.config import MiddlewareSpec
from miles_router.shards.forwarding import HOP
from miles_router.testing import SimulatedWorker
from tests.e2e.test_machines import HI, LEASE, outcome, running, stack_of, turn, turns
from tests.support.brake import Brake
from tests.support.fleet import asked, by_path
from tests.support.http import RawReply, ask
from tests.support.machines import RunningMachines, stand_still, term, wired
from tests.support.session_trial import SESSIONS, qwen3
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

CHAT = "/sessions/{}/v1/chat/completions"


def sessions() -> dict[str, Any]:
    return {"middlewares": (MiddlewareSpec(SESSIONS),), "hf_checkpoint": tokenizer_directory("qwen3")}


def type_of(answer: RawReply) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["type"]


async def test_a_leader_that_stood_still_tells_engines_nothing_once_another_one_has_begun(
    stage: Stage, tmp_path: Path
) -> None:
    worker = await stage.worker()
    worker.always(by_path())
    # Longer than a leader takes to start, or the machines' leases run out and they end
    async with running(worker, tmp_path, lease=20.0) as router:
        one, _ = router.nodes
        first, router.control = router.control, router.part("next")
        await stand_still(first, tmp_path)
        asking = asyncio.ensure_future(one.ask("POST", "/pause_generation", mode="in_place"))
        before = term(tmp_path)
        router.start_control()
        await until(lambda: term(tmp_path) > before, "another one has begun")
        first.send(signal.SIGCONT)
        assert (await asking).status in (502, 503)
        await until(lambda: first.process.poll() is not None, "it ends")
        assert "/pause_generation" not in asked(worker)
        await one.answers("POST", "/pause_generation", mode="in_place")
        assert "/pause_generation" in asked(worker)


@pytest.mark.parametrize(("method", "told"), [("POST", (502, "upstream_error")), ("GET", (503, "unavailable"))])
async def test_what_a_machine_that_is_lost_may_have_done_is_said_so(tmp_path: Path, method: str, told: Any) -> None:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        running(worker, tmp_path, **sessions()) as router,
    ):
        one, other = router.nodes
        session = (await other.answers("POST", "/sessions")).json()["session_id"]
        await turn(one, session)
        brake = Brake(worker.engine)
        brake.on = True
        late = asyncio.ensure_future(outcome(other, session))
        await until(lambda: worker.running == 1, "a turn is under way")
        other.send(signal.SIGSTOP)
        path = CHAT.format(session) if method == "POST" else f"/sessions/{session}"
        asking = asyncio.ensure_future(one.ask(method, path, **HI))
        other.send(signal.SIGKILL)
        assert type_of(await asking) == told
        brake.on = False
        assert await late == 0
        await router.replace(1)
        assert await turns(one, session) == 1


async def test_a_request_that_was_sent_to_the_wrong_machine_goes_no_further(tmp_path: Path) -> None:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        running(worker, tmp_path / "state", **sessions()) as router,
    ):
        one, other = router.nodes
        session = (await one.answers("POST", "/sessions")).json()["session_id"]
        await turn(other, session)
        hop = [(HOP.decode(), "forward")]  # as the first machine sends it that takes the other for the owner
        answer = await ask(other.url, "GET", f"/sessions/{session}", hop)
        assert type_of(answer) == (503, "unavailable")
        assert await turns(other, session) == 1


async def test_isolated_machine_refuses_turns_and_another_continues_its_sessions(
    tmp_path: Path,
) -> None:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        contextlib.AsyncExitStack() as stack,
    ):
        settings = {"state_dir": str(tmp_path / "state"), **sessions()}
        router = RunningMachines(tmp_path, stack_of(stack), 2, LEASE, settings)
        one, other = router.nodes
        control = await stack.enter_async_context(wired(router.control.listener))
        wire = await stack.enter_async_context(wired(other.listener))
        other.url, direct = f"http://{wire.address}", other.url
        router.start_control()
        router.start_node(0)
        router.start_node(1, control.address)
        for part in (router.control, one, other):
            await part.serves()
        other.url = direct
        await one.answers("POST", f"/add_worker?url={worker.url}")
        session = (await other.answers("POST", "/sessions")).json()["session_id"]
        await turn(one, session)
        assert b"forward" in wire.sent
        for each in (control, wire):
            each.whole.clear()
        asking = asyncio.ensure_future(one.ask("POST", CHAT.format(session), **HI))
        assert type_of(await asking) == (502, "upstream_error")
        for refused in (("POST", CHAT.format(session)), ("POST", "/generate"), ("GET", f"/sessions/{session}")):
            assert type_of(await other.ask(*refused, **HI)) == (503, "unavailable"), refused
        await router.replace(1)
        await turn(one, session)
        assert await turns(one, session) == 2
        assert "leader_silent" in other.log()
        for each in (control, wire):
            each.whole.set()
        await until(lambda: other.process.poll() is not None, "it hears that it has lost what it had")
        assert await turns(one, session) == 2, "what came late did nothing"
