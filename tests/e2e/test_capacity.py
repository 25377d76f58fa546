"""`GET /router/capacity`: a trainer that begins no more episodes than it is told never has one wait."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from tests.e2e.test_admission import MEMORY, Fleet, fleet
from tests.support.fleet import JSON, held
from tests.support.stage import Stage
from tests.support.under_way import under_way


async def capacity(scene: Fleet, query: str = "") -> dict[str, Any]:
    reply = await scene.router.ask("GET", f"/router/capacity{query}")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = orjson.loads(reply.body)
    return found


async def test_it_is_what_admission_lets_begin(stage: Stage) -> None:
    length = MEMORY // 10
    async with fleet(stage, 2) as scene:
        told = await capacity(scene, f"?tokens={length}")
        assert told == {
            **{"room": 10, "waiting": 0, "sessions": 0, "tokens_per_session": length, "tokens_held": 0},
            **{"tokens_capacity": 2 * MEMORY, "workers": 2, "paused": False},
        }
        assert (await capacity(scene))["room"] is None, "nobody has said how long an episode is"
        begun = 0
        while (told := await capacity(scene, f"?tokens={length}"))["room"]:
            assert told["room"] <= 10 - begun
            assert (await scene.turn(f"session-{begun}", length - 20)).status == 200
            begun += 1
        assert begun >= 8, "the length of a prompt is estimated"
        assert (told["sessions"], told["waiting"]) == (begun, 0)
        assert length - 30 < (await capacity(scene))["tokens_per_session"] < length + 50
        waits = asyncio.ensure_future(scene.turn("one too many", 2 * length))
        await held(scene.router, 1)
        assert (await capacity(scene, "?tokens=1"))["waiting"] == 1
        for number in range(begun):
            scene.end(f"session-{number}")
        assert (await waits).status == 200
        assert (await capacity(scene, f"?tokens={length}"))["room"] >= 6


async def test_a_pause_and_another_model_are_told(stage: Stage) -> None:
    async with fleet(stage) as scene:
        assert (await scene.turn("running", 100)).status == 200
        assert (await scene.router.ask("POST", "/pause_generation", body=b"{}")).status == 200
        async with under_way(scene.turn("running", 200)) as turn:
            await held(scene.router, 1)
            told = await capacity(scene, "?tokens=100")
            assert (told["paused"], told["waiting"]) == (True, 0), "a turn of a session that runs waits for no room"
            assert told["room"] > 15
            assert (await scene.router.ask("POST", "/continue_generation", body=b"{}")).status == 200
            assert (await turn).status == 200
        assert (await scene.router.ask("GET", "/router/capacity?model_id=other")).status == 404


async def test_a_pair_counts_once_and_half_a_pair_has_no_room(stage: Stage) -> None:
    async with fleet(stage) as scene, SimulatedWorker(context_len=MEMORY) as prefill:
        (alone,) = scene.router.pool
        assert (await scene.router.ask("POST", f"/remove_worker?url={alone.url}")).status == 200
        assert (await capacity(scene, "?tokens=100"))["room"] == 0, "there is no worker"
        added = orjson.dumps({"url": prefill.url, "worker_type": "prefill", "bootstrap_port": 9000})
        assert (await scene.router.ask("POST", "/workers", JSON, added)).status == 201
        await scene.known()
        assert (await capacity(scene, "?tokens=100"))["room"] == 0, "nothing generates"
        added = orjson.dumps({"url": scene.workers[0].url, "worker_type": "decode"})
        assert (await scene.router.ask("POST", "/workers", JSON, added)).status == 201
        await scene.known()
        for number in range(2):
            await scene.turn(f"session-{number}", 100)
        assert (await capacity(scene))["sessions"] == 2


@pytest.mark.parametrize("tokens", ["0", "-1", "1.5", "many", "", "1" * 10, "²"])
async def test_a_length_that_is_none_is_refused(stage: Stage, tokens: str) -> None:
    router = await stage.router()
    assert (await router.ask("GET", f"/router/capacity?tokens={tokens}".encode().decode("latin-1"))).status == 400
