"""RoutedExpertsMiddleware over real sockets: whose rows are captured, asked for once, and delivered; held against what
the worker's engine has generated, never against what the router says of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from miles_router.config import MiddlewareSpec
from miles_router.errors import ConfigError
from miles_router.testing import SimulatedWorker
from miles_router.testing.moe import MoeShape, encode_routes
from miles_router.testing.tiny_tokenizer import build
from tests.support.cache_trial import CACHE, checkpoint, events
from tests.support.experts_trial import (
    ASKED,
    EXPERTS,
    MOE,
    SHAPE,
    SHORT,
    WIDTH,
    ExpertsTrial,
    array_of,
    compact,
    event_of,
    experts_of,
    experts_trial,
    generated,
    in_one,
    simulated_experts,
    tokens_of,
    told,
    truth,
)
from tests.support.http import ask
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, able, chat_reply, meta_of
from tests.support.scripted_worker import LAST_CHUNK, Visit, chunk, chunked_head, script
from tests.support.session_trial import CHAT, SESSIONS, Message, message_of, session_trial, user
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.waiting import until

FIELD = b"routed_experts"
COMPLETIONS = "/v1/completions"
SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI = [SYSTEM, user("Hi")]
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}
LAYERS: dict[str, tuple[str, ...]] = {"alone": (), "behind the cache": (CACHE,), "behind both": (SESSIONS, CACHE)}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[ExpertsTrial]:
    async with staged() as stage, simulated_experts(stage, around=(SESSIONS, CACHE)) as made:
        yield made


@pytest.fixture
def trial(shared: ExpertsTrial) -> ExpertsTrial:
    """Sessions and the cache with a keeper of experts behind them; of no test alone, but for its door."""
    shared.worker.door.clear()
    return shared


@pytest.fixture
async def cached(stage: Stage) -> AsyncIterator[ExpertsTrial]:
    async with simulated_experts(stage, around=(CACHE,)) as made:
        yield made


async def all_kept(trial: ExpertsTrial) -> None:
    """Every generation of the worker's is delivered by its id."""
    for generation in trial.generations("/generate"):
        found = await trial.rows(rid=generation.rid)
        assert np.array_equal(found, truth(tokens_of(generation)))


# Shapes of requests

SHAPES: dict[str, dict[str, Any]] = {
    "a text": {"text": "Question: one?"},
    "ids": {"input_ids": [40, 41, 42]},
    "texts": {"text": ["one", "and two", "and three"]},
    "lists of ids": {"input_ids": [[40, 41, 42], [43]]},
    "several samples": {"text": "one", "sampling_params": {**SHORT, "n": 3}},
    "several samples of texts": {"text": ["one", "and two"], "sampling_params": {**SHORT, "n": 3}},
    "one token": {"text": "one", "sampling_params": {**SHORT, "max_new_tokens": 1}},
    "a list of one": {"text": ["one"]},
}


@pytest.mark.parametrize("way", ["whole", "cumulative", "incremental"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_every_generation_is_kept_whatever_was_asked_for(
    stage: Stage, around: Sequence[str], shape: dict[str, Any], way: str
) -> None:
    async with simulated_experts(stage, around=around, incremental_streaming_output=way == "incremental") as trial:
        answer = await trial.post("/generate", {"sampling_params": SHORT, **shape, "stream": way != "whole"})
        assert answer.status == 200
        seen = answer.json() if way == "whole" else events(answer.body)
        assert isinstance(seen, list) == (way != "whole" or len(trial.generations()) > 1 or shape == {"text": ["one"]})
        assert FIELD not in answer.body
        assert trial.starts("/generate") == [0]
        generations = trial.generations("/generate")
        assert (trial.held["answers"], trial.held["missing"]) == (len(generations), {})
        await all_kept(trial)
        if around or isinstance(next(iter(shape.values())), str):  # prompts are told apart by who holds them
            prompts = {tuple(each.input_ids): len(each.input_ids) for each in generations}
            room = sum(prompts.values()) + sum(len(each.output_ids) - 1 for each in generations)
            assert trial.held["bytes"] <= room * WIDTH, "a prompt's rows are held once for all of its samples"


@pytest.mark.parametrize("field", [{"return_routed_experts": False}, {"routed_experts_start_len": 2}])
async def test_a_client_that_asked_for_no_rows_gets_none_and_changes_nothing(
    cached: ExpertsTrial, field: dict[str, Any]
) -> None:
    body = {"text": "Question: one?", "sampling_params": SHORT, **field}
    assert FIELD not in (await cached.post("/generate", body)).body
    assert cached.starts("/generate") == [0]
    await all_kept(cached)


@pytest.mark.parametrize(
    "raw", [b'{"text": "one"}', b' {"text":"one"}\n ', b'{\n"sampling_params": {},"text":"one"\n}']
)
async def test_the_request_is_asked_in_addition_to_what_it_asks(stage: Stage, raw: bytes) -> None:
    async with simulated_experts(stage) as trial:
        assert (await trial.post("/generate", raw)).status == 200
        want = {**json.loads(raw), "return_routed_experts": True, "routed_experts_start_len": 0}
        assert trial.worker.door.at("/generate")[-1].json() == want


@pytest.mark.parametrize("raw", [b"{}", b"[1]", b"7", b'{"text": ', b'{"text": 7}', b""])
async def test_what_is_no_request_is_refused_in_the_words_of_the_worker(stage: Stage, raw: bytes) -> None:
    async with simulated_experts(stage) as trial:
        through = await trial.post("/generate", raw)
        direct = await ask(trial.worker.url, "POST", "/generate", JSON, raw)
        assert direct.status == 400
        assert (through.status, through.body) == (400, direct.body)
        assert (trial.held["generations"], trial.held["missing"]) == (0, {})


async def test_what_generates_nothing_passes_as_it_is(trial: ExpertsTrial) -> None:
    for path in (CHAT, COMPLETIONS):  # outside of sessions nobody holds what they generate
        body = {"model": "m", "messages": HI, "prompt": "Hi", "max_tokens": 4}
        assert (await trial.post(path, {**body, "return_routed_experts": True})).json()["sglext"].keys() == {
            "routed_experts"
        }
        assert FIELD not in (await trial.post(path, body)).body
        assert [each.json().keys() & {"return_routed_experts"} for each in trial.worker.door.at(path)] == [
            {"return_routed_experts"},
            set(),
        ]


# What is held is not asked for again


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_goes_on_is_asked_for_its_new_rows_alone(cached: ExpertsTrial, stream: bool) -> None:
    text = "Question: one?"
    held = 0
    for turn in range(4):
        answer = await cached.post("/generate", {"text": text, "sampling_params": SHORT, "stream": stream})
        said = events(answer.body)[-1]["text"] if stream else answer.json()["text"]
        generation = cached.generations("/generate")[-1]
        assert cached.starts("/generate")[-1] == held, "all rows of the turn before, its last token has none"
        held = len(tokens_of(generation)) - 1
        delivered = await cached.deliver(text=text + said)
        assert np.array_equal(array_of(delivered), truth(tokens_of(generation)))
        assert delivered.value("x-rid") == generation.rid.encode()
        text += f"{said}\nand {turn}?"
    await all_kept(cached)
    assert cached.held["transferred_rows"] == held, "each came once"
    assert cached.held["bytes"] == held * WIDTH, "and is held once"
    assert cached.held["reused_rows"] == sum(cached.starts("/generate"))


async def test_prompts_that_hold_different_prefixes_are_asked_for_the_least(cached: ExpertsTrial) -> None:
    texts = []
    for prompt, count in (("Question: one?", 6), ("What is 17 plus 25? Think again, step by step", 9)):
        said = await cached.generate(text=prompt, sampling_params={**SHORT, "max_new_tokens": count})
        texts.append(prompt + said["text"])
    held = [len(tokens_of(each)) - 1 for each in cached.generations("/generate")]
    before = cached.held["bytes"]
    await cached.generate(text=[f"{each} and more" for each in texts])
    assert cached.starts("/generate")[-1] == min(held) > 0
    new = [len(tokens_of(each)) - 1 - rows for each, rows in zip(cached.generations()[-2:], held, strict=True)]
    assert cached.held["bytes"] == before + sum(new) * WIDTH, "what was held already is not held twice"
    answers = await cached.generate(text=[f"{texts[1]} and less", "und"], sampling_params={**SHORT, "n": 2})
    assert cached.starts("/generate")[-1] == 0, "of one of them nothing is held"
    assert len(answers) == 4
    await all_kept(cached)


async def test_a_prompt_that_is_held_as_a_whole_is_asked_for_what_comes_behind_it(cached: ExpertsTrial) -> None:
    first = await cached.generate(text="Question: one?")
    tokens = tokens_of(cached.generations()[-1])
    await cached.generate(input_ids=tokens)
    assert cached.starts("/generate") == [0, len(tokens) - 1]
    await cached.generate(text="Question: one?")
    assert cached.starts("/generate")[-1] == len(tokens) - 6, "all rows of the prompt, if only the prompt is the same"
    await cached.generate(input_ids=tokens[:-2])
    assert cached.starts("/generate")[-1] in (len(tokens) - 6, len(tokens) - 2), "within what was sampled"
    await all_kept(cached)
    assert first["output_ids"] == tokens[-6:]


async def test_many_clients_at_once_do_not_mix(cached: ExpertsTrial) -> None:
    async def chain(number: int) -> None:
        text = "Question: one?" if number % 2 else f"Question: {number}?"
        for turn in range(3):
            text += (await cached.generate(text=text))["text"] + f"\n{number} {turn}?"

    await asyncio.gather(*map(chain, range(16)))
    assert len(cached.generations("/generate")) == 48
    await all_kept(cached)


# Clients that ask for rows themselves

PARTS = [
    {**generated([7], None), "text": "o", "meta_info": {"id": "r1", "finish_reason": None}},
    generated([7, 8], told([7, 8]), output_token_logprobs=[[-0.5, 7, None], [-0.5, 8, None]]),
]


@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
@pytest.mark.parametrize("cut", [1, 7, 100, 10_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_gets_every_byte_as_the_worker_sent_it(
    stage: Stage, around: Sequence[str], cut: int, stream: bool
) -> None:
    # Spaces, an escaped name and the order of fields: nothing is written anew.
    spaced = json.dumps({**PARTS[1], "odd": 'é\\"routed_experts": "AAAA"', "x": {"routed_experts_": "A"}}).encode()
    whole = b"".join([event_of(PARTS[0]), b"data: " + spaced + b"\n\n", DONE]) if stream else spaced + b"\n"
    head = chunked_head(EVENT_STREAM if stream else JSON)
    pieces = [chunk(whole[at : at + cut]) for at in range(0, len(whole), cut)]
    worker = (await stage.worker()).always(script(head, *pieces, LAST_CHUNK))
    trial = await experts_trial(stage, worker, around=around)
    asked = {**ASKED, "stream": stream, "return_logprob": True, "return_routed_experts": True}
    answer = await trial.post("/generate", asked)
    assert (answer.status, answer.body) == (200, whole)
    assert json.loads(worker.requests[-1].body) == asked
    assert np.array_equal(await trial.rows(rid="r1"), truth([*ASKED["input_ids"], 7, 8]))


@pytest.mark.parametrize("cut", [1, 7, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_rows_are_cut_out_however_the_answer_comes(stage: Stage, cut: int, stream: bool) -> None:
    odd = {"odd": '\\"routed_experts": "AAAA"'}
    parts = [{**part, **odd} for part in PARTS]
    bare = [json.loads(json.dumps(part)) for part in parts]
    del bare[1]["meta_info"]["routed_experts"]
    whole, want = (
        (event_of(parts[0]) + event_of(parts[1]) + DONE, event_of(bare[0]) + event_of(bare[1]) + DONE)
        if stream
        else (compact(parts[1]), compact(bare[1]))
    )
    pieces = [chunk(whole[at : at + cut]) for at in range(0, len(whole), cut)]
    worker = await stage.worker()
    worker.always(script(chunked_head(EVENT_STREAM if stream else JSON), *pieces, LAST_CHUNK))
    trial = await experts_trial(stage, worker)
    answer = await trial.post("/generate", {**ASKED, "stream": stream})
    assert (answer.status, answer.body) == (200, want)
    assert np.array_equal(await trial.rows(rid="r1"), truth([*ASKED["input_ids"], 7, 8]))


@pytest.mark.parametrize("place", ["first", "last", "only"])
async def test_the_field_may_stand_anywhere(stage: Stage, place: str) -> None:
    meta = {"id": "r1", "finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2}
    experts = {"routed_experts": told([7, 8])}
    placed = {"first": {**experts, **meta}, "last": {**meta, **experts}, "only": experts}[place]
    worker = (await stage.worker()).always(script(in_one({"meta_info": placed, "text": "ok"})))
    trial = await experts_trial(stage, worker)
    answer = await trial.post("/generate", ASKED)
    assert answer.body == compact({"meta_info": {} if place == "only" else meta, "text": "ok"})
    assert trial.held["generations"] == (place != "only"), "an id and the lengths are needed to keep them"


async def test_events_are_given_on_as_they_come(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await stage.worker()
    last = event_of(PARTS[1])
    steps = (chunk(event_of(PARTS[0])), gate, chunk(last[:200]), chunk(last[200:]), chunk(DONE), LAST_CHUNK)
    worker.always(script(chunked_head(EVENT_STREAM), *steps))
    trial = await experts_trial(stage, worker)
    for asks in (False, True):
        gate.clear()
        async with await stage.client(trial.router) as client:
            body = compact({**ASKED, "stream": True, "return_routed_experts": asks})
            head = f"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await client.send(head + body)
            await client.read_head("POST")
            assert await client.read_part() == event_of(PARTS[0])
            assert trial.held["answers"] == asks, "the last has not come yet"
            gate.set()
            rest = b""
            while not rest.endswith(DONE):
                rest += await client.read_part()
            assert (FIELD in rest) == asks


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gets_the_rows_that_the_worker_itself_would_tell_it(cached: ExpertsTrial, stream: bool) -> None:
    first = await cached.generate(text="Question: one?")
    ids = tokens_of(cached.generations()[-1])
    body = {"input_ids": [*ids, 40, 41], "rid": "mine", "stream": stream, "return_routed_experts": True}
    body["sampling_params"] = {**SHORT, "temperature": 0}
    through = await cached.post("/generate", body)
    assert cached.worker.door.at("/generate")[-1].json().get("routed_experts_start_len") is None, "as it asked"
    async with SimulatedWorker(moe=MOE, tokenizer=checkpoint()) as other:
        direct = await ask(other.url, "POST", "/generate", JSON, compact(body))
        (generation,) = other.door.generations
    want = encode_routes(truth(tokens_of(generation)))
    for reply in (through, direct):
        said = events(reply.body)[-1] if stream else reply.json()
        assert said["meta_info"]["routed_experts"] == want
        assert said["output_ids"] == generation.output_ids
    assert np.array_equal(await cached.rows(rid="mine"), truth(tokens_of(generation)))
    assert first["output_ids"] == ids[-6:]


@pytest.mark.parametrize("way", ["whole", "cumulative", "incremental"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_every_answer_has_the_rows_that_its_client_asked_for(
    stage: Stage, around: Sequence[str], shape: dict[str, Any], way: str
) -> None:
    async with simulated_experts(stage, around=around, incremental_streaming_output=way == "incremental") as trial:
        body = {"sampling_params": SHORT, **shape, "stream": way != "whole", "return_routed_experts": True}
        answer = await trial.post("/generate", body)
        seen = answer.json() if way == "whole" else events(answer.body)
        metas = [each["meta_info"] for each in (seen if isinstance(seen, list) else [seen])]
        found = {meta["id"]: meta["routed_experts"] for meta in metas if meta["finish_reason"] is not None}
        assert found == {each.rid: encode_routes(truth(tokens_of(each))) for each in trial.generations("/generate")}
        await all_kept(trial)


@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_s_own_first_row_leaves_a_gap_that_is_named(
    stage: Stage, around: Sequence[str], stream: bool
) -> None:
    async with simulated_experts(stage, around=around) as trial:
        own = {"return_routed_experts": True, "routed_experts_start_len": 4, "rid": "mine"}
        body = {"text": "Question: one?", "sampling_params": SHORT, "stream": stream, **own}
        answer = await trial.post("/generate", body)
        said = events(answer.body)[-1] if stream else answer.json()
        tokens = tokens_of(trial.generations()[-1])
        assert said["meta_info"]["routed_experts"] == encode_routes(truth(tokens, 4))
        assert np.array_equal(await trial.rows(rid="mine", start=4), truth(tokens, 4))
        assert np.array_equal(await trial.rows(rid="mine", start=6, stop=8), truth(tokens)[6:8])
        for start in (0, 3):
            status, error, message = await trial.refused(rid="mine", start=start)
            assert (status, error) == (404, "routed_experts_not_held")
            assert f"{start} to 3" in message
        # What the gap is in is asked for from its beginning.
        await trial.generate(input_ids=[*tokens, 40], rid="next")
        assert trial.starts("/generate")[-1] == 0
        assert np.array_equal(await trial.rows(rid="next"), truth(tokens_of(trial.generations()[-1])))


async def test_a_client_s_own_first_row_within_what_is_held_leaves_none(cached: ExpertsTrial) -> None:
    await cached.generate(text="Question: one?")
    tokens = tokens_of(cached.generations()[-1])
    for start in (0, 2, len(tokens) - 1, len(tokens), len(tokens) + 1):
        asked = {"return_routed_experts": True, "routed_experts_start_len": start, "rid": f"from {start}"}
        answer = await cached.generate(input_ids=[*tokens, 50 + start], **asked)
        whole = tokens_of(cached.generations()[-1])
        assert answer["meta_info"]["routed_experts"] == encode_routes(truth(whole, start)), "as it asked"
        if start <= len(tokens):  # the row of the last sampled one came with the requests before
            assert np.array_equal(await cached.rows(rid=f"from {start}"), truth(whole))
            continue
        status, error, message = await cached.refused(rid=f"from {start}")
        assert (status, cached.held["missing"]) == (404, {"experts_without_gap": 1})
        assert error in ("not_found", "routed_experts_not_held"), message


# Sessions


async def episode(trial: ExpertsTrial, session: str, turns: int, **fields: Any) -> list[Message]:
    """So many turns, one behind the other; every second one is streamed."""
    history = [*HI]
    for turn in range(turns):
        if turn % 2:
            await trial.stream(session, history, **fields)
            message = (await trial.records(session))[-1]["response"]
        else:
            message = message_of(await trial.chat(session, history, **fields))
        history += [message, user(f"Go on {turn}")]
    return history[:-1]


@pytest.mark.parametrize("incremental", [False, True])
async def test_each_row_of_an_episode_comes_once(stage: Stage, incremental: bool) -> None:
    async with simulated_experts(stage, around=(SESSIONS,), incremental_streaming_output=incremental) as trial:
        session = await trial.create()
        await episode(trial, session, 8)
        (sample,) = await trial.exact(session)
        ends = [len(tokens_of(each)) - 1 for each in trial.generations(CHAT)]
        assert trial.starts(CHAT) == [0, *ends[:-1]]
        assert len(sample["tokens"]) - 1 == ends[-1]
        assert trial.held["transferred_rows"] == ends[-1]
        assert trial.held["bytes"] == ends[-1] * WIDTH
        assert [each["routed_experts"] for each in await trial.records(session)] == [{"rows": end} for end in ends]
        found = await trial.rows(session_id=session)
        assert np.array_equal(found, experts_of(sample))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_of_several_has_its_rows(trial: ExpertsTrial, stream: bool) -> None:
    session = await trial.create()
    fields: dict[str, Any] = {"n": 3, "temperature": 1}
    if stream:
        assert {each["index"] for part in await trial.stream(session, HI, **fields) for each in part["choices"]} == {
            0,
            1,
            2,
        }
    else:
        await trial.chat(session, HI, **fields)
    for message in [each["response"] for each in await trial.records(session)]:
        await trial.chat(session, [*HI, message, user("Go on")])
    samples = await trial.exact(session)
    assert len(samples) == 3
    generations = trial.generations(CHAT)
    assert sorted(len(tokens_of(each)) - 1 for each in generations[:3]) == sorted(trial.starts(CHAT)[1:])
    for sample in samples:
        found = await trial.rows(session_id=session, leaf=sample["metadata"]["leaf"])
        assert np.array_equal(found, experts_of(sample))


async def test_branches_share_the_rows_of_what_they_share(trial: ExpertsTrial) -> None:
    session = await trial.create()
    before = trial.held["bytes"]
    history = await episode(trial, session, 3)
    await trial.chat(session, [*history[:-2], user("Something else")])
    await trial.chat(session, [*history[:-2], user("Something else")])
    await trial.chat(session, [*history[:-1], {"role": "assistant", "content": "I take that back."}, user("Well?")])
    await trial.chat(session, [SYSTEM, user("So far: much was said.")])
    samples = await trial.exact(session)
    assert [each["metadata"]["leaf"] for each in samples] == [2, 3, 4, 5, 6]
    ends = [len(tokens_of(each)) - 1 for each in trial.generations(CHAT)]
    assert trial.starts(CHAT) == [0, ends[0], ends[1], ends[1], ends[1], ends[1], 0]
    own = sum(end - start for end, start in zip(ends, trial.starts(CHAT), strict=True))
    assert trial.held["bytes"] - before <= own * WIDTH
    assert len(await trial.exact(session, branches="last")) == 1


@pytest.mark.parametrize("say", ["stop token", "stop string", "end"])
async def test_what_the_next_turn_drops_or_keeps_of_an_end_has_its_rows(trial: ExpertsTrial, say: str) -> None:
    session = await trial.create()
    fields: dict[str, Any] = {"max_tokens": 99}
    if say == "stop token":  # which the template would not write: it is dropped
        (end,) = trial.worker.tokenizer.encode("<|endoftext|>")
        trial.worker.say([*trial.worker.tokenizer.encode("Yes"), end])
        fields["stop_token_ids"] = [end]
    else:
        trial.worker.say("one two#three")
        fields["stop"] = ["#"] if say == "stop string" else None
    message = message_of(await trial.chat(session, HI, **fields))
    await trial.exact(session)
    await trial.chat(session, [*HI, message, user("Go on")])
    one, two = trial.generations(CHAT)
    (sample,) = await trial.exact(session)
    assert sample["tokens"] == tokens_of(two)
    assert trial.starts(CHAT) == [0, len(tokens_of(one)) - 1]


async def test_completions_in_a_session_have_their_rows(trial: ExpertsTrial) -> None:
    session = await trial.create()
    path = f"/sessions/{session}{COMPLETIONS}"
    assert (await trial.post(path, {"model": "m", "prompt": "Once upon", "max_tokens": 5})).status == 200
    tokens = tokens_of(trial.generations(COMPLETIONS)[-1])
    asked = {"model": "m", "prompt": [*tokens, 40, 41], "max_tokens": 5, "stream": True}
    answer = await trial.post(path, asked)
    assert answer.body.endswith(DONE)
    assert FIELD not in answer.body
    assert trial.starts(COMPLETIONS) == [0, len(tokens) - 1]
    (sample,) = await trial.exact(session)
    assert sample["tokens"] == tokens_of(trial.generations(COMPLETIONS)[-1])


@pytest.mark.parametrize("fields", [{"prompt": ["Once upon", "a time"]}, {"prompt": "Once upon", "n": 2}])
async def test_of_several_streamed_completions_the_engine_does_not_say_whose_rows_it_tells(
    trial: ExpertsTrial, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    body = {"model": "m", "max_tokens": 5, "stream": True, **fields}
    assert (await trial.post(f"/sessions/{session}{COMPLETIONS}", body)).status == 200
    samples = await trial.samples(session)
    assert len(samples) == 2
    for sample in samples:
        assert "routed_experts" not in sample
        assert "of several completions" in sample["metadata"]["routed_experts_missing"]
    (asked,) = [exchange.json() for exchange in trial.worker.door.at(COMPLETIONS)]
    assert "return_routed_experts" not in asked


async def test_of_several_completions_the_engine_tells_the_first_one_s_rows(trial: ExpertsTrial) -> None:
    session = await trial.create()
    body = {"model": "m", "prompt": ["Once upon", "a time"], "max_tokens": 5}
    assert (await trial.post(f"/sessions/{session}{COMPLETIONS}", body)).status == 200
    first, second = await trial.samples(session)
    assert np.array_equal(experts_of(first), truth(first["tokens"]))
    assert "routed_experts" not in second
    assert second["metadata"]["routed_experts_missing"]
    status, error, _ = await trial.refused(session_id=session, leaf=1)
    assert (status, error) == (404, "routed_experts_not_held")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {}), (CHAT, {"n": 2}), (COMPLETIONS, {})], ids=["chat", "choices", "completion"]
)
async def test_an_agent_that_asks_for_rows_gets_none_and_leaves_no_gap(
    trial: ExpertsTrial, path: str, stream: bool, fields: dict[str, Any]
) -> None:
    session = await trial.create()
    body = {"model": "m", "messages": HI, "prompt": "Hi", "max_tokens": 6, "stream": stream, **fields}
    asks = {"return_routed_experts": True, "routed_experts_start_len": 3, "return_meta_info": not stream}
    answer = await trial.post(f"/sessions/{session}{path}", {**body, **asks})
    assert answer.status == 200
    assert FIELD not in answer.body
    assert await trial.exact(session)


async def test_a_stream_that_is_made_of_a_whole_answer_has_its_rows(stage: Stage) -> None:
    worker = able(await stage.worker(), schema=b"{}")  # an engine that cannot stream ids
    trial = await experts_trial(stage, worker, around=(SESSIONS,))
    worker.next(script(chat_reply([7, 8], meta_info=meta_of([7, 8], routed_experts=told([7, 8])))))
    session = await trial.create()
    assert await trial.stream(session, HI)
    assert not json.loads(worker.requests[-1].body).get("stream")
    assert len(await trial.exact(session)) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_agents_are_shown_the_same_with_a_keeper_as_without(stage: Stage, path: str, stream: bool) -> None:
    shown = []
    async with SimulatedWorker(moe=MOE, tokenizer=checkpoint(), weight_version="1") as worker:
        without = await session_trial(stage, worker, hf_checkpoint=checkpoint())
        for trial in (without, await experts_trial(stage, worker, around=(SESSIONS,))):
            session = await trial.create()
            body = {"model": "m", "messages": HI, "prompt": "Hi", "max_tokens": 6, "stream": stream, "temperature": 0}
            answer = await trial.ask("POST", f"/sessions/{session}{path}", {**body, "logprobs": path == CHAT or 1})
            shown.append([form(each) for each in (events(answer.body) if stream else [answer.json()])])
    assert shown[0] == shown[1]


def form(answer: Any) -> Any:
    """What an answer is made of, without what differs from run to run."""
    if isinstance(answer, Mapping):
        return {name: form(value) for name, value in answer.items() if name not in ("created", "id")}
    return [form(each) for each in answer] if isinstance(answer, list) else answer


async def test_the_binary_form_of_samples_has_the_rows(trial: ExpertsTrial) -> None:
    session = await trial.create()
    history = await episode(trial, session, 2)
    await trial.chat(session, [*history[:-2], user("Something else")])
    spelled = await trial.exact(session)
    answer = await trial.post(f"/sessions/{session}/samples", {"format": "safetensors"})
    arrays = load(answer.body)
    names = ("tokens", "loss_mask", "logprobs", "routed_experts")
    assert set(arrays) == {f"{number}.{name}" for number in range(2) for name in names}
    for number, sample in enumerate(spelled):
        array = arrays[f"{number}.routed_experts"]
        assert array.dtype == np.uint8
        assert np.array_equal(array, truth(sample["tokens"]))


async def test_a_sample_that_is_cut_has_the_rows_of_what_is_left(trial: ExpertsTrial) -> None:
    session = await trial.create()
    await episode(trial, session, 3)
    (whole,) = await trial.exact(session)
    first, second, third = whole["metadata"]["turns"]
    for length in (first["start"] + 1, first["end"], second["start"] + 3, second["end"], third["end"] - 1):
        (sample,) = await trial.exact(session, max_seq_len=length)
        assert len(sample["tokens"]) == length
        assert len(experts_of(sample)) == length - 1


async def test_the_header_dialect_has_its_rows_too(stage: Stage) -> None:
    sessions = (SESSIONS, {"header_sessions": True})
    async with simulated_experts(stage, around=(sessions,)) as trial:
        session = await trial.create()
        headers = [("X-Session-Id", session)]
        asked = {"model": "m", "messages": HI, "max_tokens": 6, "return_routed_experts": True}
        assert FIELD not in (await trial.post(CHAT, asked, headers)).body
        assert len(await trial.exact(session)) == 1


async def test_many_sessions_at_once_do_not_mix_their_rows(trial: ExpertsTrial) -> None:
    async def one(number: int) -> None:
        session = await trial.create()
        history = [SYSTEM, user(f"I am {number}")]
        for turn in range(3):
            message = message_of(await trial.chat(session, history))
            history += [message, user(f"Go on {turn}")]
        assert len(await trial.exact(session)) == 1
        assert (await trial.ask("DELETE", f"/sessions/{session}")).status == 204

    await asyncio.gather(*map(one, range(12)))


# Aborts and pauses


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_what_an_abort_ended_has_its_rows(stage: Stage, around: Sequence[str], stream: bool) -> None:
    async with simulated_experts(stage, around=around, token_latency_s=0.002) as trial:
        body = {"text": "Hi", "sampling_params": ENDLESS, "rid": "mine", "stream": stream}
        async with under_way(trial.post("/generate", body)) as generating:
            await trial.sampling()
            await trial.post("/abort_request", {"rid": "mine"})
            answer = await generating
        said = events(answer.body)[-1] if stream else answer.json()
        assert said["meta_info"]["finish_reason"]["type"] == "abort"
        tokens = tokens_of(trial.generations()[-1])
        assert np.array_equal(await trial.rows(rid="mine"), truth(tokens))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_s_answer_that_was_aborted_has_its_rows(stage: Stage, stream: bool) -> None:
    async with simulated_experts(stage, around=(SESSIONS,), token_latency_s=0.002) as trial:
        session = await trial.create()
        fields: dict[str, Any] = {"rid": "mine", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        async with under_way(trial.turn(session, HI, **fields)) as turn:
            await trial.sampling()
            await trial.post("/abort_request", {"rid": "mine"})
            assert (await turn).status == 200
        (record,) = await trial.records(session)
        assert record["finish_reason"] == "abort"
        assert len(await trial.exact(session)) == 1
        trial.worker.engine.token_latency_s = 0
        await trial.chat(session, [*HI, record["response"], user("Go on")])
        assert len(await trial.exact(session)) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("around", [(), (CACHE,)], ids=["alone", "behind the cache"])
async def test_what_goes_on_behind_a_pause_has_all_its_rows(
    stage: Stage, around: Sequence[str], asks: bool, stream: bool
) -> None:
    settings = {"partial_rollout": "resume"}
    async with simulated_experts(stage, around=around, settings=settings) as trial:
        text = "Question: one?"
        if around:
            text += (await trial.generate(text=text))["text"] + " and two?"
        trial.worker.door.clear()
        trial.worker.engine.token_latency_s = 0.05
        sampling = {"max_new_tokens": 40, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling, "rid": "mine", "stream": stream}
        own = {"return_routed_experts": True} if asks else {}
        async with under_way(trial.post("/generate", {**body, **own})) as generating:
            await trial.sampling()
            await trial.post("/pause_generation", {})
            await until(lambda: trial.router.app.router.gate.held, "it was cut and waits")
            trial.worker.engine.token_latency_s = 0
            await trial.post("/continue_generation", {})
            answer = await generating
        said = events(answer.body)[-1] if stream else answer.json()
        first = trial.generations("/generate")[0]
        assert len(said["output_ids"]) == 40
        tokens = first.input_ids + said["output_ids"]
        assert len(trial.worker.door.at("/generate")) >= 2
        assert np.array_equal(await trial.rows(rid="mine"), truth(tokens))
        assert (FIELD in answer.body) == asks
        if asks:
            assert said["meta_info"]["routed_experts"] == encode_routes(truth(tokens))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_a_pause_cuts_has_the_rows_of_what_became_of_it(stage: Stage, stream: bool) -> None:
    settings = {"partial_rollout": "resume"}
    async with simulated_experts(stage, around=(SESSIONS,), settings=settings) as trial:
        session = await trial.create()
        message = message_of(await trial.chat(session, HI))
        history = [*HI, message, user("Go on")]
        trial.worker.engine.token_latency_s = 0.05
        async with under_way(trial.turn(session, history, max_tokens=40, ignore_eos=True, stream=stream)) as turn:
            await trial.sampling()
            await trial.post("/pause_generation", {})
            await until(lambda: not trial.worker.running, "it was cut")
            trial.worker.engine.token_latency_s = 0
            await trial.post("/continue_generation", {})
            assert (await turn).status == 200
        assert len(await trial.exact(session)) == 1


# Delivery


@pytest.mark.parametrize(("experts", "dtype"), [(8, "uint8"), (256, "uint8"), (300, "uint16"), (60_000, "uint16")])
async def test_every_format_says_the_same(stage: Stage, experts: int, dtype: str) -> None:
    moe = MoeShape(5, experts, 3)
    async with simulated_experts(stage, moe=moe, options={"moe_shape": f"5x{experts}x3"}) as trial:
        long = {"max_new_tokens": 200, "ignore_eos": True}
        answer = await trial.generate(text="Question: one?", sampling_params=long)
        (generation,) = trial.generations()
        want = truth(tokens_of(generation), moe=moe)
        rid = answer["meta_info"]["id"]
        raw = await trial.deliver(rid=rid)
        assert (raw.value("x-dtype"), raw.value("x-start")) == (dtype.encode(), b"0")
        assert raw.value("x-rid") == rid.encode()
        assert raw.value("x-shape") == f"{len(want)},5,3".encode()
        assert np.array_equal(array_of(raw), want)
        packed = await trial.deliver(rid=rid, format="safetensors")
        assert packed.value("content-type") == b"application/octet-stream"
        arrays = load(packed.body)
        assert set(arrays) == {"routed_experts"}
        assert (arrays["routed_experts"].dtype.name, arrays["routed_experts"].shape) == (dtype, want.shape)
        assert np.array_equal(arrays["routed_experts"], want)
        spelled = await trial.deliver(rid=rid, format="json")
        assert spelled.value("content-type") == b"application/json"
        assert spelled.json()["routed_experts"] == encode_routes(want), "as the engine itself tells them"
        assert (spelled.json()["shape"], spelled.json()["dtype"]) == ([*want.shape], "int32")


async def test_a_trajectory_of_narrow_rows_and_wide_ones_is_delivered_wide(stage: Stage) -> None:
    worker = able(await stage.worker())
    narrow, wide = np.full((4, 3, 2), 7, np.int32), np.full((100, 3, 2), 299, np.int32)
    trial = await experts_trial(stage, worker, around=(SESSIONS,), options={"moe_shape": "3x300x2"})
    worker.next(script(chat_reply([7, 8], meta_info=meta_of([7, 8], routed_experts=encode_routes(narrow)))))
    session = await trial.create()
    message = message_of(await trial.chat(session, HI))
    assert (await trial.rows(session_id=session)).dtype == np.uint8
    given: list[int] = []

    async def second(visit: Visit) -> None:
        given.extend(json.loads(await visit.read_body())["input_ids"])
        experts = encode_routes(wide[: len(given) - 4])
        choice: dict[str, Any] = {"prompt_token_ids": given, "meta_info": meta_of([9], routed_experts=experts)}
        await visit.write(chat_reply([9], **choice))

    worker.next(second)
    await trial.chat(session, [*HI, message, user("Go on")])
    assert given[:5] == [*ASKED["input_ids"], 7, 8]
    found = await trial.rows(session_id=session)
    assert found.dtype == np.uint16
    assert np.array_equal(found, np.concatenate([narrow, wide[: len(given) - 4]]))
    (sample,) = await trial.samples(session)
    assert np.array_equal(experts_of(sample), found)
    assert (await trial.rows(session_id=session, stop=4)).dtype == np.uint8
    assert trial.held["bytes"] == narrow.size + 2 * wide[: len(given) - 4].size


@pytest.mark.parametrize("rid", ["r 1", "é", "a\nb", "x" * 300])
async def test_any_id_may_name_rows(stage: Stage, rid: str) -> None:
    worker = (await stage.worker()).always(script(in_one(generated([7, 8], told([7, 8]), rid=rid))))
    trial = await experts_trial(stage, worker)
    await trial.generate(**ASKED)
    delivered = await trial.deliver(rid=rid)
    assert np.array_equal(array_of(delivered), truth([*ASKED["input_ids"], 7, 8]))
    assert (delivered.value("x-rid") or rid.encode()) == rid.encode()


async def test_of_two_generations_with_one_id_the_later_is_delivered(stage: Stage) -> None:
    async with simulated_experts(stage) as trial:
        for ids in ([40, 41], [42, 43, 44]):
            await trial.generate(input_ids=ids, rid="same")
        assert np.array_equal(await trial.rows(rid="same"), truth(tokens_of(trial.generations()[-1])))


@pytest.fixture(scope="module")
async def kept() -> AsyncIterator[ExpertsTrial]:
    """A generation "one", and sessions "line" and "tree", of which the second has leaves 0 and 1."""
    async with staged() as stage, simulated_experts(stage, around=(SESSIONS, CACHE)) as made:
        await made.generate(text="Question: one?", rid="one")
        for session, times in (("line", 1), ("tree", 2)):
            await made.create(session)
            for _ in range(times):
                await made.chat(session, HI)
        yield made


@pytest.mark.parametrize("form", ["raw", "json", "safetensors"])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 1), (3, 5), (2, None), (None, 4), (None, None), (-1, -1)], ids=str
)
async def test_any_range_of_rows_is_delivered(
    kept: ExpertsTrial, form: str, start: int | None, stop: int | None
) -> None:
    want = truth(tokens_of(kept.worker.door.generation("one")))
    first = len(want) if start == -1 else start
    last = len(want) if stop == -1 else stop
    part = want[first:last]
    given = {name: value for name, value in (("start", first), ("stop", last)) if value is not None}
    answer = await kept.deliver(rid="one", format=form, **given)
    assert answer.status == 200, answer.body
    if form == "raw":
        assert np.array_equal(array_of(answer), part)
        assert array_of(answer).shape == part.shape
        assert answer.value("x-start") == str(first or 0).encode()
    elif form == "json":
        told = answer.json()
        assert (told["routed_experts"], told["start"]) == (encode_routes(part), first or 0)
        assert told["shape"] == [*part.shape]
    else:
        found = load(answer.body)["routed_experts"]
        assert found.shape == part.shape
        assert np.array_equal(found, part)


async def test_rows_are_delivered_by_whatever_names_them(kept: ExpertsTrial) -> None:
    one = kept.worker.door.generation("one")
    for named in ({"rid": "one"}, {"text": f"Question: one?{one.text}"}):
        assert np.array_equal(await kept.rows(**named), truth(tokens_of(one)))
    first, *_ = await kept.exact("tree")
    for session, fields in (("tree", {"leaf": 0}), ("line", {}), ("line", {"leaf": 0})):
        (sample, *_) = await kept.exact(session)
        assert np.array_equal(await kept.rows(session_id=session, **fields), experts_of(sample))
        rid = (await kept.records(session))[0]["rid"]
        assert np.array_equal(await kept.rows(rid=rid), experts_of(sample))
    assert first["metadata"]["leaf"] == 0


UNKNOWN: list[tuple[Any, str]] = [
    ({"rid": "two"}, "not_found"),
    ({"rid": ""}, "not_found"),
    ({"text": "Question: two?"}, "not_found"),
    ({"text": "Question"}, "not_found"),
    ({"session_id": "other"}, "session_not_found"),
]


@pytest.mark.parametrize(("asked", "error"), UNKNOWN, ids=[str(each) for each, _ in UNKNOWN])
async def test_what_nobody_has_is_not_found(kept: ExpertsTrial, asked: Any, error: str) -> None:
    assert (await kept.refused(**asked))[:2] == (404, error)


REFUSED: list[Any] = [
    b"",
    b"{",
    [],
    7,
    {},
    {"rid": None},
    {"rid": "one", "text": "Question: one?"},
    {"rid": "one", "session_id": "line"},
    {"rid": 7},
    {"rid": ["one"]},
    {"text": 7},
    {"session_id": ["line"]},
    {"rid": "one", "leaf": 0},
    {"rid": "one", "strict": True},
    {"text": "Question: one?", "leaf": 0},
    {"rid": "one", "format": "pickle"},
    {"rid": "one", "format": 7},
    {"rid": "one", "format": ["raw"]},
    {"rid": "one", "format": None},
    {"rid": "one", "start": -1},
    {"rid": "one", "start": "0"},
    {"rid": "one", "start": True},
    {"rid": "one", "start": 1.0},
    {"rid": "one", "start": 3, "stop": 2},
    {"rid": "one", "stop": 10_000},
    {"rid": "one", "start": 10_000},
    {"rid": "one", "stop": None},
    {"session_id": "tree"},
    {"session_id": "tree", "leaf": 2},
    {"session_id": "tree", "leaf": -1},
    {"session_id": "tree", "leaf": True},
    {"session_id": "tree", "leaf": "0"},
]


@pytest.mark.parametrize("asked", REFUSED, ids=str)
async def test_what_is_no_request_for_rows_is_refused_and_changes_nothing(kept: ExpertsTrial, asked: Any) -> None:
    before = kept.held
    answer = await kept.post("/routed_experts", asked)
    assert (answer.status, answer.error_type) == (400, "invalid_request")
    assert answer.json()["error"]["message"]
    assert kept.held == before
    assert (await kept.deliver(rid="one")).status == 200


async def test_what_no_layer_holds_cannot_be_named(stage: Stage) -> None:
    async with simulated_experts(stage) as trial:
        await trial.generate(text="Question: one?")
        for asked in ({"text": "Question: one?"}, {"session_id": "s"}):
            assert (await trial.refused(**asked))[:2] == (400, "invalid_request")
        assert (await trial.ask("GET", "/routed_experts")).status == 405


# How long rows are held


async def test_rows_that_found_no_room_are_said_to_be_missing(stage: Stage) -> None:
    room = 100 * WIDTH
    options = {"moe_shape": SHAPE, "max_bytes": room}
    async with simulated_experts(stage, around=(SESSIONS,), options=options) as trial:
        old, new = await trial.create("old"), await trial.create("new")
        message = message_of(await trial.chat(old, HI, max_tokens=30))
        await trial.exact(old)
        await trial.chat(new, [*HI, user("Something quite different")], max_tokens=30)
        assert (trial.held["evicted"], trial.held["generations"]) == (1, 1)
        assert await trial.metric("evicted_total") == 1
        assert trial.held["bytes"] <= room
        (sample,) = await trial.samples(old)
        assert "routed_experts" not in sample
        assert "evicted" in sample["metadata"]["routed_experts_missing"]
        assert (await trial.records(old))[0]["routed_experts"] == {"rows": 0, "reason": "evicted"}
        answer = await trial.post(f"/sessions/{old}/samples", {"format": "safetensors"})
        assert set(load(answer.body)) == {"0.tokens", "0.loss_mask", "0.logprobs"}
        status, error, _ = await trial.refused(session_id=old)
        assert (status, error) == (404, "routed_experts_not_held")
        await trial.exact(new)
        await trial.chat(old, [*HI, message, user("Go on")], max_tokens=2)
        assert trial.starts(CHAT)[-1] == 0, "what is held no more is asked for again"
        await trial.exact(old)
        assert trial.held["bytes"] <= room


async def test_generations_go_in_the_order_of_their_last_use(stage: Stage) -> None:
    async with simulated_experts(stage, options={"moe_shape": SHAPE, "max_bytes": 40 * WIDTH}) as trial:
        for rid in ("one", "two", "three"):
            await trial.generate(input_ids=[40, 41, 42, ord(rid[0])], rid=rid)  # 9 rows
        await trial.rows(rid="one")
        for rid in ("four", "five"):
            await trial.generate(input_ids=[40, 41, 42, 43, ord(rid[0])], rid=rid)  # 10 rows
        assert trial.held["bytes"] == (9 + 9 + 10 + 10) * WIDTH
        assert await trial.metric("bytes") == trial.held["bytes"]
        assert (await trial.refused(rid="two"))[0] == 404
        for rid in ("one", "three", "four", "five"):
            assert np.array_equal(await trial.rows(rid=rid), truth(tokens_of(trial.worker.door.generation(rid))))


async def test_what_is_larger_than_all_room_is_said_and_nothing_else_goes_wrong(stage: Stage) -> None:
    options = {"moe_shape": SHAPE, "max_bytes": 20 * WIDTH}
    async with simulated_experts(stage, around=(SESSIONS,), options=options) as trial:
        session = await trial.create()
        assert message_of(await trial.chat(session, HI, max_tokens=60))
        (sample,) = await trial.samples(session)
        assert "max_bytes" in sample["metadata"]["routed_experts_missing"]
        assert (await trial.missing(), trial.held["bytes"]) == ({"experts_fit": 1}, 0)


async def test_a_session_that_is_deleted_gives_its_bytes_back(stage: Stage) -> None:
    async with simulated_experts(stage, around=(SESSIONS,)) as trial:
        session = await trial.create()
        await episode(trial, session, 3)
        rid = (await trial.records(session))[-1]["rid"]
        assert trial.held["bytes"] == await trial.metric("bytes") > 0
        assert (await trial.ask("DELETE", f"/sessions/{session}")).status == 204
        await until(lambda: not trial.held["bytes"], "its bytes are back", deadline=1)
        assert (await trial.metric("bytes"), await trial.metric("generations")) == (0, 0)
        assert (await trial.refused(rid=rid))[:2] == (404, "not_found")
        assert trial.held["evicted"] == 0, "they went with the session"


async def test_what_the_cache_lets_go_gives_its_bytes_back(stage: Stage) -> None:
    async with simulated_experts(stage, around=((CACHE, {"max_tokens": 60}),)) as trial:
        for number in range(12):
            await trial.generate(text=f"{number} is a number")
        tokens = trial.router.app.router.statistics["radix_tree"]()["tokens"]
        assert isinstance(tokens, int)
        assert trial.held["bytes"] <= tokens * WIDTH < sum(len(tokens_of(each)) for each in trial.generations()) * WIDTH
        first, last = trial.generations()[0], trial.generations()[-1]
        assert (await trial.refused(rid=first.rid))[0] == 404
        assert np.array_equal(await trial.rows(rid=last.rid), truth(tokens_of(last)))


async def test_the_numbers_are_those_of_what_came(cached: ExpertsTrial) -> None:
    first = await cached.generate(text="Question: one?")
    await cached.generate(text=f"Question: one?{first['text']} and two?")
    one, two = (len(tokens_of(each)) - 1 for each in cached.generations())
    want = {"answers": 2, "transferred_rows": two, "reused_rows": one, "evicted": 0, "evicted_bytes": 0}
    assert cached.held | want == cached.held
    assert cached.held["saved_bytes"] == len(encode_routes(truth(range(one + 1))))
    assert cached.held["shape"] == {"layers": 3, "top_k": 2, "experts": 40}
    for name in (*want, "saved_bytes"):
        assert await cached.metric(f"{name}_total") == cached.held[name]
    for name in ("generations", "bytes"):
        assert await cached.metric(name) == cached.held[name]
    assert (await cached.ask("GET", "/router/info")).json()["statistics"]["routed_experts"] == cached.held


# Where it is listed, and what it is told

ORDERS = [
    ((EXPERTS, CACHE), "behind"),
    ((EXPERTS, SESSIONS), "behind"),
    ((SESSIONS, EXPERTS, CACHE), "behind"),
    ((EXPERTS, SESSIONS, CACHE), "behind"),
    ((SESSIONS, CACHE, EXPERTS, EXPERTS), "twice"),
    ((EXPERTS, EXPERTS), "twice"),
    ((EXPERTS, CACHE, EXPERTS), "twice|behind"),
]


@pytest.mark.parametrize(("order", "says"), ORDERS, ids=[str(number) for number in range(len(ORDERS))])
async def test_a_keeper_in_the_wrong_place_stops_the_start(stage: Stage, order: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"routed_experts.*({says})"):
        await stage.router(middlewares=[MiddlewareSpec(path, {}) for path in order], hf_checkpoint=checkpoint())


@pytest.mark.parametrize(
    "shape",
    ["48x128", "48x128x8x1", "0x8x2", "4x0x2", "4x8x0", "4x8x9", "-4x8x2", "fourx8x2", "4x70000x2", "4*8*2", "x"],
)
async def test_a_shape_that_is_none_stops_the_start(stage: Stage, shape: str) -> None:
    with pytest.raises(ConfigError, match="moe_shape"):
        await experts_trial(stage, options={"moe_shape": shape})


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": -1}, {"shape": SHAPE}], ids=str)
async def test_options_that_make_no_sense_stop_the_start(stage: Stage, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="routed_experts"):
        await experts_trial(stage, options=options)


@pytest.mark.parametrize("shape", ["3X40X2", SHAPE])
async def test_a_shape_may_be_spelled_either_way(stage: Stage, shape: str) -> None:
    async with simulated_experts(stage, options={"moe_shape": shape}) as trial:
        await trial.generate(text="Question: one?", rid="one")
        assert (await trial.rows(rid="one")).shape[1:] == (3, 2)


@pytest.mark.parametrize("moe", [MOE, MoeShape(4, 64, 8), MoeShape(7, 300, 3)], ids=str)
async def test_where_nobody_tells_the_shape_rows_are_flat(stage: Stage, moe: MoeShape) -> None:
    async with simulated_experts(stage, around=(SESSIONS,), moe=moe, options={}) as trial:
        for rid, ids in (("short", [40]), ("long", [40, 41, 42])):
            await trial.generate(input_ids=ids, rid=rid)
            want = truth(tokens_of(trial.worker.door.generation(rid)), moe=moe)
            assert np.array_equal(await trial.rows(rid=rid), want.reshape(len(want), -1))
            spelled = (await trial.deliver(rid=rid, format="json")).json()
            assert spelled["shape"] == [len(want), moe.layers * moe.top_k]
            assert spelled["routed_experts"] == encode_routes(want)
        session = await trial.create()
        await trial.chat(session, HI)
        (sample,) = await trial.samples(session)
        want = truth(sample["tokens"], moe=moe)
        assert "moe_shape" in sample["metadata"]["routed_experts_missing"], "what is trained on has its dimensions"
        assert np.array_equal(await trial.rows(session_id=session), want.reshape(len(want), -1))
        assert trial.held["shape"] is None


async def test_an_answer_of_another_width_than_the_first_is_not_held(stage: Stage) -> None:
    worker = await stage.worker()
    trial = await experts_trial(stage, worker, options={})
    for rid, moe in (("first", MOE), ("other", MoeShape(5, 40, 2)), ("again", MOE)):
        worker.next(script(in_one(generated([7, 8], told([7, 8], moe=moe), rid=rid))))
        await trial.generate(**ASKED)
        assert (await trial.deliver(rid=rid)).status == (404 if rid == "other" else 200)
    assert sum((await trial.missing()).values()) == 1


TOLD: list[dict[str, Any]] = [
    {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 40},
    {"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_routed_experts": 40},
    {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_local_experts": 40},
    {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 40}},
]


@pytest.mark.parametrize("config", TOLD, ids=[str(number) for number in range(len(TOLD))])
async def test_the_checkpoint_tells_the_shape(stage: Stage, tmp_path: Path, config: dict[str, Any]) -> None:
    build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with simulated_experts(stage, options={}, settings={"hf_checkpoint": str(tmp_path)}) as trial:
        assert trial.held["shape"] == {"layers": 3, "top_k": 2, "experts": 40}
        await trial.generate(text="Question: one?", rid="one")
        await all_kept(trial)
        assert (await trial.rows(rid="one")).shape[1:] == (3, 2)


async def test_what_the_operator_says_goes_before_the_checkpoint(stage: Stage, tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "num_experts_per_tok": 1}))
    async with simulated_experts(stage, settings={"hf_checkpoint": str(tmp_path)}) as trial:
        await trial.generate(text="Question: one?")
        await all_kept(trial)
