"""One router on several machines: one fleet, one pause, and one owner of each session, whichever machine is asked."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router import cli
from miles_router.serving.process import SUCCEEDED
from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from tests.support.brake import Brake
from tests.support.cache_trial import checkpoint
from tests.support.fleet import asked, by_path
from tests.support.http import CutReply, RawReply, ask
from tests.support.machines import Part, RunningMachines, machines, stand_still, wired
from tests.support.metrics import metrics, total
from tests.support.scripted_worker import BODY, ScriptedWorker, reply, script
from tests.support.session_trial import SESSIONS, qwen3, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import STEP, until

LEASE = 6.0
TEXTS = (MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware"),)
LENGTH = {"max_new_tokens": 6, "ignore_eos": True}
ENTRIES = "miles_router_radix_tree_entries"
HI: dict[str, Any] = {"messages": [user("Hi.")], "max_tokens": 4}


@contextlib.asynccontextmanager
async def running(
    worker: SimulatedWorker | ScriptedWorker, directory: Path, *, lease: float = LEASE, **settings: Any
) -> AsyncIterator[RunningMachines]:
    """Two machines before one worker, which was registered at one of them."""
    async with machines(lease=lease, state_dir=str(directory), **settings) as made:
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


async def test_a_session_is_found_from_any_machine_and_goes_on_in_the_next_shard(
    tmp_path: Path,
) -> None:
    sessions: Any = {"middlewares": (MiddlewareSpec(SESSIONS),), "hf_checkpoint": tokenizer_directory("qwen3")}
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        running(worker, tmp_path, **sessions) as router,
    ):
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

        brake = Brake(worker.engine)
        brake.on = True
        late = asyncio.ensure_future(outcome(one, made[0]))
        await until(lambda: worker.running == 1, "a turn is under way")
        one.send(signal.SIGSTOP)
        brake.on = False
        await other.answers("POST", "/pause_generation", mode="in_place")
        processes = (await other.answers("GET", "/router/info")).json()["processes"]
        assert len(processes) == 1, "it was answered when the stopped one could not generate any more"
        await other.answers("POST", "/continue_generation")
        assert (await other.ask("GET", "/sessions")).status == 503, "what the others have is not all there is"
        await router.replace(0)
        await turn(other, made[0])
        assert await turns(other, made[0]) == 3
        one.send(signal.SIGCONT)
        assert await late != 200, "it commits nothing, and so its client has no answer"
        await until(lambda: one.process.poll() is not None, "it ends, for what it knows is no longer true")
        assert [await turns(other, session) for session in made] == [3, 2]


async def test_a_pause_holds_on_all_machines_and_under_the_leader_that_succeeds_another(
    stage: Stage, tmp_path: Path
) -> None:
    worker, gate = await stage.worker(), asyncio.Event()
    worker.always(by_path(generate=script(BODY, gate, reply())))
    async with running(worker, tmp_path) as router:
        one, other = router.nodes
        await one.answers("POST", "/pause_generation", mode="in_place")
        waiting = asyncio.ensure_future(other.ask("POST", "/generate", text="Hi"))
        assert (await one.answers("GET", "/router/info")).json()["gate"]["closed"]

        first, router.control = router.control, router.part("next")
        router.start_control()
        await until(lambda: first.process.poll() is not None, "the first one has seen that another decides")
        assert first.process.returncode == SUCCEEDED
        info = (await other.answers("GET", "/router/info")).json()
        assert (info["gate"]["closed"], info["workers_total"], len(info["processes"])) == (True, 1, 2)
        assert not waiting.done()
        assert "/generate" not in asked(worker)
        await other.answers("POST", "/continue_generation")

        await until(lambda: "/generate" in asked(worker), "the generation is at the worker")
        drained = asyncio.ensure_future(one.ask("POST", "/remove_worker", url=worker.url, drain=True))
        while not (info := (await one.answers("GET", "/router/info")).json())["workers_draining"]:  # noqa: ASYNC110  # a request
            await asyncio.sleep(STEP)
        assert (info["in_flight"], drained.done()) == (1, False), "another machine has a request there"
        gate.set()
        assert (await waiting).status == 200
        assert (await drained).json()["worker_urls"] == {}

        reader, writer = await asyncio.open_connection("127.0.0.1", router.control.listener.getsockname()[1])
        writer.write(bytes(64))
        assert len(await reader.read()) == 64, "who does not know the secret hears that the other side does: no more"
        writer.close()
        await writer.wait_closed()
        await until(lambda: "connection_not_authenticated" in router.control.log(), "it is told")


KEYS = {"api_key": "clients", "admin_api_key": "admins"}


async def with_key(node: Part, key: str | None, method: str, target: str, **fields: Any) -> RawReply:
    """The first answer that is no 503 to a request with this key."""
    headers = [("Content-Type", "application/json"), *([("Authorization", f"Bearer {key}")] if key else [])]
    body = orjson.dumps(fields) if method == "POST" else None
    while (answer := await ask(node.url, method, target, headers, body)).status == 503:  # noqa: ASYNC110  # each look is a request
        await asyncio.sleep(STEP)
    return answer


async def raw(node: Part, request: bytes) -> RawReply:
    """The answer to these bytes."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    kept = [pair for pair in headers if pair[0] not in ("host", "content-length")]
    return await ask(node.url, method, target, kept, body if method == "POST" else None)


async def test_a_request_that_is_forwarded_brings_its_client_s_key_and_shows_no_secret(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"middlewares": (MiddlewareSpec(SESSIONS),), **KEYS}
    settings["hf_checkpoint"] = tokenizer_directory("qwen3")
    async with (
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as worker,
        contextlib.AsyncExitStack() as stack,
    ):
        router = RunningMachines(
            tmp_path, stack_of(stack), 2, LEASE, {"state_dir": str(tmp_path / "state"), **settings}
        )
        wire = await stack.enter_async_context(wired(router.nodes[1].listener))
        router.nodes[1].url, direct = f"http://{wire.address}", router.nodes[1].url
        await router.start()
        one, other = router.nodes
        other.url = direct
        assert (await with_key(one, "admins", "POST", f"/add_worker?url={worker.url}")).status == 200
        session = (await with_key(other, "clients", "POST", "/sessions")).json()["session_id"]
        while not wire.sent:  # each look is a request
            await with_key(one, "clients", "GET", "/sessions")
        listing = bytes(wire.sent)
        wire.sent.clear()
        turn = f"/sessions/{session}/v1/chat/completions"
        assert (await with_key(one, "clients", "POST", turn, **HI)).status == 200
        sent = bytes(wire.sent)
        assert b"x-miles-router-hop: forward\r\n" in sent
        wire.sent.clear()
        assert (await with_key(one, "clients", "POST", f"/episodes/{session}/audit")).status == 200
        assert b"x-miles-router-hop: forward\r\n" in wire.sent, "not asked: nobody knows how long it takes"
        for each in (listing, sent):
            assert router.shards.secret.encode() not in each
            assert b"Bearer clients" in each
            for other_key in (b"Bearer admins2", b"Basic clients"):
                assert (await raw(other, each.replace(b"Bearer clients", other_key))).status == 401
        records = (await with_key(other, "clients", "GET", f"/sessions/{session}")).json()["records"]
        assert len(records) == 1


def stack_of(stack: contextlib.AsyncExitStack) -> contextlib.ExitStack:
    """One that ends with the other."""
    return stack.enter_context(contextlib.ExitStack())


async def test_a_leader_that_is_lost_without_a_word_is_left_for_the_one_that_is_named_next(
    stage: Stage, tmp_path: Path
) -> None:
    worker = await stage.worker()
    worker.always(by_path(generate=script(BODY, reply())))
    async with running(worker, tmp_path) as router:
        one, other = router.nodes
        first, router.control = router.control, router.part("next")
        await stand_still(first, tmp_path)  # its connections stay, and nothing comes by them
        asking = asyncio.ensure_future(one.ask("POST", "/remove_worker", url="http://127.0.0.1:1"))
        router.start_control()
        await router.control.serves()
        assert (await asking).json()["error"]["type"] == "unavailable", "nobody knows what the first one did"
        await other.answers("POST", "/generate", text="Hi")
        assert len((await other.answers("GET", "/router/info")).json()["processes"]) == 2
        assert all("leader_silent" in node.log() for node in router.nodes)
        first.send(signal.SIGCONT)
        await until(lambda: first.process.poll() is not None, "it has seen that another decides")
        assert first.process.returncode == SUCCEEDED


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["ray", "--nodes", "2"])
    assert ended.value.code == 2
    assert "miles-router[ray]" in capsys.readouterr().err


async def test_a_text_goes_on_from_any_machine_and_under_the_next_shard(
    tmp_path: Path,
) -> None:
    async with (
        SimulatedWorker(tokenizer=checkpoint()) as worker,
        running(worker, tmp_path, middlewares=TEXTS, hf_checkpoint=checkpoint()) as router,
    ):
        one, other = router.nodes
        text, sampled = "Once upon a time", list[int]()
        for number, node in enumerate((one, other, one, other)):
            if number == 2:
                holder = (await entries(router)).index(2)
                router.nodes[holder].send(signal.SIGKILL)
                await router.replace(holder)
                one, other = router.nodes
                node = one
            answer = (await node.answers("POST", "/generate", text=text, sampling_params=LENGTH)).json()
            text += answer["text"]
            sampled += answer["output_ids"]
            found = (await other.answers("POST", "/retrieve_from_text", text=text)).json()
            mask = found["loss_mask"]
            assert [each for each, is_sampled in zip(found["tokens"], mask, strict=True) if is_sampled] == sampled
        assert sorted(await entries(router)) == [0, 4], "all of it is in one shard"


async def entries(router: RunningMachines) -> list[float]:
    """How many texts each machine has."""
    text = await metrics(router.nodes[0].url)
    return [total(text, ENTRIES, shard=str(index)) for index in range(len(router.nodes))]


async def test_a_shard_that_does_not_see_the_leaders_lock_is_refused(tmp_path: Path) -> None:
    """Another directory under the same name, or a file system whose locks end at the machine: the shard can lock what
    the leader has locked."""
    async with SimulatedWorker() as worker, running(worker, tmp_path / "shared") as router:
        node = router.nodes[1]
        node.send(signal.SIGKILL)
        router.start_node(1, state_dir=str(tmp_path / "own"))
        await until(lambda: node.process.poll() is not None, "it ends")
        assert "the leader's lock is not seen here" in node.log()
        assert not (tmp_path / "own" / "slot-01.sqlite").exists(), "nothing was changed"


async def test_a_state_directory_of_another_default_model_is_refused_by_each_process(tmp_path: Path) -> None:
    async with SimulatedWorker() as worker, running(worker, tmp_path, model_id="solver") as router:
        node = router.nodes[1]
        node.send(signal.SIGKILL)
        router.start_node(1, model_id="coder")
        await until(lambda: node.process.poll() is not None, "it ends")
        assert "its --model-id is 'coder', and the leader's is 'solver'" in node.log()
    with pytest.raises(AssertionError, match="of the model 'solver', not of 'coder'"):
        async with machines(lease=LEASE, state_dir=str(tmp_path), model_id="coder"):
            pass
