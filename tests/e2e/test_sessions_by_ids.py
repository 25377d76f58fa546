"""Sessions on an engine whose chat takes no ids and tells none: the router renders prompts, has the engine sample
behind ids, and reads the answers. Samples are what went through the proxy of the engine, at every position."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.generation import Generation
from tests.sglang_jax_worker import SOURCE, JaxWorker, jax_workers, model_of_words
from tests.support.agent_apis import APIS
from tests.support.brake import Brake
from tests.support.by_ids_trial import five_turns
from tests.support.recording_proxy import RecordingProxy
from tests.support.session_apis import BOTH, Api, Said, case
from tests.support.session_trial import (
    ADD,
    ASK_ADD,
    CHAT,
    SessionTrial,
    message_of,
    qwen3,
    session_trial,
    text_of,
    user,
)
from tests.support.simulated.sglang_jax import SimulatedJax
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.under_way import under_way
from tests.support.waiting import until

PARSERS = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
KINDS = [
    "simulated",
    pytest.param(
        "sglang-jax", marks=[pytest.mark.sglang, pytest.mark.skipif(SOURCE is None, reason="SGLANG_JAX_SRC is not set")]
    ),
]


@pytest.fixture(scope="module")
def real() -> Iterator[list[JaxWorker]]:
    with jax_workers(1, checkpoint=model_of_words(), more=PARSERS) as workers:
        yield workers


@asynccontextmanager
async def simulated(**settings: Any) -> AsyncIterator[SimulatedWorker]:
    made = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3", **settings}
    async with SimulatedJax(tokenizer=qwen3(), **made) as worker:
        yield worker


class Engine(NamedTuple):
    """The proxy of a worker, and its checkpoint."""

    proxy: RecordingProxy
    checkpoint: str


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "simulated":
            url, checkpoint = (await stack.enter_async_context(simulated())).url, tokenizer_directory("qwen3")
        else:
            url, checkpoint = request.getfixturevalue("real")[0].url, str(model_of_words())
        yield Engine(await stack.enter_async_context(RecordingProxy(url)), checkpoint)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", sorted(APIS))
async def test_five_turns_with_tools_are_what_the_engine_was_given_and_sampled(
    stage: Stage, engine: Engine, api: str, stream: bool
) -> None:
    await five_turns(stage, engine.proxy, engine.checkpoint, api, stream=stream)


async def chat(stage: Stage, worker: SimulatedWorker, **settings: Any) -> tuple[SessionTrial, str]:
    trial = await session_trial(stage, worker, **settings)
    return trial, await trial.create()


async def test_a_stream_shows_reasoning_text_and_calls_as_they_are_sampled(stage: Stage) -> None:
    async with simulated() as worker:
        trial, session = await chat(stage, worker)
        worker.say(f"<think>\nLet me add these.\n</think>\n\nOne moment.\n{ASK_ADD}\n{ASK_ADD}")
        chunks = await trial.stream(session, [user("17 + 25?")], tools=[ADD], max_tokens=200)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        reasoning = [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")]
        assert ("".join(reasoning).strip(), text_of(chunks).strip()) == ("Let me add these.", "One moment.")
        assert len(reasoning) > 3, "it comes by tokens"
        named = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls") or () if call["id"]]
        assert named == ["add", "add"]
        assert [each["finish_reason"] for chunk in chunks for each in chunk["choices"]][-1] == "tool_calls"
        assert not any("sglext" in chunk or any(each["logprobs"] for each in chunk["choices"]) for chunk in chunks)


async def test_a_stop_string_and_half_a_character_are_never_shown(stage: Stage) -> None:
    async with simulated() as worker:
        trial, session = await chat(stage, worker)
        worker.say("Smile 🚀 and ST then STOP and more")
        chunks = await trial.stream(session, [user("Hi")], stop=["STOP"], max_tokens=64)
        texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(texts) == "Smile 🚀 and ST then "
        assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
        assert chunks[-1]["choices"][0]["matched_stop"] == "STOP"


INVALID: Sequence[tuple[str, Any]] = [
    ("tools", "x"),
    ("tools", [{"type": "function", "function": "x"}]),
    ("chat_template_kwargs", [1]),
    ("response_format", "text"),
    *(("input_ids", ids) for ids in (["a"], [-1, 5], [1 << 70], [True], "x")),
]


async def test_an_answer_that_goes_on_within_a_thought_is_read_as_one(stage: Stage) -> None:
    async with simulated() as worker:
        trial, session = await chat(stage, worker)
        worker.say("hm\n</think>\n\nyes")
        begun = {"role": "assistant", "content": "<think>\nI think"}
        answer = await trial.chat(session, [user("Hi"), begun], continue_final_message=True, max_tokens=64)
        message = message_of(answer)
        assert (message["reasoning_content"].strip(), message["content"].strip()) == ("hm", "yes")


async def test_a_stream_shows_all_of_a_text_that_is_read_otherwise_as_a_whole(stage: Stage) -> None:
    async with simulated() as worker:
        trial, session = await chat(stage, worker)
        words = "word " * 400
        worker.say(f"\n<think>\nHm\n</think>\n\n{words}end\n{ASK_ADD}")
        chunks = await trial.stream(session, [user("17 + 25?")], tools=[ADD], max_tokens=2000)
        assert text_of(chunks).strip().endswith("end")
        (record,) = await trial.records(session)
        assert record["shown_otherwise"]


async def test_a_parser_that_nothing_here_stands_in_for_is_refused_by_name(stage: Stage) -> None:
    async with simulated(tool_call_parser="pythonic") as worker:
        trial, session = await chat(stage, worker)
        answer = await trial.turn(session, [user("Hi")], tools=[ADD])
        assert (answer.status, "pythonic" in answer.body.decode()) == (501, True)
        assert (await trial.turn(session, [user("Hi")])).status == 200, "without tools nothing needs it"


async def test_completions_of_a_session_are_refused_by_name(stage: Stage) -> None:
    async with simulated() as worker:
        trial, session = await chat(stage, worker)
        answer = await Api("/v1/completions").ask(trial, session, 4)
        assert (answer.status, answer.error_type) == (501, "unsupported_by_engine")


async def test_a_fleet_of_both_kinds_serves_each_session_exactly(stage: Stage) -> None:
    async with (
        simulated() as one,
        SimulatedWorker(tokenizer=qwen3(), reasoning_parser="qwen3", weight_version="1") as other,
    ):
        trial = await session_trial(stage, one, other)
        for number in range(6):
            session, messages = await trial.create(f"s{number}"), [user(f"Hi {number}")]
            for turn in range(3):
                message = message_of(await trial.chat(session, messages, max_tokens=6))
                messages += [message, user(f"And {turn}?")]
            (sample,) = await trial.samples(session)
            every = [each for worker in (one, other) for each in worker.log.generations]
            tokens = sample["tokens"]
            turns = [each for each in every if tokens[: len(each.input_ids)] == each.input_ids]
            assert len(turns) == 3
            for each in turns:
                begin, end = len(each.input_ids), len(each.input_ids) + len(each.output_ids)
                assert tokens[begin:end] == each.output_ids
                assert sample["loss_mask"][begin:end] == [1] * len(each.output_ids)
        assert one.log.generations
        assert other.log.generations


@pytest.mark.alone("its worker comes back within a step of the test's loop")
@pytest.mark.parametrize("tokens", [[0], [13, 3]])
async def test_a_stream_whose_worker_was_lost_goes_on_behind_the_same_ids(stage: Stage, tokens: list[int]) -> None:
    """Tokens that are parts of a character spell nothing: their ids are told."""
    async with simulated() as worker:
        trial, session = await chat(stage, worker, resume_on_worker_loss=True, max_retries=3)
        brake, text = Brake(worker.engine), f"🚀🛰️🪐 naïve 混合, and\n{ASK_ADD}"
        worker.say(text)
        async with under_way(trial.stream(session, [user("Hi")], tools=[ADD], max_tokens=200)) as turn:
            for count in tokens:
                brake.when = functools.partial(has_sampled, count)
                await until(lambda: brake.on, "it has sampled so many")
                await worker.kill()
                brake.on, brake.when = False, None
                await worker.restart()
            chunks = await turn
        assert text_of(chunks).strip() == "🚀🛰️🪐 naïve 混合, and"
        (sample,) = await trial.samples(session)
        ids = qwen3().encode(text)
        assert sample["tokens"][-len(ids) - 1 : -1] == ids
        assert sum(sample["loss_mask"]) == len(ids) + 1


def has_sampled(count: int, generation: Generation) -> bool:
    return len(generation.output_ids) >= count


TEXTS = (
    "It is 42.",
    "<think>\nHm.\n</think>\n\nIt is 42.",
    "<think>\nHm, and so on",
    f"<think>\nHm.\n</think>\n\n{ASK_ADD}",
    f"<think>\nHm.\n{ASK_ADD}",
    f"First this.\n{ASK_ADD}\n{ASK_ADD}",
    f"{ASK_ADD}\nThere.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 17,}\n</tool_call>',
    '<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    "a <tool and <thi",
    "  \n It is 42. \n\n",
    "naïve 混合 🚀",
)


async def test_what_needs_a_grammar_of_the_engine_is_refused_by_name(stage: Stage) -> None:
    """And what no engine would take is refused as it is everywhere."""
    strict = {"tools": [{**ADD, "function": {**ADD["function"], "strict": True}}]}
    unsupported: dict[str, Any] = {"tool_choice": {"tools": [ADD], "tool_choice": "required"}, "strict": strict}
    none: list[Any] = ["x", {}]
    schemas = [{"type": "json_schema", "json_schema": schema} for schema in none]
    async with simulated() as worker:
        trial, session = await chat(stage, worker)
        for stream in BOTH:
            for what, fields in unsupported.items():
                with case(what, stream):
                    answer = await trial.turn(session, [user("Hi")], stream=stream, **fields)
                    assert (answer.status, answer.error_type) == (501, "unsupported_by_engine")
                    assert what in answer.body.decode()
                    assert "sglang-jax" in answer.body.decode()
            for name, value in INVALID:
                with case(name, value, stream):
                    invalid: Any = {name: value}
                    answer = await trial.turn(session, [user("Hi")], stream=stream, **invalid)
                    assert (answer.status, answer.error_type) == (400, "invalid_request"), answer.body
        for wanted in schemas:
            answer = await trial.turn(session, [user("Hi")], response_format=wanted)
            assert (answer.status, b"response_format" in answer.body) == (501, True)
        assert not worker.log.generations
        assert await trial.records(session) == []


def plainly(said: Said) -> Any:
    """An answer as two engines may say it: names of calls are made, and what is empty may be left out."""
    calls = [(name, arguments.replace(" ", "")) for _, name, arguments in said.calls]
    return said.text.strip(), said.reasoning.strip(), calls, said.end


async def test_a_text_is_read_as_sglang_reads_it(stage: Stage) -> None:
    """Streamed or whole, it is what SGLang makes of the whole text. Of a text without a mark SGLang believes that it is
    all reasoning, unless it is told that the model does not think."""
    api, parsers = Api(CHAT), dict[str, Any](tool_call_parser="qwen25", reasoning_parser="qwen3")
    async with simulated() as one, SimulatedWorker(tokenizer=qwen3(), weight_version="1", **parsers) as other:
        trials = [await session_trial(stage, worker) for worker in (one, other)]
        for text, stream, most in itertools.product(TEXTS, BOTH, (200, 9)):
            with case(repr(text), stream, most):
                answers = []
                for trial, streamed in zip(trials, (stream, False), strict=True):
                    trial.worker.say(text)
                    session, thinks = await trial.create(), {"enable_thinking": text.startswith("<think>")}
                    fields: Any = {"stream": streamed, "tools": [ADD], "chat_template_kwargs": thinks}
                    said = await api.turn(trial, session, [user("17 + 25?")], most, **fields)
                    answers.append(plainly(said))
                    (record,) = await trial.records(session)
                    assert (record["response"].get("content") or "").strip() == answers[-1][0]
                assert answers[0] == answers[1]
