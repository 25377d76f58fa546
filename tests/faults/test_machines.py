"""Several machines of one router that are lost, alone, wrong or late: what others do then, and what they do not."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from miles_router.cluster.nodes.machines import HEADER
from miles_router.cluster.nodes.seen import BEATS, Seen
from miles_router.cluster.nodes.stamps import FORWARD, Address, Stamps
from miles_router.cluster.peers import Peers
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.e2e.test_machines import HI, LEASE, outcome, running, stack_of, turn, turns
from tests.support.brake import Brake
from tests.support.fleet import asked, by_path
from tests.support.http import RawReply, ask
from tests.support.machines import Part, RunningMachines, Wire, stand_still, term, wired
from tests.support.session_trial import SESSIONS, qwen3
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

CHAT = "/sessions/{}/v1/chat/completions"


def sessions() -> dict[str, Any]:
    return {"middlewares": (MiddlewareSpec(SESSIONS),), "hf_checkpoint": tokenizer_directory("qwen3")}


def type_of(answer: RawReply) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["type"]


async def test_a_control_plane_that_stood_still_tells_engines_nothing_once_another_one_has_begun(
    stage: Stage, tmp_path: Path
) -> None:
    worker = await stage.worker()
    worker.always(by_path())
    async with running(worker, tmp_path) as router:
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


@pytest.mark.parametrize(("method", "told"), [("POST", (502, "owner_lost")), ("GET", (503, "owner_unavailable"))])
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
        assert await turns(one, session) == 1


async def test_a_request_that_machines_would_send_round_in_a_circle_ends_at_the_second(tmp_path: Path) -> None:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        running(worker, tmp_path / "state", **sessions()) as router,
    ):
        one, other = router.nodes
        session = (await one.answers("POST", "/sessions")).json()["session_id"]
        await turn(other, session)
        beat, target = 0, f"/sessions/{session}"
        peers, lives = Peers(0, 1, tmp_path), router.lives
        stamps = Stamps(router.machines.secret, Address(0, lives[0]), lives.__getitem__, lambda: beat, Seen(peers))

        async def sent_on() -> RawReply:
            """As the first machine would send it, if it took the other for the owner."""
            stamp = stamps.made(FORWARD, 1, "GET", target.encode(), [], b"")
            return await ask(other.url, "GET", target, [(HEADER.decode(), stamp.decode())])

        while b"come too late" in (answer := await sent_on()).body:
            beat += 1
        assert type_of(answer) == (503, "owner_unavailable")
        assert b"is moving" in answer.body
        assert await turns(other, session) == 1


async def test_no_beat_comes_twice_also_where_nobody_is_left_who_knows_the_last_one(tmp_path: Path) -> None:
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        contextlib.AsyncExitStack() as stack,
    ):
        settings = {"state_dir": str(tmp_path / "state"), **sessions()}
        router = RunningMachines(tmp_path, stack_of(stack), 2, LEASE, settings)
        one, other = router.nodes
        wire = await stack.enter_async_context(wired(other.listener))
        other.url = f"http://{wire.address}"
        await router.start()
        await one.answers("POST", f"/add_worker?url={worker.url}")
        before = await stamped_beat(one, wire)
        for part in (router.control, one, other):
            part.send(signal.SIGKILL)
        await router.start()
        assert await stamped_beat(one, wire) > before + BEATS


async def stamped_beat(node: Part, wire: Wire) -> int:
    """Of the stamp by which a machine asks the one behind the wire."""
    wire.sent.clear()
    while HEADER + b": ask " not in wire.sent:  # it asks those that it knows to be there
        await node.answers("GET", "/sessions")
    _, stamp = wire.sent.split(HEADER + b": ask ")[:2]
    return int(stamp.split(b" ")[2])


async def test_a_machine_whose_network_is_lost_refuses_turns_and_the_others_go_on_with_its_sessions(
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
        assert type_of(await asking) == (502, "owner_lost")
        for refused in (("POST", CHAT.format(session)), ("POST", "/generate"), ("GET", f"/sessions/{session}")):
            assert type_of(await other.ask(*refused, **HI)) == (503, "node_unleased"), refused
        await turn(one, session)
        assert await turns(one, session) == 2
        assert "control_plane_silent" in other.log()
        for each in (control, wire):
            each.whole.set()
        await until(lambda: other.process.poll() is not None, "it hears that it has lost what it had")
        assert await turns(one, session) == 2, "what came late did nothing"
