"""Routers under `--state-dir` that are killed, traced, or have no room: real processes and a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from miles_router.slots import slot_of
from miles_router.testing import SimulatedWorker
from tests.support.apart import MOUNTS, STRACE, mounted, traced
from tests.support.http import CutReply, RawReply, ask
from tests.support.running_router import RouterProcess, command, router_process
from tests.support.session_trial import CHAT, SESSIONS, message_of, qwen3, user
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

KILLED = -signal.SIGKILL


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1") as started:
        yield started


@contextlib.asynccontextmanager
async def router(directory: Path, *arguments: str, **options: Any) -> AsyncIterator[RouterProcess]:
    model = ("--middleware-paths", SESSIONS, "--hf-checkpoint", str(tokenizer_directory("qwen3")))
    async with router_process("--state-dir", str(directory), *model, *arguments, **options) as running:
        yield running


async def post(running: RouterProcess, path: str, body: Any, *headers: tuple[str, str]) -> RawReply:
    json_type = ("Content-Type", "application/json")
    return await ask(running.url, "POST", path, [json_type, *headers], json.dumps(body).encode())


async def episode(running: RouterProcess, session: str, messages: list[Any], answered: list[int]) -> None:
    """An agent that goes on until its router is gone; `answered` is how many of its turns were answered."""
    while True:
        stream = len(messages) % 4 == 3
        body = {"model": "m", "max_tokens": 6, "messages": messages, "stream": stream}
        try:
            answer = await post(running, f"/sessions/{session}{CHAT}", body, ("X-Turn-Id", f"t-{len(messages)}"))
        except (OSError, CutReply):
            return  # broken off
        if answer.status != 200 or (stream and not answer.body.rstrip().endswith(b"[DONE]")):
            return
        said = _streamed(answer.body) if stream else message_of(answer.json())["content"]
        messages += [{"role": "assistant", "content": said}, user(f"Go on {len(messages)}")]
        answered[0] += 1


def _answered(answered: dict[str, list[int]], count: int) -> bool:
    return sum(each[0] for each in answered.values()) > count


def _streamed(body: bytes) -> str:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_no_kill_under_running_agents_loses_a_turn_that_was_answered(
    tmp_path: Path, worker: SimulatedWorker
) -> None:
    histories = {f"s-{number}": [user(f"Task {number}")] for number in range(6)}
    answered = {session: [0] for session in histories}
    for number in range(3):
        async with router(tmp_path, expect_status=KILLED) as running:
            if not number:
                assert (await post(running, "/add_worker", {"url": worker.url})).status == 200
                for session in histories:
                    assert (await post(running, "/sessions", {"session_id": session})).status == 200
            before = sum(each[0] for each in answered.values())
            agents = [
                asyncio.ensure_future(episode(running, session, messages, answered[session]))
                for session, messages in histories.items()
            ]
            await until(partial(_answered, answered, before + 30), "turns are answered")
            await kill(running, agents)
    async with router(tmp_path) as running:
        for session, messages in histories.items():
            records = (await ask(running.url, "GET", f"/sessions/{session}?form=compact")).json()["records"]
            held = {json.dumps(record["response"].get("content")) for record in records}
            said = [message["content"] for message in messages if message["role"] == "assistant"]
            assert len(said) == answered[session][0] > 0
            assert {json.dumps(each) for each in said} <= held
            line = max(records, key=lambda record: record["request"]["messages_before"])
            assert line["request"]["messages_before"] >= len(messages) - 3, "all in one segment"
            samples = await post(running, f"/sessions/{session}/samples", {"format": "json"})
            assert samples.status == 200


async def kill(running: RouterProcess, works: Sequence[asyncio.Future[None]]) -> None:
    """Kill a router under work, which ends with it."""
    running.process.kill()
    await asyncio.gather(*works)
    await until(lambda: running.process.poll() is not None, "it is dead")


async def reward(running: RouterProcess, session: str, given: list[int]) -> None:
    """A trainer that rewards the two turns of a session again and again, until its router is gone; `given` has the last
    acknowledged reward of each."""
    for number in itertools.count(max(given) + 1):
        turn = number % 2
        body = [{"turn": turn, "reward": number}, {"turn": turn, "name": "why", "value": f"it is {number}"}]
        try:
            answer = await post(running, f"/sessions/{session}/rewards", body)
        except (OSError, CutReply):
            return  # broken off
        if answer.status != 200:
            return
        given[turn] = number


async def test_no_kill_loses_a_reward_that_was_acknowledged(tmp_path: Path, worker: SimulatedWorker) -> None:
    given = {f"s-{number}": [-1, -1] for number in range(4)}
    for number in range(3):
        async with router(tmp_path, expect_status=KILLED) as running:
            if not number:
                assert (await post(running, "/add_worker", {"url": worker.url})).status == 200
                for session in given:
                    assert (await post(running, "/sessions", {"session_id": session})).status == 200
                    for text in ("Hi", "Hello"):
                        body = {"model": "m", "max_tokens": 4, "messages": [user(text)]}
                        assert (await post(running, f"/sessions/{session}{CHAT}", body)).status == 200
            before = sum(map(sum, given.values()))
            trainers = [asyncio.ensure_future(reward(running, session, own)) for session, own in given.items()]
            await until(partial(_rewarded, given, before + 200), "turns are rewarded")
            await kill(running, trainers)
    async with router(tmp_path) as running:
        for session, own in given.items():
            records = (await ask(running.url, "GET", f"/sessions/{session}?form=compact")).json()["records"]
            for record, acknowledged in zip(records, own, strict=True):
                number, why = [each["value"] for each in record["rewards"]]
                assert number >= acknowledged > 0
                assert why == f"it is {number}", "a list is set as a whole"


def _rewarded(given: dict[str, list[int]], count: int) -> bool:
    return sum(map(sum, given.values())) > count


async def listed(running: RouterProcess, query: str = "") -> list[Any]:
    """All episodes, three a page."""
    found, after = [], ""
    while True:
        answer = await ask(running.url, "GET", f"/router/episodes?limit=3{query}{after}")
        assert answer.status == 200, answer.body
        page = answer.json()
        found += page["episodes"]
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"


async def test_sessions_that_nobody_has_named_since_a_kill_are_listed_and_not_loaded(
    tmp_path: Path, worker: SimulatedWorker
) -> None:
    async with router(tmp_path, expect_status=KILLED) as running:
        assert (await post(running, "/add_worker", {"url": worker.url})).status == 200
        for number in range(8):
            made = {"session_id": f"s-{number}", "metadata": {"group": f"g-{number % 2}", "label": f"label {number}"}}
            assert (await post(running, "/sessions", {**made, "contract": {"budget": {"max_turns": 2}}})).status == 200
            for text in ("Hi", "Hello", "Once more")[: number % 4]:
                body = {"model": "m", "max_tokens": 4, "messages": [user(text)]}
                await post(running, f"/sessions/s-{number}{CHAT}", body)
        before = await listed(running)
        running.process.kill()
        await until(lambda: running.process.poll() is not None, "it is dead")
    assert [row["id"] for row in before] == [f"s-{number}" for number in range(7, -1, -1)]
    assert {row["state"] for row in before} == {"idle", "ended"}
    assert before[0]["reasons"] == {"sub_agent": 1}

    def alike(rows: list[Any]) -> list[Any]:
        return [{**row, "tokens": {**row["tokens"], "trained": None}, "last_used_at": None} for row in rows]

    async with router(tmp_path) as running:
        after = await listed(running)
        assert {row["tokens"]["trained"] for row in after} == {None}
        assert alike(after) == alike(before)
        used = [[row["last_used_at"] for row in rows] for rows in (after, before)]
        assert used[0] == pytest.approx(used[1], abs=1.0)
        for query, takes in (
            ("group=g-1", lambda row: row["group"] == "g-1"),
            ("reason=sub_agent", lambda row: "sub_agent" in row["reasons"]),
            (f"worker={worker.url}", lambda row: row["workers"]),
            ("state=ended", lambda row: row["state"] == "ended"),
        ):
            wanted = [row["id"] for row in before if takes(row)]
            assert [row["id"] for row in await listed(running, f"&{query}")] == wanted != []
        told = (await ask(running.url, "GET", "/router/info")).json()["statistics"]["openai_sessions"]
        assert told["sessions"] == 0, "none is loaded"
        assert (await ask(running.url, "GET", "/router/episodes/s-7")).status == 200
        assert (await post(running, "/sessions", {"session_id": "new"})).status == 200
        assert (await ask(running.url, "DELETE", "/sessions/s-3")).status == 204
        rows = await listed(running)
        assert [row["id"] for row in rows] == ["new", "s-7", "s-6", "s-5", "s-4", "s-2", "s-1", "s-0"]
        trained = before[0]["tokens"]["trained"]
        assert rows[1]["tokens"]["trained"] == trained > 0, "it is in memory now"


async def test_registered_workers_are_there_again(tmp_path: Path, worker: SimulatedWorker) -> None:
    given = {"url": worker.url, "model_id": "policy", "worker_type": "regular"}
    async with router(tmp_path, "--model-id", "policy", expect_status=KILLED) as running:
        assert (await post(running, "/workers", given)).status == 201
        assert (await post(running, "/workers", {**given, "url": "http://127.0.0.1:9"})).status == 201
        assert (await ask(running.url, "DELETE", "/workers/http%3A%2F%2F127.0.0.1%3A9")).status == 200
        running.process.kill()
        await until(lambda: running.process.poll() is not None, "it is dead")
    async with router(tmp_path, "--model-id", "policy") as running:
        (known,) = (await ask(running.url, "GET", "/workers")).json()["workers"]
        assert (known["url"], known["model_id"]) == (worker.url, "policy")
        session = (await post(running, "/sessions", {})).json()["session_id"]
        body = {"model": "policy", "max_tokens": 4, "messages": [user("Hi")]}
        assert (await post(running, f"/sessions/{session}{CHAT}", body)).status == 200
        assert worker.log.at(CHAT)[-1].json()["extra_key"], "nothing is taken from caches that an earlier run filled"


async def test_a_second_router_on_one_directory_does_not_start(tmp_path: Path) -> None:
    async with router_process("--state-dir", str(tmp_path)):
        with pytest.raises(AssertionError, match=r"state_dir: .*control\.sqlite: another running router has it open"):
            async with router_process("--state-dir", str(tmp_path)):
                pass


@mounted
async def test_a_turn_without_room_is_refused_by_name_and_goes_on_with_room(worker: SimulatedWorker) -> None:
    fill = "mount -t tmpfs -o size=3m none /mnt && head -c 2500000 /dev/zero > /mnt/ballast"
    under = (*MOUNTS, "sh", "-c", f'{fill} && exec "$0" "$@"')
    async with router(Path("/mnt/state"), "--worker-urls", worker.url, start=command(*under)) as running:
        assert (await post(running, "/sessions", {"session_id": "s"})).status == 200
        body: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [user("x" * 30_000)]}
        answered = 0
        while (answer := await post(running, f"/sessions/s{CHAT}", body)).status == 200:
            answered += 1
            body["messages"] = [user(f"{answered}" + "x" * 30_000)]
        assert (answer.status, answer.error_type) == (507, "state_failed")
        generated = len(worker.log.at(CHAT))
        stream = await post(running, f"/sessions/s{CHAT}", {**body, "stream": True})
        assert (stream.status, stream.error_type) == (507, "state_failed")
        assert len(worker.log.at(CHAT)) == generated, "nothing is generated that could not be held"
        assert len((await ask(running.url, "GET", "/sessions/s")).json()["records"]) >= answered
        records = (await ask(running.url, "GET", "/sessions/s")).json()["records"]
        kept = await ask(running.url, "DELETE", "/sessions/s")
        assert (kept.status, kept.error_type) == (507, "state_failed")
        assert (await ask(running.url, "GET", "/sessions/s")).json()["records"] == records
        os.unlink(f"/proc/{running.process.pid}/root/mnt/ballast")
        assert (await post(running, f"/sessions/s{CHAT}", {**body, "messages": [user("Now")]})).status == 200
        assert (await ask(running.url, "DELETE", "/sessions/s")).status == 204


@traced
async def test_the_disk_has_a_turn_before_its_agent_sees_the_end(tmp_path: Path, worker: SimulatedWorker) -> None:
    trace = tmp_path / "trace"
    calls = "trace=fdatasync,fsync,write,writev,sendto,sendmsg,pwrite64"
    under = (*STRACE, "-s", "100000", "-o", str(trace), "-e", calls)
    sync = ("--worker-urls", worker.url, "--state-sync", "machine")
    async with router(tmp_path / "state", *sync, start=command(*under)) as running:
        assert (await post(running, "/sessions", {"session_id": "s"})).status == 200
        body = {"model": "m", "max_tokens": 4, "messages": [user("Hi")]}
        whole = await post(running, f"/sessions/s{CHAT}", body)
        stream = await post(running, f"/sessions/s{CHAT}", {**body, "stream": True})
        assert whole.status == stream.status == 200
        ends = [f'"id\\":\\"{whole.json()["id"]}'.encode(), b"data: [DONE]"]
    await until(lambda: b"+++ exited with 0 +++" in trace.read_bytes().splitlines()[-1], "all is written down")
    lines = trace.read_bytes().splitlines()
    wal = f"slot-{slot_of('s'):02d}.sqlite-wal>".encode()
    for end in ends:
        told = next(at for at, line in enumerate(lines) if end in line and _to_a_client(line))
        wrote = max(at for at, line in enumerate(lines[:told]) if b"pwrite64" in line and wal in line)
        assert any(re.search(rb"sync\(\d+<[^>]*" + wal, line) for line in lines[wrote:told]), end


def _to_a_client(line: bytes) -> bool:
    return b"<TCP:" in line or b"<socket:" in line
