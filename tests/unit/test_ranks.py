"""Ranks in an engine's facts, requests and answers; and the pool's units of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.engine import NO_WISH, RankWish
from miles_router.engines.facts import Facts
from miles_router.engines.known import read_facts
from miles_router.engines.sglang.ranks import MAX_RANKS, RankScanner, pinned, rank_scanner, ranks, wish
from miles_router.fleet.placement.policies import LeastInFlight
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.worker_url import parse_worker_url

CHAT = "/v1/chat/completions"
TELLS = Facts(dp_size=4, schemas={"GenerateReqInput": frozenset({"routed_dp_rank"})})


@pytest.mark.parametrize(
    ("said", "size"),
    [({"dp_size": 4}, 4), ({"dp_size": 1, "attn_dp_size": 8}, 8), ({"dp_size": 4, "attn_dp_size": 1}, 4), ({}, None)],
)
def test_replicas_and_groups_of_attention_are_ranks(said: dict[str, int], size: int | None) -> None:
    assert read_facts({"/server_info": orjson.dumps({"version": "1", **said})}).dp_size == size


@pytest.mark.parametrize(
    "change",
    [
        {"schemas": None},
        {"schemas": {"GenerateReqInput": frozenset({"text"})}},
        {"dp_size": None},
        {"dp_size": MAX_RANKS + 1},
        {"half": "prefill"},
        {"half": "decode"},
    ],
)
def test_ranks_are_used_where_the_engine_says_that_it_can_be_told(change: dict[str, Any]) -> None:
    assert (ranks(TELLS), ranks(dataclasses.replace(TELLS, **change))) == (4, 1)


@pytest.mark.parametrize(
    ("path", "headers", "body", "said"),
    [
        ("/generate", [], b'{"text": "x"}', NO_WISH),
        ("/generate", [], b'{"text": "\\"routed_dp_rank\\": 1"}', NO_WISH),
        ("/generate", [], b'{"custom": {"routed_dp_rank": 1}}', NO_WISH),
        ("/generate", [], b'{"routed_dp_rank": null}', NO_WISH),
        ("/generate", [], b'{"routed_dp_rank": 1}', RankWish(1, True)),
        ("/generate", [], b'{"routed_dp_rank": "1"}', RankWish(None, True)),
        ("/generate", [], b'{"data_parallel_rank": 1, "routed_dp_rank": 3}', RankWish(3, True)),
        ("/generate", [(b"x-data-parallel-rank", b"1")], b"{}", RankWish(1, False)),
        ("/generate", [(b"x-data-parallel-rank", b"first")], b"{}", NO_WISH),
        ("/generate", [(b"x-override-routed-dp-rank", b"1")], b"{}", RankWish(None, True)),
        (CHAT, [(b"x-data-parallel-rank", b"1")], b'{"routed_dp_rank": 3}', RankWish(1, True)),
        (CHAT, [(b"x-data-parallel-rank", b"9" * 5000)], b"{}", RankWish(None, True)),
        (CHAT, [], b'{"routed_dp_rank": 3}', RankWish(3, True)),
    ],
)
def test_what_a_client_says_of_ranks(path: str, headers: Any, body: bytes, said: RankWish) -> None:
    assert wish(path, headers, body, orjson.loads) == said


@pytest.mark.parametrize(
    ("path", "body", "encoded", "sent"),
    [
        ("/generate", b'{"text": "x" }', False, ([(b"a", b"b")], b'{"text": "x" ,"routed_dp_rank":2}')),
        ("/generate", b"{}", False, ([(b"a", b"b")], b'{"routed_dp_rank":2}')),
        ("/generate", b"\x1f\x8b", True, None),
        (CHAT, b"\x1f\x8b", True, ([(b"a", b"b"), (b"x-data-parallel-rank", b"2")], b"\x1f\x8b")),
        (CHAT, b"{}", False, ([(b"a", b"b"), (b"x-data-parallel-rank", b"2")], b"{}")),
        ("/api/chat", b"{}", False, None),
    ],
)
def test_a_rank_stands_where_each_route_reads_it(path: str, body: bytes, encoded: bool, sent: Any) -> None:
    assert pinned(path, [(b"a", b"b")], body, 2, encoded=encoded) == sent


@pytest.mark.parametrize(
    ("path", "streamed", "tells"),
    [("/generate", True, True), (CHAT, False, True), (CHAT, True, False), ("/v1/completions", False, False)],
)
def test_some_answers_tell_their_rank(path: str, streamed: bool, tells: bool) -> None:
    assert (rank_scanner(path, streamed=streamed) is not None) is tells


@given(st.integers(0, MAX_RANKS), st.text(), st.lists(st.integers(0, 400), max_size=9), st.integers(0, 9000))
def test_the_rank_that_answered_is_read_however_the_answer_is_cut(
    rank: int, text: str, cuts: list[int], size: int
) -> None:
    meta = {"output_token_logprobs": [0.5] * size, "id": '"dp_rank": 77', "dp_rank": rank, "e2e_latency": 0.1}
    answer = orjson.dumps({"text": text + '"dp_rank":8,', "meta_info": meta})
    edges = sorted({0, len(answer), *(len(answer) - cut for cut in cuts if cut < len(answer))})
    reader = RankScanner()
    read = [reader.feed(answer[start:end]) for start, end in itertools.pairwise(edges)]
    assert [each for each in read if each is not None][:1] == [rank]


def test_an_answer_without_a_rank_tells_none() -> None:
    assert RankScanner().feed(b'{"meta_info": {"dp_rank": null, "id": "x"}}') is None


def test_ranks_take_the_place_of_their_worker_and_what_ran_before_stays_counted() -> None:
    pool, policy = WorkerPool(), LeastInFlight()
    worker = pool.add(parse_worker_url("http://a"))
    before = pool.lease(policy)
    assert (pool.snapshot.ranked, pool.set_ranks(worker, 2), pool.set_ranks(worker, 2)) == (False, True, False)
    leases = [pool.lease(policy) for _ in range(4)]
    assert (pool.snapshot.ranked, before.unit.retired, worker.in_flight) == (True, True, 5)
    assert [(unit.rank, unit.in_flight) for unit in worker.units] == [(0, 2), (1, 2)]
    assert pool.lease(policy, rank=1).unit is worker.units[1]
    for lease in (before, *leases):
        lease.release()
    assert (worker.in_flight, [unit.in_flight for unit in worker.units]) == (1, [0, 1])


def test_a_worker_whose_ranks_changed_is_removed_after_its_last_request() -> None:
    pool, policy = WorkerPool(), LeastInFlight()
    worker = pool.add(parse_worker_url("http://a"))
    before, drained = pool.lease(policy), []
    pool.set_ranks(worker, 2)
    pool.drain(worker, lambda: drained.append(worker))
    assert (drained, len(pool)) == ([], 1)
    before.release()
    assert (drained, len(pool)) == ([worker], 0)
