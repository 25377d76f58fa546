"""Each fault of `SimulatedWorker` at a real socket, and its life: kill, restart, registration, the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote

import aiohttp
import orjson
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker import cli
from miles_router.testing.worker.faults import Faults
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.under_way import under_way
from tests.support.waiting import soon, until

SHORT = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
LONG = {"text": "Hello", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    async with SimulatedWorker() as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def ask(session: aiohttp.ClientSession, worker: SimulatedWorker, body: Any = SHORT, **options: Any) -> Any:
    async with session.post(worker.url + "/generate", json=body, **options) as response:
        return await response.json()


class Wire:
    """One raw request, and the bytes that come back for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def send(cls, worker: SimulatedWorker, body: Any = SHORT) -> Wire:
        reader, writer = await asyncio.open_connection(worker.host, worker.port)
        raw = orjson.dumps(body)
        head = b"POST /generate HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(raw) + raw)
        return cls(reader, writer)

    async def answer(self) -> bytes:
        head = await soon(self.reader.readuntil(b"\r\n\r\n"))
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = await soon(self.reader.readexactly(length))
        self.writer.transport.abort()
        return body

    async def until_end(self) -> tuple[bytes, bool]:
        """Everything received, and whether the connection was reset rather than closed."""
        received, was_reset = b"", False
        try:
            while chunk := await soon(self.reader.read(65536)):
                received += chunk
        except ConnectionResetError:
            was_reset = True
        self.writer.transport.abort()
        return received, was_reset


# Faults


async def test_hang_reads_the_request_and_never_answers(worker: SimulatedWorker) -> None:
    worker.faults.hang()
    wire = await Wire.send(worker)
    await until(lambda: len(worker.log), "it was read")
    assert worker.log.last.json() == SHORT
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(wire.reader.read(1), 0.05)
    assert not worker.log.last.done
    wire.writer.transport.abort()
    await worker.log.wait_for(lambda log: log.last.disconnected)
    assert worker.log.last.status is None


async def test_slow_delays_the_first_byte_and_every_further_chunk(
    worker: SimulatedWorker, session: aiohttp.ClientSession
) -> None:
    worker.faults.slow(first_byte_s=0.03, per_chunk_s=0.01)
    began = time.perf_counter()
    async with session.post(worker.url + "/generate", json={**SHORT, "stream": True}) as response:
        assert time.perf_counter() - began >= 0.03
        body = await response.read()
    assert time.perf_counter() - began >= 0.03 + 4 * 0.01
    assert body.endswith(b"data: [DONE]\n\n")


#: What is planned, whether the answer is a stream, what comes of it, and whether the connection is reset.
BREAKS: dict[str, tuple[Callable[[Faults], object], bool, bytes, bool]] = {
    "inside the head": (Faults.reset_in_headers, False, b"HTTP/1\\.1 200 OK\r\n(?!.*\r\n\r\n).*", True),
    "inside the body": (lambda faults: faults.reset_in_body(after_bytes=100), False, b".*\r\n\r\n.{100}", True),
    "inside a stream": (lambda faults: faults.reset_in_body(after_bytes=300), True, b"(?!.*DONE).*data: {.*", True),
    "at its end": (lambda faults: faults.reset_in_body(after_bytes=10**6), True, b"(?!.*0\r\n\r\n$).*DONE.*", True),
    "in order": (lambda faults: faults.cut_body(after_bytes=10), False, b".*\r\n\r\n.{10}", False),
    "without a byte": (Faults.close, False, b"", False),
    "with no HTTP": (lambda faults: faults.garbage(b"\x00\xff"), False, b"\x00\xff", False),
}


@pytest.mark.parametrize(("plan", "stream", "left", "resets"), BREAKS.values(), ids=BREAKS)
async def test_an_answer_is_broken_off_as_planned(
    worker: SimulatedWorker, plan: Callable[[Faults], object], stream: bool, left: bytes, resets: bool
) -> None:
    plan(worker.faults)
    received, was_reset = await (await Wire.send(worker, {**SHORT, "stream": stream})).until_end()
    assert (re.fullmatch(left, received, re.DOTALL) is not None, was_reset) == (True, resets), received
    await worker.log.wait_for(lambda log: log.last.done)
    assert not worker.log.last.disconnected, "it is not taken for a client that left"


async def test_a_status_comes_with_its_body_and_headers(
    worker: SimulatedWorker, session: aiohttp.ClientSession
) -> None:
    worker.faults.status(503, b"busy", headers={"Content-Type": "text/plain", "Retry-After": "1"})
    async with session.post(worker.url + "/generate", json=SHORT) as response:
        assert (response.status, await response.read()) == (503, b"busy")
        assert response.headers["Retry-After"] == "1"
    assert worker.log.last.status == 503
    assert worker.log.generations == [], "the engine was not asked"


async def test_faults_end_and_leave_other_paths_alone(worker: SimulatedWorker, session: aiohttp.ClientSession) -> None:
    worker.faults.status(500, path="/generate", times=2)
    statuses = []
    for path in ("/health", "/generate", "/generate", "/generate"):
        async with session.request("GET" if path == "/health" else "POST", worker.url + path, json=SHORT) as response:
            statuses.append(response.status)
    assert statuses == [200, 500, 500, 200]


async def test_a_worker_that_breaks_off_is_not_taken_for_a_client_that_left(worker: SimulatedWorker) -> None:
    for plan in (worker.faults.close, worker.faults.reset_in_headers, worker.faults.reset_in_body):
        plan()
        await (await Wire.send(worker)).until_end()
        await worker.log.wait_for(lambda log: log.last.done)
        assert not worker.log.last.disconnected


# Life


async def test_kill_resets_every_connection_and_restart_listens_on_the_same_port(worker: SimulatedWorker) -> None:
    worker.engine.token_latency_s = 0.001
    port = worker.port
    wire = await Wire.send(worker, {**LONG, "stream": True})
    await wire.reader.readuntil(b"data: {")
    await worker.kill()
    received, was_reset = await wire.until_end()
    assert was_reset
    assert b"[DONE]" not in received
    assert worker.running == 0
    with pytest.raises(ConnectionRefusedError):
        await Wire.send(worker)
    await worker.restart()
    assert worker.port == port
    assert orjson.loads(await (await Wire.send(worker)).answer())["output_ids"]


async def test_a_client_that_leaves_aborts_its_generation(
    worker: SimulatedWorker, session: aiohttp.ClientSession
) -> None:
    worker.engine.token_latency_s = 0.001
    for stream in (False, True):
        async with under_way(ask(session, worker, {**LONG, "stream": stream})):
            await until(lambda: any(each.output_ids for each in worker.engine.running.values()), "it has begun")
        await worker.log.wait_for(lambda log: log.last.disconnected)
        await worker.log.wait_for(lambda log: worker.running == 0)
        record = worker.log.last.generation
        assert 0 < len(record.output_ids) < 4000
        assert record.finish_reason is None


async def test_it_registers_itself_once_the_router_answers() -> None:
    async with ScriptedWorker() as router:
        router.refuse()
        router.next(script(reply(b"", 503)))
        async with SimulatedWorker(router_url=f"{router.url}/") as worker:
            await router.listen()
            await until(lambda: len(router.requests) == 2, "it has asked again")
    asked = [(each.method, unquote(each.target.decode())) for each in router.requests]
    assert asked == [("POST", f"/add_worker?url={worker.url}")] * 2


async def test_a_prompt_that_real_workers_die_of_is_refused(
    worker: SimulatedWorker, session: aiohttp.ClientSession
) -> None:
    answer = await ask(session, worker, {"input_ids": [1, 10**6]})
    assert "a real worker would crash" in answer["error"]["message"]


async def test_an_api_key_is_asked_for_except_by_probes(session: aiohttp.ClientSession) -> None:
    async with SimulatedWorker(api_key="secret") as worker:
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            async with session.get(worker.url + "/model_info", headers=headers) as response:
                assert response.status == status
        async with session.get(worker.url + "/health") as response:
            assert response.status == 200


# The command


@contextlib.asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "miles_router.testing.worker.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_the_command_starts_workers_and_ends_well_at_sigterm(session: aiohttp.ClientSession) -> None:
    async with command("--count", "2", "--seed", "7", "--weight-version", "3", "--log-level", "warning") as process:
        assert process.stdout is not None
        banners = [(await soon(process.stdout.readline())).decode() for _ in range(2)]
        urls = [next(word for word in banner.split() if word.startswith("http")) for banner in banners]
        assert all("model=simulated-model" in banner and "seed=7" in banner for banner in banners)
        assert len(set(urls)) == 2
        for url in urls:
            async with session.get(url + "/model_info") as response:
                assert (await response.json())["weight_version"] == "3"
        process.send_signal(signal.SIGTERM)
        _, errors = await soon(process.communicate())
        assert (process.returncode, errors) == (0, b"")


def test_the_command_refuses_what_it_cannot_use_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, value, complaint in (
        ("--moe", "4x8", "expected LAYERSxEXPERTSxTOPK such as 4x8x2, got '4x8'"),
        ("--count", "0", "--count must be at least 1"),
        ("--tokenizer", "/nowhere", "no tokenizer.json in /nowhere"),
        ("--script", "/nowhere", "[Errno 2] No such file or directory: '/nowhere'"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([argument, value])
        assert ended.value.code == 2, argument
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {complaint}")
