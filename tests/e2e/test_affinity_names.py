"""What agents call their conversation, in a header or a field of the body, keeps it on one worker."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from miles_router.errors import ConfigError
from miles_router.settings.config import RouterConfig
from tests.support.fleet import JSON
from tests.support.http import Pairs
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.stage import Stage
from tests.support.waiting import until

in_turn = pytest.mark.alone("idle workers take turns in each process")
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


class Asked:
    """Requests to two idle workers that take turns, and who took each."""

    def __init__(self, router: RunningRouter, workers: list[ScriptedWorker]) -> None:
        self._router, self._workers = router, workers

    @classmethod
    async def on(cls, stage: Stage, **settings: Any) -> Asked:
        workers = [await stage.worker() for _ in range(2)]
        return cls(await stage.router(*workers, **settings), workers)

    async def taker(self, path: str, headers: Pairs = (), body: bytes = b"{}") -> int:
        before = [len(worker.requests) for worker in self._workers]
        assert (await self._router.ask("POST", path, [*headers, *JSON], body)).status == 200
        (taker,) = [n for n, worker in enumerate(self._workers) if len(worker.requests) > before[n]]
        await until(lambda: not self._router.pool.in_flight, "its answer is over for the router, too")
        return taker

    async def with_fields(self, fields: dict[str, Any], path: str = CHAT, headers: Pairs = ()) -> int:
        return await self.taker(path, headers, orjson.dumps({"model": "m", **fields}))


#: By a header, and by a field of the body.
NAMES = [
    *(("/x", name) for name in ("X-Claude-Code-Session-Id", "session_id", "Session-Id")),
    *((path, "body:prompt_cache_key") for path in (CHAT, "/v1/messages")),
    *((path, "body:session_id") for path in ("/v1/completions", RESPONSES)),
]


@pytest.mark.parametrize(("path", "name"), NAMES)
@in_turn
async def test_an_agent_s_own_name_keeps_it_on_one_worker(stage: Stage, path: str, name: str) -> None:
    asked, (_, is_field, field) = await Asked.on(stage), name.partition("body:")

    async def taker(key: str, *more: tuple[str, str], path: str = path) -> int:
        if is_field:
            return await asked.with_fields({field: key}, path, more)
        return await asked.taker(path, [(name, key), *more])

    home, other = [await taker(key) for key in "ab"]
    assert other != home
    for key, its in (("a", home), ("b", other)):
        assert {await taker(key) for _ in range(3)} == {its}
    assert await taker("b", ("X-SMG-Routing-Key", "a")) == home
    assert await taker("b", path=f"/sessions/a{path}") == home


@in_turn
async def test_a_field_stands_at_either_end_of_a_long_body(stage: Stage) -> None:
    asked = await Asked.on(stage)
    long = b'"messages":[{"role":"user","content":"%b"}]' % (b"long " * 200_000)
    home = await asked.taker(CHAT, body=b'{"prompt_cache_key":"a",%b}' % long)
    other = await asked.taker(CHAT, body=b'{%b,"prompt_cache_key" : "b"}' % long)
    assert other != home
    for _ in range(2):
        assert await asked.taker(CHAT, body=b'{%b,"prompt_cache_key":"a"}' % long) == home
    assert await asked.taker(CHAT, body=b'{"prompt_cache_key":"b",%b}' % long) == other


NAMELESS: list[dict[str, Any]] = [
    {"prompt_cache_key": None},
    {"prompt_cache_key": ""},
    {"session_id": 7},
    {"tools": [{"function": {"parameters": {"properties": {"session_id": {"type": "string"}}}}}]},
    {"messages": [{"role": "user", "content": '{"prompt_cache_key":"a"}'}]},
]


@in_turn
async def test_what_names_no_conversation_gives_no_key(stage: Stage) -> None:
    asked = await Asked.on(stage)
    for body in NAMELESS:
        takers = [await asked.with_fields(body) for _ in range(4)]
        assert takers in ([0, 1, 0, 1], [1, 0, 1, 0]), body


@in_turn
async def test_names_of_ones_own_stand_in_place_of_the_known_ones(stage: Stage) -> None:
    asked = await Asked.on(stage, affinity_names=("X-Thread", "body:conversation"))
    home, other = [await asked.taker("/x", [("x-thread", key)]) for key in "ab"]
    assert other != home
    for _ in range(2):
        assert await asked.with_fields({"conversation": "a"}) == home
        assert await asked.with_fields({"conversation": "a"}, headers=[("X-Thread", "b")]) == other
    takers = [await asked.with_fields({"prompt_cache_key": "a"}, headers=[("session_id", "a")]) for _ in range(2)]
    assert takers in ([0, 1], [1, 0])


@pytest.mark.parametrize("name", ["", "two words", "naïve", "body:", 'body:a"b', "a:b"])
def test_what_can_be_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="affinity_names: each must be the name of a header, or body:NAME"):
        RouterConfig(affinity_names=(name,))
