"""The simulated engine: what `tests/contract` does not show of it beside a real one."""

import asyncio
from typing import Any

import numpy as np
import pytest

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.detokenizer import IncrementalDetokenizer, printable_prefix
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model
from miles_router.testing.worker.model.moe import MoeShape, route
from miles_router.testing.worker.model.prefix_cache import PrefixCache
from miles_router.testing.worker.model.vocabulary import ToyTokenizer
from miles_router.testing.worker.wire.sampling_params import SamplingParams
from tests.support.waiting import soon

TOY = ToyTokenizer()
END = TOY.token_id("<|im_end|>")


def model(seed: int = 0, stop_probability: float = 0.0) -> Model:
    return Model.seeded(TOY, seed, stop_probability, 4096)


def request(rid: str = "r", ids: list[int] | None = None, **sampling: Any) -> GenerationRequest:
    params = SamplingParams.from_json({"max_new_tokens": 8, "ignore_eos": True, **sampling})
    return GenerationRequest(rid, ids or [1, 2, 3], params, noise=1)


def scripted(ids: list[int], **sampling: Any) -> GenerationRequest:
    made = request(max_new_tokens=len(ids), **sampling)
    made.script = ids
    return made


def run(generation: Generation, version: str = "default") -> Generation:
    while generation.finish_reason is None:
        generation.step(version)
    generation.flush()
    return generation


# One generation


def test_without_a_budget_the_context_is_the_limit() -> None:
    done = Generation(Model.seeded(TOY, 0, 0.0, 20), request(max_new_tokens=None))
    assert len(run(done).output_ids) == 20 - 3 - 2


def test_greedy_goes_on_the_same_way_from_its_own_partial_output() -> None:
    whole = run(Generation(model(), request(temperature=0, max_new_tokens=10))).output_ids
    rest = run(Generation(model(), request(ids=[1, 2, 3, *whole[:4]], temperature=0, max_new_tokens=6))).output_ids
    assert rest == whole[4:]


def test_scoring_a_sampled_sequence_gives_its_logprobs_again() -> None:
    from miles_router.testing.worker.model.sampling import context_hash

    shared = model()
    done = run(Generation(shared, request()))
    context = context_hash([1, 2, 3])
    for token, logprob in zip(done.output_ids, done.logprobs, strict=True):
        assert shared.sampler.logprob(context, token) == logprob
        context = context_hash([token], context)


def test_stop_string_longer_in_tokens_than_its_encoding_is_missed_as_in_sglang() -> None:
    assert len(TOY.encode("world")) > 2
    assert len(TOY.encode(" three")) == 1
    done = run(Generation(model(), scripted(list(b" three"), stop=[" three"])))
    assert done.text == " three"


def test_a_token_that_a_stop_string_cuts_through_is_kept_whole() -> None:
    token = TOY.encode(" the")
    done = run(Generation(model(), scripted([65, *token, 66], stop=[" t"])))
    assert done.text == "A"
    assert done.output_ids == [65, *token]


def test_an_early_stop_is_put_off_until_the_least_number_of_tokens() -> None:
    done = run(Generation(model(stop_probability=0.9), request(min_new_tokens=5, max_new_tokens=50, ignore_eos=False)))
    assert len(done.output_ids) >= 5


def test_an_abort_takes_one_token_more() -> None:
    generation = Generation(model(), request())
    generation.step("default")
    generation.abort()
    assert len(run(generation).output_ids) == 2
    assert generation.finish_reason == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def test_each_token_carries_the_version_that_sampled_it() -> None:
    generation = Generation(model(), request(max_new_tokens=5))
    for version in ("1", "1", "2", "2", "2"):
        generation.step(version)
    assert [(span.version, span.start, span.end) for span in generation.spans] == [("1", 0, 2), ("2", 2, 5)]


# Text


def test_unfinished_characters_are_held_back_until_they_are_whole() -> None:
    text = IncrementalDetokenizer(TOY, [], skip_special_tokens=True)
    seen = []
    for byte in "aé世".encode():
        text.push([byte])
        seen.append(text.text)
    assert seen == ["a", "a", "aé", "aé", "aé", "aé世"]


def test_what_stays_unfinished_is_shown_at_the_end() -> None:
    text = IncrementalDetokenizer(TOY, [], skip_special_tokens=True)
    text.push(list(b"ok"))
    text.finish(list("世".encode()[:2]), None, no_stop_trim=False)
    assert text.text == "ok\ufffd"


def test_a_character_begun_in_the_prompt_is_lost_as_in_sglang() -> None:
    text = IncrementalDetokenizer(TOY, list("世".encode()[:2]), skip_special_tokens=True)
    text.finish(list("世".encode()[2:]), None, no_stop_trim=False)
    assert text.text == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [("two words\ufffd", "two "), ("世\ufffd", "世"), ("世", "世"), ("line\n", "line\n"), ("\ufffd", ""), ("", "")],
)
def test_of_an_unfinished_text_whole_words_are_shown(text: str, shown: str) -> None:
    assert printable_prefix(text) == shown


# Prefix cache and experts


def test_a_prefix_is_found_to_the_token_and_never_whole() -> None:
    cache = PrefixCache()
    assert cache.match([1, 2, 3]) == 0
    cache.insert(list(range(100)))
    assert cache.match(list(range(100))) == 99
    assert cache.match([*range(37), 5000, *range(38, 90)]) == 37
    assert cache.match([*range(100), 1, 2]) == 100
    cache.clear()
    assert cache.match(list(range(100))) == 0


def test_the_cache_is_bounded() -> None:
    cache = PrefixCache(max_tokens=50)
    cache.insert(list(range(100, 140)))
    cache.insert(list(range(200, 240)))
    assert cache.match(list(range(200, 240))) == 39
    assert cache.match(list(range(100, 140))) == 0


def test_experts_have_a_row_for_every_token_but_the_last() -> None:
    shape, ids = MoeShape(layers=3, experts=8, top_k=2), [5, 6, 7, 8]
    rows = route(shape, ids)
    assert rows.shape == (3, 3, 2)
    assert rows.dtype == np.int32
    assert rows.min() >= 0
    assert rows.max() < 8
    assert (rows[..., 0] != rows[..., 1]).all()
    assert (route(shape, [*ids, 9])[:3] == rows).all(), "a prefix has the same rows in a longer sequence"
    assert (route(shape, ids, start=2) == rows[2:]).all()
    assert route(shape, ids, start=4).shape == (0, 3, 2)


@pytest.mark.parametrize("text", ["4x8", "axbxc", "4x2x3", "0x8x2", ""])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected LAYERSxEXPERTSxTOPK|need layers"):
        MoeShape.parse(text)


def test_a_shape_is_read() -> None:
    assert MoeShape.parse("48x128x8") == MoeShape(layers=48, experts=128, top_k=8)


# The engine


async def generate(engine: Engine, made: GenerationRequest) -> Generation:
    engine.reserve([made.rid])
    try:
        await engine.admission()
        generation = engine.begin(made)
        try:
            async for _ in engine.outputs(generation):
                pass
        finally:
            engine.end(generation)
        return generation
    finally:
        engine.unreserve([made.rid])


async def started(engine: Engine, made: GenerationRequest) -> "asyncio.Task[Generation]":
    """A generation that has a few tokens and many to go."""
    task = asyncio.ensure_future(generate(engine, made))
    while made.rid not in engine.running or not engine.running[made.rid].output_ids:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task


def slow_engine() -> Engine:
    return Engine(model(), token_latency_s=0.0005)


async def test_a_stream_shows_every_token_and_others_only_the_end() -> None:
    for stream, shown in ((True, 8), (False, 1)):
        engine, made = Engine(model()), request()
        made.stream = stream
        generation = engine.begin(made)
        assert [None async for _ in engine.outputs(generation)] == [None] * shown
        engine.end(generation)


async def test_a_cancelled_generation_leaves_nothing_behind() -> None:
    engine = slow_engine()
    task = await started(engine, request(max_new_tokens=2000))
    task.cancel()
    await asyncio.wait([task])
    assert engine.running == {}
    assert (await soon(generate(engine, request()))).output_ids


async def test_output_is_cached_but_for_its_last_token() -> None:
    engine = Engine(model())
    done = await generate(engine, request())
    again = engine.begin(request(ids=[1, 2, 3, *done.output_ids, 9]))
    assert again.cached_tokens == 3 + 8 - 1
    engine.end(again)


def test_requests_without_rid_differ_and_repeat_on_an_equal_engine() -> None:
    def noises(replica: int) -> list[int]:
        engine = Engine(model(), replica=replica)
        return [engine.noise_for(None, [1, 2]) for _ in range(3)]

    assert len(set(noises(0))) == 3
    assert noises(0) == noises(0)
    assert not set(noises(0)) & set(noises(1))


def test_a_rid_decides_what_is_drawn_on_every_worker() -> None:
    assert Engine(model(), replica=0).noise_for("x", [1]) == Engine(model(), replica=1).noise_for("x", [2])
