"""Keys on several processes: each is at home in one of them, so that all its requests go to one worker."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from miles_router.fleet.affinity import NAMES, Affinity
from miles_router.settings.config import MiddlewareSpec
from miles_router.shards.owners import ShardOwners
from miles_router.shards.process_table import ProcessTable
from miles_router.testing import SimulatedWorker
from tests.e2e.test_owned_sessions import TEXTS as LAYER
from tests.support.cache_trial import Trial, checkpoint
from tests.support.fleet import JSON
from tests.support.http import Pairs
from tests.support.owned import name_of, several
from tests.support.ports import free_ports
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, ScriptedWorker, script
from tests.support.session_trial import SESSIONS
from tests.support.shard_owners import owners_at
from tests.support.stage import Stage

CHAT = "/v1/chat/completions"
KEYS = [f"key-{number}" for number in range(6)]


async def takers(
    routers: list[RunningRouter], workers: list[ScriptedWorker], path: str, headers: Pairs, body: bytes
) -> set[int]:
    """Which workers take this request, wherever it lands."""
    before = [len(worker.requests) for worker in workers]
    for router in routers:
        assert (await router.ask("POST", path, [*headers, *JSON], body)).status == 200
    return {index for index, worker in enumerate(workers) if len(worker.requests) > before[index]}


def forwarded(router: RunningRouter) -> int:
    owners = router.app.router.owners
    assert isinstance(owners, ShardOwners)
    (numbers,) = owners.numbers()
    return int(numbers.requests)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["X-SMG-Routing-Key", "X-Session-Id", "X-Claude-Code-Session-Id"])
@pytest.mark.parametrize("path", ["/generate", CHAT])
async def test_all_requests_of_a_key_go_to_one_worker(stage: Stage, tmp_path: Path, name: str, path: str) -> None:
    workers = [await stage.worker() for _ in range(3)]
    routers = await several(stage, tmp_path, 3, *workers, middlewares=())
    for key in KEYS:
        await routers[0].ask("POST", "/x")  # so that its turns are others
        assert len(await takers(routers, workers, path, [(name, key)], b'{"text": "Hi"}')) == 1
    assert sum(map(forwarded, routers)) == 2 * len(KEYS), "each but where it is at home"
    await takers(routers, workers, path, [], b'{"text": "Hi"}')
    assert sum(map(forwarded, routers)) == 2 * len(KEYS), "what has no key stays"


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id"])
async def test_a_key_in_the_body_is_one_too(stage: Stage, tmp_path: Path, field: str) -> None:
    workers = [await stage.worker() for _ in range(3)]
    routers = await several(stage, tmp_path, 3, *workers, middlewares=())
    for key in KEYS:
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi" * 50_000}], field: key})
        await routers[0].ask("POST", "/x")  # so that its turns are others
        assert len(await takers(routers, workers, CHAT, [], body)) == 1
    assert sum(map(forwarded, routers)) == 2 * len(KEYS)
    assert {request.body for worker in workers for request in worker.requests if key.encode() in request.body} == {body}


async def test_a_key_that_is_half_a_surrogate_pair_is_one_as_well(stage: Stage, tmp_path: Path) -> None:
    worker = await stage.worker()
    routers = await several(stage, tmp_path, 2, worker, middlewares=())
    for router in routers:
        body = b'{"model": "m", "messages": [], "prompt_cache_key": "\\ud800"}'
        assert (await router.ask("POST", CHAT, JSON, body)).status == 200
    assert sum(map(forwarded, routers)) == 1


async def test_nobody_waits_for_the_home_of_a_key_that_is_being_started_again(stage: Stage, tmp_path: Path) -> None:
    worker, held = await stage.worker(), await stage.worker()
    table = ProcessTable(tmp_path, 2)
    owners = owners_at(0, 2, tmp_path, ["", held.url], Affinity(NAMES), lambda other: table.process_id(other) != 0)
    router = await stage.router(worker, owners=owners)
    for there in (False, True):
        if there:
            table.record_start(1)
        assert (await router.ask("POST", CHAT, [("X-Session-Id", name_of(1, 2)), *JSON], b"{}")).status == 200
        assert (len(worker.requests), len(held.requests)) == (1, int(there))


async def test_a_session_s_own_text_stays_with_it_wherever_its_key_is_at_home(stage: Stage, tmp_path: Path) -> None:
    layers = (MiddlewareSpec(SESSIONS), *LAYER)
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        routers = await several(stage, tmp_path, 2, worker.url, middlewares=layers, hf_checkpoint=checkpoint())
        made = (await routers[0].ask("POST", "/sessions", JSON, b"{}")).json()["session_id"]
        for router in routers:
            headers = [("X-SMG-Routing-Key", name_of(1, 2)), *JSON]
            body = orjson.dumps({"text": f"A new text of {id(router)}."})
            assert (await router.ask("POST", f"/sessions/{made}/generate", headers, body)).status == 200


async def test_a_key_counts_only_where_something_generates(stage: Stage, tmp_path: Path) -> None:
    workers = [await stage.worker() for _ in range(2)]
    routers = await several(stage, tmp_path, 2, *workers, middlewares=())
    for key in KEYS:
        for router in routers:
            assert (await router.ask("POST", "/x", [("X-Session-Id", key)])).status == 200
            assert (await router.ask("GET", "/router/info", [("X-Session-Id", key)])).status == 200
    assert not any(map(forwarded, routers))


async def test_where_the_home_is_not_there_the_request_is_answered_where_it_is(stage: Stage, tmp_path: Path) -> None:
    worker, gone = await stage.worker(), f"http://127.0.0.1:{free_ports(1)[0]}"
    owners = owners_at(0, 2, tmp_path, ["", gone], Affinity(NAMES))
    router = await stage.router(worker, owners=owners)
    key, body = name_of(1, 2), b'{"text": "Hi"}'
    for path in ("/generate", CHAT):
        assert (await router.ask("POST", path, [("X-Session-Id", key), *JSON], body)).status == 200
    assert [request.body for request in worker.requests] == [body, body]


@pytest.mark.parametrize("headers", [[], [("X-Turn-Id", "1")]], ids=["plain", "with a turn's id"])
async def test_what_a_home_that_is_lost_may_have_done_is_not_done_again(
    stage: Stage, tmp_path: Path, headers: Pairs
) -> None:
    """No session knows the turn, so its id makes it no repeat."""
    worker, lost = await stage.worker(), await stage.worker()
    lost.always(script(CLOSE))
    owners = owners_at(0, 2, tmp_path, ["", lost.url], Affinity(NAMES))
    router = await stage.router(worker, owners=owners)
    for path in ("/generate", CHAT):
        answer = await router.ask("POST", path, [("X-Session-Id", name_of(1, 2)), *headers, *JSON], b"{}")
        assert (answer.status, answer.error_type) == (502, "upstream_error")
    assert (len(lost.requests), len(worker.requests)) == (2, 0)


async def test_a_new_text_goes_where_its_key_is_at_home_and_one_that_goes_on_to_its_holder(
    stage: Stage, tmp_path: Path
) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        routers = await several(stage, tmp_path, 2, worker.url, middlewares=LAYER, hf_checkpoint=checkpoint())
        trials = [Trial(router, worker) for router in routers]
        keys = [name_of(index, 2) for index in (0, 1)]

        async def ask(landing: int, key: str, **fields: object) -> dict[str, object]:
            headers = [("X-Session-Id", key), *JSON]
            answer = await routers[landing].ask("POST", "/generate", headers, orjson.dumps(fields))
            assert answer.status == 200
            return dict(answer.json())

        first = await ask(0, keys[1], text="A new text. ")
        assert [trial.statistics()["entries"] for trial in trials] == [0, 1]
        await ask(1, keys[0], text=f"A new text. {first['text']} And then?")
        assert [trial.statistics()["entries"] for trial in trials] == [0, 2], "its holder, whatever the key"
        await ask(1, keys[0], input_ids=[1, 2, 3], image_data="data:image/png;base64,AA==")
        assert [forwarded(router) for router in routers] == [1, 1], "what is not recorded goes home, too"


async def test_what_is_not_recorded_stays_where_its_home_is_not_there(stage: Stage, tmp_path: Path) -> None:
    async with SimulatedWorker(tokenizer=checkpoint()) as worker:
        gone = f"http://127.0.0.1:{free_ports(1)[0]}"
        owners = owners_at(0, 2, tmp_path, ["", gone], Affinity(NAMES))
        router = await stage.router(worker.url, owners=owners, middlewares=LAYER, hf_checkpoint=checkpoint())
        body = orjson.dumps({"input_ids": [1, 2, 3], "image_data": "data:image/png;base64,AA=="})
        answer = await router.ask("POST", "/generate", [("X-Session-Id", name_of(1, 2)), *JSON], body)
        assert answer.status == 200
