"""The simulated worker's cost model by a clock that is a number: prices, batches, queue, cache, retraction."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from miles_router.testing import Pairing, SimulatedWorker
from miles_router.testing.worker.costs.gpu import QWEN3_8B_H100, Gpu, gpu_named
from miles_router.testing.worker.costs.pacer import Pacer
from miles_router.testing.worker.costs.plan import planned
from miles_router.testing.worker.costs.prefix_tree import PrefixTree, packed
from miles_router.testing.worker.costs.schedule import Job, Schedule
from miles_router.testing.worker.model.generation import GenerationRequest, Model
from miles_router.testing.worker.model.vocabulary import ToyTokenizer
from miles_router.testing.worker.wire.sampling_params import SamplingParams
from tests.support.waiting import PATIENCE

#: Seconds that are easy to add up: a prefill 1, each of its tokens 0.1; a step 1, each sequence in it 0.01.
PLAIN = Gpu(
    prefill_s=1.0,
    prefill_token_s=0.1,
    prefill_pair_s=0.0,
    decode_s=1.0,
    decode_sequence_s=0.01,
    decode_context_s=0.0,
    kv_tokens=1000,
    chunk_tokens=20,
)


def job(prompt: list[int], output: int, most: int | None = None, interval: int = 0) -> Job:
    """Says `output` tokens that nobody else says."""
    said = [1_000_000 + 10_000 * len(prompt) + n + sum(prompt) for n in range(output)]
    return Job(packed([*prompt, *said]), len(prompt), most or output, interval)


def run(schedule: Schedule) -> dict[Job, float]:
    """Let time pass until nothing is left to do: when each job was heard of last."""
    heard = {}
    while (ends := schedule.ends) is not None:
        heard.update(dict.fromkeys(schedule.advance(ends), ends))
    return heard


# Prices


@pytest.mark.parametrize("options", [{"dp_size": 2}, {"pairing": Pairing("decode")}], ids=["ranks", "half of a pair"])
def test_the_costs_are_those_of_one_rank_that_does_all(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be combined"):
        SimulatedWorker(gpu=QWEN3_8B_H100, **options)


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


def test_a_prompt_costs_the_same_in_one_chunk_as_in_two_but_for_the_second_start() -> None:
    gpu = QWEN3_8B_H100
    halves = gpu.prefill_seconds([(4096, 0)]) + gpu.prefill_seconds([(4096, 4096)])
    assert halves == pytest.approx(gpu.prefill_seconds([(8192, 0)]) + gpu.prefill_s)


def test_many_steps_cost_the_sum_of_each_and_are_counted_back() -> None:
    gpu = QWEN3_8B_H100
    one_by_one = sum(gpu.decode_seconds(1, 7, 5000 + 7 * step) for step in range(300))
    assert gpu.decode_seconds(300, 7, 5000) == pytest.approx(one_by_one)
    assert gpu.decode_steps(gpu.decode_seconds(300, 7, 5000), 7, 5000) == 300
    assert gpu.decode_steps(gpu.decode_seconds(300, 7, 5000) - 1e-6, 7, 5000) == 299


def test_half_as_fast_takes_twice_as_long_and_has_the_same_memory() -> None:
    half = QWEN3_8B_H100.scaled(0.5)
    assert half.prefill_seconds([(500, 70)]) == pytest.approx(2 * QWEN3_8B_H100.prefill_seconds([(500, 70)]))
    assert half.decode_seconds(9, 3, 99) == pytest.approx(2 * QWEN3_8B_H100.decode_seconds(9, 3, 99))
    assert half.kv_tokens == QWEN3_8B_H100.kv_tokens
    with pytest.raises(ValueError, match="above 0"):
        QWEN3_8B_H100.scaled(0.0)
    with pytest.raises(ValueError, match="qwen3-8b-h100"):
        gpu_named("abacus")


# Who runs when


def test_a_lone_job_takes_its_prefill_and_a_step_for_each_token_but_the_first() -> None:
    schedule = Schedule(PLAIN)
    lone = job([1, 2, 3, 4, 5], 4)
    schedule.enter(lone, 10.0)
    assert run(schedule) == {lone: pytest.approx(10 + 1.5 + 3 * 1.01)}
    assert (lone.made, lone.cached, schedule.used) == (4, 0, 0)


def test_jobs_that_decode_together_share_a_step() -> None:
    schedule = Schedule(PLAIN)
    first, second = job([1] * 5, 4), job([2] * 5, 4)
    schedule.enter(first, 0.0)
    schedule.enter(second, 0.0)
    # The first is alone in the first prefill; the second is prefilled before anybody decodes.
    both = 2 * 1.5 + 3 * 1.02
    assert run(schedule) == {first: pytest.approx(both), second: pytest.approx(both)}


def test_request_that_arrives_during_decode_is_prefilled_after_the_current_step() -> None:
    schedule = Schedule(PLAIN)
    first, second = job([1] * 5, 11), job([2] * 5, 1)
    schedule.enter(first, 0.0)
    schedule.enter(second, 1.5 + 1.01 + 0.5)  # in the middle of the second step
    heard = run(schedule)
    assert heard[second] == pytest.approx(1.5 + 2 * 1.01 + 1.5)
    assert heard[first] == pytest.approx(1.5 + 10 * 1.01 + 1.5)


def test_a_long_prompt_is_prefilled_in_chunks_and_nobody_decodes_in_between() -> None:
    schedule = Schedule(PLAIN)
    short, long = job([1] * 10, 3), job([2] * 50, 1)
    schedule.enter(short, 0.0)
    schedule.enter(long, 0.5)
    heard = run(schedule)
    assert heard[long] == pytest.approx(2.0 + 3 + 5.0)
    assert heard[short] == pytest.approx(2.0 + 3 + 5.0 + 2 * 1.01)


def test_a_stream_is_heard_of_at_its_first_token_and_then_every_few() -> None:
    schedule = Schedule(PLAIN)
    stream = job([1] * 5, 8, interval=3)
    schedule.enter(stream, 0.0)
    seen = []
    while (ends := schedule.ends) is not None:
        seen += [each.made for each in schedule.advance(ends)]
    assert seen == [1, 4, 7, 8]


def test_what_was_said_is_known_in_the_middle_of_decoding() -> None:
    schedule = Schedule(PLAIN)
    whole = job([1] * 5, 100)
    schedule.enter(whole, 0.0)
    assert schedule.advance(1.5 + 7 * 1.01 + 0.3) == []
    assert whole.made == 8


# The cache


def test_a_turn_that_goes_on_computes_only_what_is_new() -> None:
    schedule = Schedule(PLAIN)
    first = job([1, 2, 3, 4, 5], 4)
    schedule.enter(first, 0.0)
    began = run(schedule)[first]
    # All but the last token that was said, which never went through the model.
    second = Job(first.ids + packed([7, 7, 8]), 11, 1)
    schedule.enter(second, began)
    assert run(schedule)[second] == pytest.approx(began + 1.0 + 3 * 0.1)
    assert (second.cached, schedule.counts.cached_tokens, schedule.counts.prompt_tokens) == (8, 8, 5 + 11)


def test_the_last_token_of_a_known_prompt_is_computed_all_the_same() -> None:
    schedule = Schedule(PLAIN)
    for _ in range(2):
        again = job([1, 2, 3, 4, 5], 1)
        schedule.enter(again, schedule.now)
        run(schedule)
    assert again.cached == 4


def test_those_in_one_prefill_do_not_find_each_other() -> None:
    schedule = Schedule(PLAIN)
    group = [job([1, 2, 3, 4, 5], 1) for _ in range(6)]
    for each in group:
        schedule.enter(each, 0.0)
    run(schedule)
    # One alone, then all that fit a chunk of 20 tokens: they find what the first one left, and nothing of each other.
    assert [each.cached for each in group] == [0, 4, 4, 4, 4, 4]
    strangers = Schedule(PLAIN)
    strangers.enter(job([9], 1), 0.0)  # while it is prefilled, all others gather
    group = [job([1, 2, 3, 4, 5], 1) for _ in range(6)]
    for each in group:
        strangers.enter(each, 0.0)
    run(strangers)
    assert [each.cached for each in group] == [0, 0, 0, 0, 4, 4]


def test_the_cache_knows_whole_pages() -> None:
    schedule = Schedule(replace(PLAIN, page_tokens=4))
    schedule.enter(job(list(range(10)), 1), 0.0)
    run(schedule)
    other = job([*range(9), 99], 1)
    schedule.enter(other, schedule.now)
    run(schedule)
    assert other.cached == 8


def test_what_was_used_least_recently_leaves_the_cache_first() -> None:
    schedule = Schedule(replace(PLAIN, kv_tokens=100))
    prompts = {name: [ord(name)] * 30 for name in "abc"}

    def cached(name: str) -> int | None:
        asked = job(prompts[name], 1)
        schedule.enter(asked, schedule.now)
        run(schedule)
        return asked.cached

    assert [cached("a"), cached("b"), cached("c")] == [0, 0, 0]
    assert cached("a") == 29
    schedule.enter(job([1] * 40, 1), schedule.now)  # 90 of 100 are taken: b has to go
    run(schedule)
    assert schedule.tree.size <= 100
    assert (cached("a"), cached("b")) == (29, 0)


def test_a_tree_is_a_set_of_sequences_with_a_bound() -> None:
    source, tree, known = random.Random(3), PrefixTree(), set[tuple[int, ...]]()
    for _ in range(2000):
        ids = tuple(source.randrange(3) for _ in range(source.randrange(1, 12)))
        longest = max((n for n in range(len(ids) + 1) if not n or ids[:n] in known), default=0)
        assert tree.match(packed(ids))[1] == longest
        tree.insert(packed(ids))
        known |= {ids[:n] for n in range(1, len(ids) + 1)}
        assert tree.size == tree.evictable == len(known)
    tree.evict(10**9)
    assert (tree.size, tree.match(packed([0, 1]))[1]) == (0, 0)


def test_what_is_in_use_is_not_evicted() -> None:
    tree = PrefixTree()
    node, new = tree.insert(packed([1, 2, 3]))
    tree.insert(packed([1, 2, 9, 9]))
    tree.lock(node)
    tree.evict(100)
    assert (new, tree.size, tree.evictable, tree.match(packed([1, 2, 3, 4]))[1]) == (3, 3, 0, 3)
    tree.unlock(node)
    tree.evict(100)
    assert tree.size == 0


def test_only_jobs_of_one_key_find_each_other() -> None:
    schedule = Schedule(PLAIN)
    keys = ["", "a", "a", "b", ""]
    jobs = [job([1, 2, 3, 4, 5], 1) for _ in keys]
    for each, key in zip(jobs, keys, strict=True):
        each.key = key
        schedule.enter(each, schedule.now)
        run(schedule)
    assert [each.cached for each in jobs] == [0, 0, 4, 0, 4]


# Memory


def test_a_job_waits_until_what_it_and_others_may_say_fits() -> None:
    schedule = Schedule(replace(PLAIN, kv_tokens=100))
    first, second = job([1] * 5, 10, most=80), job([2] * 5, 1, most=60)
    schedule.enter(first, 0.0)
    schedule.enter(second, 0.0)
    schedule.advance(5.0)
    assert (schedule.running, list(schedule.waiting)) == (1, [second])
    heard = run(schedule)
    assert heard[second] == pytest.approx(heard[first] + 1.5)


def test_when_memory_is_full_who_has_said_least_goes_back_and_is_prefilled_again() -> None:
    schedule = Schedule(replace(PLAIN, kv_tokens=200))
    early, late = job([1] * 10, 100), job([2] * 10, 99, most=100)
    schedule.enter(early, 0.0)
    schedule.enter(late, 3.0)
    heard = run(schedule)
    # Only 70 % of what the first may say was kept for it, so both were admitted, and their ends do not fit.
    assert (early.retractions, late.retractions, schedule.counts.retractions) == (0, 1, 1)
    assert heard[late] > heard[early]
    assert (early.made, late.made, schedule.used) == (100, 99, 0)
    # The second time it finds its prompt cached, and computes again what it had said.
    assert schedule.counts.cached_tokens == 10
    assert schedule.counts.prompt_tokens > 10 + 10 + 10 + 80


def test_a_job_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="exceed the memory of 1000"):
        Schedule(PLAIN).enter(job([1] * 900, 100), 0.0)


def test_who_leaves_frees_its_memory_and_leaves_what_it_computed() -> None:
    schedule = Schedule(replace(PLAIN, kv_tokens=100, max_running=1))
    running, waiting = job([1] * 5, 50), job([2] * 5, 50)
    schedule.enter(running, 0.0)
    schedule.enter(waiting, 0.0)
    schedule.advance(1.5 + 3 * 1.01 + 0.5)
    schedule.leave(waiting, schedule.now)
    schedule.leave(running, schedule.now)
    assert run(schedule) == {}
    assert (schedule.used, list(schedule.waiting), running.made) == (0, [], 5)
    assert schedule.tree.match(running.ids)[1] == 5 + 4


def test_a_retraction_of_all_puts_them_first_in_the_queue() -> None:
    schedule = Schedule(PLAIN)
    running, prefilled, waiting = job([1] * 5, 9), job([2] * 30, 1), job([3] * 5, 1)
    schedule.enter(running, 0.0)
    schedule.enter(prefilled, 3.0)
    schedule.enter(waiting, 3.6)
    schedule.retract_all(4.0)
    assert (list(schedule.waiting), schedule.used) == ([running, prefilled, waiting], 0)
    assert (running.made, running.retractions, waiting.retractions) == (3, 1, 0)
    schedule.resume()
    run(schedule)
    assert running.done
    assert prefilled.done
    assert waiting.done


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
    run(schedule)
    assert all(each.done or each.left for each in jobs)
    assert (schedule.used, schedule.running, list(schedule.waiting)) == (0, 0, [])
    assert schedule.tree.size <= memory
    assert memory == 60_000 or schedule.counts.retractions > 0


# In real time


async def test_who_is_done_hears_of_it_though_another_leaves_before_the_timer_rings() -> None:
    pacer = Pacer(PLAIN, time_scale=1e9)  # whatever was begun is over at the next look
    one, other = job([1] * 5, 3), job([2] * 5, 3)
    pacer.enter(one)
    pacer.enter(other)
    pacer.leave(other)
    assert pacer.schedule.ends is None
    assert await asyncio.wait_for(pacer.news(one), PATIENCE) == 3


async def test_time_stands_still_in_a_pause() -> None:
    pacer = Pacer(PLAIN, time_scale=1e9)
    lone = job([1] * 5, 3)
    pacer.stand_still(retract=True)
    pacer.enter(lone)
    waiting = asyncio.ensure_future(pacer.news(lone))
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    pacer.go_on()
    assert await asyncio.wait_for(waiting, PATIENCE) == 3


# What is said


@pytest.mark.parametrize(
    ("labels", "budget", "expected"),
    [
        ({"output_tokens": "7"}, 100, 7),
        ({"output_tokens": "7"}, 5, 5),
        ({"output_tokens": "7", "prompt_tokens": "4"}, 100, 7),
        ({"output_tokens": "7", "prompt_tokens": "2"}, 100, 5),
        ({"output_tokens": "2", "prompt_tokens": "1"}, 100, 1),
    ],
)
def test_what_a_longer_prompt_has_of_an_answer_is_not_said_again(
    labels: dict[str, str], budget: int, expected: int
) -> None:
    model = Model.seeded(ToyTokenizer(), 0, 0.0, 4096)
    sampling = SamplingParams(max_new_tokens=budget)
    assert len(planned(model, GenerationRequest("r", [5, 6, 7, 8], sampling, custom_labels=labels))) == expected
