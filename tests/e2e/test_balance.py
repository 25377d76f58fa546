"""Which worker takes a request: the least loaded, with a key always the same one, or the choice of one's own policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from miles_router.errors import ConfigError
from miles_router.fleet.placement.contract import PlacementRequest
from miles_router.fleet.workers import Unit
from miles_router.settings.config import RouterConfig
from tests.support.fleet import JSON
from tests.support.http import Client, Pairs, request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import HANG, RESET, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

KEYS: dict[str, tuple[str, Pairs]] = {
    "X-SMG-Routing-Key": ("/generate", [("X-SMG-Routing-Key", "{}")]),
    "X-Session-Id": ("/v1/chat/completions", [("X-Session-Id", "{}")]),
    "session in the path": ("/sessions/{}/v1/completions", []),
    "session in the path, encoded": ("/sessions/%7B{}%7D/generate", []),
}
in_turn = pytest.mark.alone("idle workers take turns in each process")
counted = pytest.mark.alone("counts what one process chooses")
keyed = pytest.mark.parametrize(("path", "headers"), [*KEYS.values()], ids=[*KEYS])


async def took(router: RunningRouter, workers: list[ScriptedWorker], path: str, headers: Pairs = ()) -> ScriptedWorker:
    """The worker that took this request."""
    before, in_flight = [len(worker.requests) for worker in workers], router.pool.in_flight
    assert (await router.ask("GET", path, headers)).status == 200
    (taker,) = [w for w, seen in zip(workers, before, strict=True) if len(w.requests) > seen]
    await until(lambda: router.pool.in_flight <= in_flight, "its answer is over for the router, too")
    return taker


async def took_key(
    router: RunningRouter, workers: list[ScriptedWorker], path: str, headers: Pairs, key: str
) -> ScriptedWorker:
    return await took(router, workers, path.format(key), [(name, value.format(key)) for name, value in headers])


async def hold(stage: Stage, router: RunningRouter, worker: ScriptedWorker) -> Client:
    """One more request that stays on `worker`, whoever that is by balance."""
    client = await stage.client(router)
    busy = worker.busy
    await client.send(request("GET", "/hold"))
    await until(lambda: worker.busy == busy + 1, f"{worker.url} holds one more")
    return client


@in_turn
async def test_idle_workers_take_turns_and_the_first_is_not_favoured(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    router = await stage.router(*workers)
    turns = [await took(router, workers, "/x") for _ in range(9)]
    assert {*turns[:3]} == {*workers}
    assert turns[3:6] == turns[:3] == turns[6:]


@in_turn
async def test_the_least_loaded_worker_is_chosen(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    first = await took(router, workers, "/x")
    other = next(worker for worker in workers if worker is not first)
    other.next(script(HANG))
    holding = await hold(stage, router, other)
    assert [await took(router, workers, "/x") for _ in range(4)] == [first] * 4
    holding.abort()
    await until(lambda: router.pool.in_flight == 0, "the slot is back")
    assert {await took(router, workers, "/x") for _ in range(2)} == {*workers}


@pytest.mark.alone("two processes may choose alike within a tenth of a second")
async def test_many_long_requests_are_spread_evenly(stage: Stage) -> None:
    workers = [(await stage.worker()).always(script(HANG)) for _ in range(4)]
    router = await stage.router(*workers)
    clients = [await stage.client(router) for _ in range(42)]
    for client in clients:
        await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: sum(worker.busy for worker in workers) == 42, "all are held")
    assert sorted(worker.busy for worker in workers) == [10, 10, 11, 11]
    for client in clients:
        client.abort()


@in_turn
@keyed
async def test_the_same_key_goes_to_the_same_worker(stage: Stage, path: str, headers: Pairs) -> None:
    workers = [await stage.worker() for _ in range(3)]
    router = await stage.router(*workers)
    homes = {key: await took_key(router, workers, path, headers, key) for key in "abcdef"}
    assert Counter(worker.url for worker in homes.values()) == {worker.url: 2 for worker in workers}
    for key in "fedcba" * 2:
        assert await took_key(router, workers, path, headers, key) is homes[key]


async def test_keys_stay_when_another_worker_joins(stage: Stage) -> None:
    path, headers = KEYS["session in the path, encoded"]
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    homes = {key: await took_key(router, workers, path, headers, key) for key in "abcdef"}
    workers.append(await stage.worker())
    await router.ask("POST", f"/add_worker?url={workers[-1].url}")
    for key in "abcdef":
        assert await took_key(router, workers, path, headers, key) is homes[key]


async def test_a_key_moves_only_when_its_worker_is_not_routable_and_then_stays(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    router = await stage.router(*workers, health_check_failure_threshold=1)
    path, headers = KEYS["X-Session-Id"]
    homes = {key: await took_key(router, workers, path, headers, key) for key in "abcdef"}
    lost = homes["a"]
    router.pool.record_failure(router.worker(lost), "test")
    moved = {key: await took_key(router, workers, path, headers, key) for key in "abcdef"}
    assert lost not in moved.values()
    assert {key for key in homes if homes[key] is not moved[key]} == {key for key in homes if homes[key] is lost}
    for key in "abcdef":
        assert await took_key(router, workers, path, headers, key) is moved[key]


@in_turn
async def test_a_routing_key_counts_before_a_session_header_and_both_before_the_path(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    home = await took(router, workers, "/x", [("X-SMG-Routing-Key", "a")])
    other = await took(router, workers, "/x", [("X-Session-Id", "b")])
    assert other is not home
    both = [("X-Session-Id", "b"), ("X-SMG-Routing-Key", "a")]
    assert await took(router, workers, "/sessions/c/x", both) is home
    assert await took(router, workers, "/sessions/c/x", both[::-1]) is home
    assert await took(router, workers, "/sessions/c/x", both[:1]) is other


@pytest.mark.alone("what generates nothing is at home in each process")
async def test_a_key_is_followed_even_to_a_busier_worker(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    home = await took(router, workers, "/x", [("X-Session-Id", "a")])
    home.next(script(HANG))
    client = await stage.client(router)
    await client.send(request("GET", "/hold", [("X-Session-Id", "a")]))
    await until(lambda: home.busy, "the home is busy")
    assert await took(router, workers, "/x", [("X-Session-Id", "a")]) is home
    client.abort()


@in_turn
async def test_a_session_stays_at_home_when_a_request_of_it_is_lost_there(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers)
    headers = [("X-SMG-Routing-Key", "a")]
    home = await took(router, workers, "/x", headers)
    for _ in range(2):  # on the connection that there is, and on a new one
        home.next(script(RESET))
    (other,) = (worker for worker in workers if worker is not home)
    seen = len(other.requests)
    assert (await router.ask("GET", "/x", headers)).status == 200
    assert len(other.requests) == seen + 1
    assert await took(router, workers, "/x", headers) is home


# Names of agents' own for their conversations

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


SESSION: Pairs = [("X-SMG-Routing-Key", "a")]


class Last:
    """Always the last worker of the list."""

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> Unit:
        """See `Policy`."""
        return candidates[-1]


class Unfinished:
    """Forgot to choose one."""

    def choose(self, candidates: Sequence[Unit], request: PlacementRequest) -> object:
        """See `Policy`."""
        return sorted(candidates, key=lambda unit: unit.tokens)


def generation(length: int = 100) -> bytes:
    """A request with a prompt of so many bytes."""
    return orjson.dumps({"text": "a" * length, "sampling_params": {"max_new_tokens": 1}})


async def taker(
    router: RunningRouter, workers: list[ScriptedWorker], headers: Pairs = (), length: int = 100
) -> ScriptedWorker:
    """The worker that answers a generation."""
    before, in_flight = [len(worker.requests) for worker in workers], router.pool.in_flight
    answer = await router.ask("POST", "/generate", headers, generation(length))
    assert answer.status == 200, answer.body
    (took,) = [worker for worker, seen in zip(workers, before, strict=True) if len(worker.requests) > seen]
    await until(lambda: router.pool.in_flight <= in_flight, "its answer is over for the router, too")
    return took


@counted
async def test_a_reply_that_was_held_up_for_its_client_says_nothing_of_its_worker(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    meta = b'"meta_info":{"completion_tokens":100,"cached_tokens":0}}'
    router = await stage.router(*workers)
    for length, learned in ((16_000_000, False), (100, True)):
        for worker in workers:
            worker.always(script(reply(b'{"text":"%b",%b' % (b"a" * length, meta))))
        client = await stage.client(router)
        await client.send(request("POST", "/generate", body=generation()))
        if not learned:
            await until(lambda: router.app.router.metrics.bytes_out > 0, "it is on its way")
        assert len((await client.read()).body) > length
        await until(lambda: not router.pool.in_flight, "it is over")
        assert any(worker.units[0].measurements for worker in router.pool) == learned


@counted
async def test_a_policy_of_ones_own_chooses(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    router = await stage.router(*workers, policy="tests.e2e.test_balance.Last")
    assert [await taker(router, workers) for _ in range(4)] == [workers[-1]] * 4


@counted
async def test_what_is_no_choice_is_answered_by_name_and_asks_no_worker(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(2)]
    router = await stage.router(*workers, policy="tests.e2e.test_balance.Unfinished")
    answer = await router.ask("POST", "/generate", SESSION, generation())
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (500, "internal_error")
    assert "the policy Unfinished chose [" in error["message"]
    assert [worker.requests for worker in workers] == [[], []]
