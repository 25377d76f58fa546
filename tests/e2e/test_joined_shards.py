"""A leader and shards that a platform starts one by one, each with a state directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from miles_router import cli
from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import checkpoint
from tests.support.forks import ForkedRouter, fork_router
from tests.support.http import RawReply, ask
from tests.support.ports import free_ports
from tests.support.session_trial import SESSIONS, user
from tests.support.waiting import STEP, until

JSON = [("Content-Type", "application/json")]
TEXTS = "middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
HI = {"messages": [user("Hi.")], "max_tokens": 4}
COUNT = 2


class Joined:
    """One router: `parts[0]` is the leader, `parts[1:]` its shards."""

    def __init__(self, directory: Path, worker: str) -> None:
        self.ports = free_ports(COUNT + 1)
        self.parts: list[ForkedRouter] = []
        self.logs = [directory / f"{index}.log" for index in range(COUNT + 1)]
        self._directory = directory
        self._worker = worker
        (directory / "secret").write_text("a secret that all of them have\n", encoding="utf-8")

    def command(self, place: int, count: int) -> list[str]:
        own = ["--leader"]
        if place:
            own = ["--join", f"127.0.0.1:{self.ports[0]}", "--shard", str(place - 1)]
            own += ["--url", f"http://127.0.0.1:{self.ports[place]}"]
        settings = ["--shards", str(count), "--secret-file", str(self._directory / "secret"), "--log-level", "info"]
        settings += ["--state-dir", str(self._directory / f"state-{place}"), "--worker-urls", self._worker]
        settings += ["--middleware-paths", SESSIONS, TEXTS, "--hf-checkpoint", checkpoint()]
        return [*own, *settings, "--port", str(self.ports[place])]

    def start(self, place: int, count: int = COUNT) -> None:
        log = self.logs[place]
        log.touch()
        Path(f"{log}.status").unlink(missing_ok=True)
        self.parts[place : place + 1] = [fork_router(self.command(place, count), str(log), os.environ, checkpoint())]

    async def ask(self, shard: int, method: str, path: str, **fields: object) -> RawReply:
        """The first answer of a shard that is no 503."""
        body = orjson.dumps(fields) if method == "POST" else None
        while True:
            with contextlib.suppress(OSError):
                answer = await ask(f"http://127.0.0.1:{self.ports[shard + 1]}", method, path, JSON, body)
                if answer.status != 503:
                    return answer
            await asyncio.sleep(STEP)

    async def turn(self, shard: int, session: str) -> None:
        answer = await self.ask(shard, "POST", f"/sessions/{session}/v1/chat/completions", **HI)
        assert answer.status == 200, answer.body

    async def turns(self, shard: int, session: str) -> int:
        return len((await self.ask(shard, "GET", f"/sessions/{session}")).json()["records"])

    async def kill(self) -> None:
        """Kill all that run."""
        for part in self.parts:
            part.kill()
        await until(lambda: all(part.poll() is not None for part in self.parts), "all have ended")


@contextlib.asynccontextmanager
async def joined() -> AsyncIterator[Joined]:
    with tempfile.TemporaryDirectory(prefix="joined-") as directory:
        async with SimulatedWorker(tokenizer=checkpoint(), weight_version="1") as worker:
            made = Joined(Path(directory), worker.url)
            try:
                yield made
            finally:
                await made.kill()


async def test_joined_shards_are_one_router_and_survive_kills() -> None:
    async with joined() as router:
        for place in range(COUNT + 1):
            router.start(place)
        sessions = []
        for shard in range(COUNT):
            made = (await router.ask(shard, "POST", "/sessions")).json()
            assert made["owner_url"].startswith(f"http://127.0.0.1:{router.ports[shard + 1]}")
            sessions.append(made["session_id"])
        for session in sessions:
            for shard in range(COUNT):
                await router.turn(shard, session)
        text = "Once upon a time"
        length = {"max_new_tokens": 6, "ignore_eos": True}
        first = (await router.ask(0, "POST", "/generate", text=text, sampling_params=length)).json()
        told = (await router.ask(1, "POST", "/retrieve_from_text", text=text + first["text"])).json()
        assert told["tokens"][-6:] == first["output_ids"]

        assert (await router.ask(0, "POST", "/pause_generation", mode="in_place")).status == 200
        await router.kill()
        for place in range(COUNT + 1):
            router.start(place)
        assert (await router.ask(1, "GET", "/router/info")).json()["gate"]["closed"], "the fleet is still paused"
        assert (await router.ask(1, "POST", "/continue_generation")).status == 200
        for session in sessions:
            await router.turn(0, session)
            assert await router.turns(1, session) == COUNT + 1
        told = (await router.ask(0, "POST", "/retrieve_from_text", text=text + first["text"])).json()
        assert told["tokens"][-6:] == first["output_ids"]
        for part in reversed(router.parts):
            part.send_signal(signal.SIGTERM)
        await until(lambda: all(part.poll() == 0 for part in router.parts), "all have ended in order")


async def test_a_shard_that_was_told_another_count_is_refused_and_a_probe_is_no_stranger() -> None:
    async with joined() as router:
        router.start(0)
        router.start(1, count=COUNT + 1)
        refused = f"it is configured as shard 0 of {COUNT + 1}, but the leader has {COUNT} shards"
        await until(lambda: refused in router.logs[0].read_text(encoding="utf-8"), "the leader says so")
        await until(lambda: router.parts[1].poll() is not None, "the shard has ended")
        assert refused in router.logs[1].read_text(encoding="utf-8")
        _, writer = await asyncio.open_connection("127.0.0.1", router.ports[0])
        writer.close()
        await writer.wait_closed()
        router.start(1)
        router.start(2)
        assert (await router.ask(0, "POST", "/generate", text="Hi")).status == 200
        assert "connection_not_authenticated" not in router.logs[0].read_text(encoding="utf-8")
        assert "leader_silent" not in router.logs[1].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--leader"], "shards: missing"),
        (["--leader", "--shards", "2", "--secret-file", "{short}"], "fewer than 16 characters"),
        (["--join", "nowhere", "--shards", "2", "--shard", "0", "--secret-file", "{secret}"], "HOST:PORT"),
        (["--join", "h:1", "--shards", "2", "--shard", "2", "--secret-file", "{secret}"], "from 0 to 1"),
        (["--leader", "--join", "h:1", "--shards", "2", "--secret-file", "{secret}"], "leader or a shard"),
        (["--leader", "--shards", "2", "--secret-file", "{secret}", "--shared-state"], "state_dir is not set"),
        (["--shards", "2", "--secret-file", "{secret}"], "only with --leader or --join"),
        (["--join", "h:1", "--shards", "2", "--shard", "0", "--secret-file", "{secret}", "--url", "h:1"], "url: "),
    ],
)
def test_an_option_of_a_part_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    names = {"short": tmp_path / "short", "secret": tmp_path / "secret"}
    names["short"].write_text("short", encoding="utf-8")
    names["secret"].write_text("long enough for a secret", encoding="utf-8")
    with pytest.raises(SystemExit) as ended_with:
        cli.main([each.format(**names) for each in arguments])
    assert ended_with.value.code == 2
    assert told in capsys.readouterr().err
