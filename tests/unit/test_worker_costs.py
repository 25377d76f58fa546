"""The cost model behind the numbers in `docs/placement.md`: published times, and jobs that all end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.simulated.costs.gpu import QWEN3_8B_H100
from tests.support.simulated.costs.prefix_tree import packed
from tests.support.simulated.costs.schedule import Job, Schedule


@pytest.mark.parametrize(
    ("sequences", "tokens_each", "published_ms"),
    [(1, 192, 6.826), (64, 192, 8.148), (256, 640, 18.08), (64, 3072, 17.05), (16, 8448, 13.75), (32, 1088, 8.844)],
)
def test_a_decode_step_takes_what_was_published(sequences: int, tokens_each: int, published_ms: float) -> None:
    seconds = QWEN3_8B_H100.decode_seconds(1, sequences, sequences * tokens_each)
    assert seconds * 1000 == pytest.approx(published_ms, rel=0.055)


@pytest.mark.parametrize(("tokens", "published_ms"), [(128, 14.17), (1024, 34.31), (2048, 61.34), (8192, 253.9)])
def test_a_prefill_takes_what_was_published(tokens: int, published_ms: float) -> None:
    assert QWEN3_8B_H100.prefill_seconds([(tokens, 0)]) * 1000 == pytest.approx(published_ms, rel=0.02)


def test_many_steps_cost_the_sum_of_each_and_are_counted_back() -> None:
    gpu = QWEN3_8B_H100
    one_by_one = sum(gpu.decode_seconds(1, 7, 5000 + 7 * step) for step in range(300))
    assert gpu.decode_seconds(300, 7, 5000) == pytest.approx(one_by_one)
    assert gpu.decode_steps(gpu.decode_seconds(300, 7, 5000), 7, 5000) == 300
    assert gpu.decode_steps(gpu.decode_seconds(300, 7, 5000) - 1e-6, 7, 5000) == 299


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("memory", [9_000, 60_000])
def test_whatever_comes_every_job_ends_and_no_memory_is_lost(page: int, memory: int) -> None:
    source = random.Random(memory + page)
    gpu = replace(QWEN3_8B_H100, kv_tokens=memory, page_tokens=page, chunk_tokens=512)
    schedule, jobs, now = Schedule(gpu), [], 0.0
    for _ in range(150):
        now += source.expovariate(40)
        prompt, output = source.randrange(5, 900), source.choice([1, 20, 690, 700])
        shared = [source.randrange(3)] * source.randrange(prompt)
        rest = [source.randrange(1000) for _ in range(prompt - len(shared) + output)]
        jobs.append(Job(packed(shared + rest), prompt, 700, source.choice([0, 0, 16])))
        schedule.enter(jobs[-1], now)
        if source.random() < 0.1:
            schedule.leave(source.choice(jobs), now)
        if source.random() < 0.03:
            schedule.retract_all(now)
            assert schedule.used == 0
            schedule.resume()
        assert schedule.free + schedule.tree.evictable >= 0
    while (ends := schedule.ends) is not None:
        schedule.advance(ends)
    assert all(each.done or each.left for each in jobs)
    assert (schedule.used, schedule.running, list(schedule.waiting)) == (0, 0, [])
    assert schedule.tree.size <= memory
    assert memory == 60_000 or schedule.counts.retractions > 0
