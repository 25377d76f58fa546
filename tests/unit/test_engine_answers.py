"""Answers of engines: read strictly, put together from streams, looked at as bytes; and engines' facts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest

from miles_router.engines.answers import GenerateAnswer, Progress, UnreadableAnswer, finish_reasons, progress_of
from miles_router.engines.events import Event, EventReader
from miles_router.engines.facts import Facts
from miles_router.engines.growing import GrowingAnswer
from miles_router.engines.json_bytes import Field, Incomplete, sampled_tokens
from miles_router.engines.known import USUAL, read_facts


def answer(**changed: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        **changed,
    }
    return {"text": "ab", "output_ids": [7, 9], "meta_info": meta}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"completion_tokens": 3}, "token_counts_disagree"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "token_counts_disagree"),
        ({"weight_versions": [{"version": 1}]}, "incomplete"),
        ({"weight_versions": [{"version": 1, "start": 0.0, "end": 2.0}]}, "incomplete"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableAnswer) as refused:
        GenerateAnswer.read(answer(**changed))
    assert refused.value.reason == reason


def event(ids: list[int], count: int, **meta: Any) -> dict[str, Any]:
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": {"completion_tokens": count, **meta}}


def entries(*ids: int) -> list[list[Any]]:
    return [[-1.0, token, None] for token in ids]


QUEUE_ABORT = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (event([3, 3], 2, finish_reason=QUEUE_ABORT), "tokens_taken_back"),
        (event([2, 2], 3, finish_reason=QUEUE_ABORT), "token_counts_disagree"),
        (event([3], 3, output_token_logprobs=entries(3), output_top_logprobs=7), "incomplete"),
        (event([1, 2, 3], 3, output_token_logprobs=[7, 7, 7]), "invalid_tokens"),
        (
            event([3], 3, output_token_logprobs=entries(3), weight_versions=[{"version": "1", "start": 0, "end": 2}]),
            "versions_end_elsewhere",
        ),
    ],
)
def test_contradictory_event_is_refused_and_changes_nothing(second: dict[str, Any], reason: str) -> None:
    growing = GrowingAnswer()
    growing.add(event([1, 2], 2, output_token_logprobs=entries(1, 2)))
    before = copy.deepcopy((growing.answer, growing.spans, growing.incremental))
    with pytest.raises(UnreadableAnswer) as refused:
        growing.add(second)
    assert refused.value.reason == reason
    assert (growing.answer, growing.spans, growing.incremental) == before


def test_an_abort_in_the_queue_repeats_what_has_come() -> None:
    growing = GrowingAnswer()
    growing.add({"text": "a", "output_ids": [1], "meta_info": {"completion_tokens": 1, "prompt_tokens": 4}})
    growing.add({"text": "b", "output_ids": [2], "meta_info": {"completion_tokens": 2}})
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    said = {"text": "b", "output_ids": [2], "meta_info": {"completion_tokens": 2, "finish_reason": abort}}
    assert growing.add(said) == {
        "text": "ab",
        "output_ids": [1, 2],
        "meta_info": {"completion_tokens": 2, "prompt_tokens": 4, "finish_reason": abort},
    }


@pytest.mark.parametrize(
    ("event", "progress"),
    [
        (b'{"text":"\\"finish_reason\\":1","meta_info":{"finish_reason" : null,"weight_version": "1"}}', (None, "1")),
        (b'{"meta_info":{"weight_version":2,"finish_reason":{"type":"abort"}}}', ({"type": "abort"}, 2)),
        (b'{"meta_info":{"finish_reason":null}}', (None, None)),
        (b'{"meta_info":{"finish_reason":{"type"', None),
    ],
)
def test_what_an_event_says_of_its_answer(event: bytes, progress: tuple[object, object] | None) -> None:
    assert progress_of(event) == (None if progress is None else Progress(*progress))


@pytest.mark.parametrize(
    ("data", "answers", "beginning", "found"),
    [
        (b'[{"finish_reason":null},{"finish_reason":{"type":"abort"}}]', 2, False, [None, {"type": "abort"}]),
        (b'[{"finish_reason":null},{"finish_reason":null}]', 1, False, None),
        (b'[{"finish_reason":null},{"finish_reason":nu', 1, True, [None]),
        (b'{"finish_reason" : null, "text": "', 1, True, [None]),
        (b'[{"finish_reason":null},{"finish_reason":{"type":"ab', 2, True, None),
    ],
)
def test_finish_reasons_are_seen_without_parsing_or_not_at_all(
    data: bytes, answers: int, beginning: bool, found: list[object] | None
) -> None:
    assert finish_reasons(data, answers, beginning=beginning) == found


ODD_BYTES = {
    "names without end": lambda size: b'"rid":' * (size // 6),
    "spaces in front of a value": lambda size: b'"rid":' + b" " * size + b"1",
    "backslashes": lambda size: b'"rid":"' + b"\\" * size,
    "names in a text": lambda size: b'\\"rid\\":' * (size // 8),
    "deep lists": lambda size: b'"rid":' + b"[" * size,
    "lists that do not end": lambda size: b'"rid":[' * (size // 7),
    "digits": lambda size: b'"rid":' + b"1" * size,
}


def _growth(look: Callable[[bytes], object], make: Callable[[int], bytes], size: int) -> float:
    """How many times as long a look at 8 times as many bytes takes."""

    def seconds(size: int) -> float:
        data, best = make(size), 1.0
        for _ in range(3):
            began = time.process_time()
            look(data)
            best = min(best, time.process_time() - began)
        return max(best, 1e-4)  # what takes no time grows in no way

    return seconds(size) / seconds(size // 8)


@pytest.mark.parametrize("odd", ODD_BYTES)
def test_a_look_at_bytes_takes_time_that_grows_as_they_do(odd: str) -> None:
    field = Field("rid")

    def look(data: bytes) -> None:
        for each in (field.values, field.last, field.beginning):
            with suppress(Incomplete):
                list(each(data)) if each == field.values else each(data)

    assert _growth(look, ODD_BYTES[odd], 1 << 18) < 24, "8 times as long is in order, 64 times is not"


STREAMS = {
    "empty lines": b"\n",
    "carriage returns": b"\r",
    "ends that are none": b"\n\r",
    "events": b"data: {}\n\n",
}


@pytest.mark.parametrize("lets_go", [False, True])
@pytest.mark.parametrize("piece", [1, 1 << 16], ids=["byte by byte", "in pieces"])
@pytest.mark.parametrize("odd", STREAMS)
def test_cutting_a_stream_into_events_takes_time_that_grows_as_it_does(odd: str, piece: int, lets_go: bool) -> None:
    def cut(data: bytes) -> None:
        reader = EventReader()
        for at in range(0, len(data), piece):
            for raw in reader.feed(data[at : at + piece]):
                Event.read(raw)
            if lets_go and not reader.in_released_event:
                reader.release()

    assert _growth(cut, lambda size: STREAMS[odd] * (size // len(STREAMS[odd])), 1 << 15) < 24


TELLING = {
    "SGLang": b'..."meta_info":{"id":"a","completion_tokens":123,"cached_tokens":0,"e2e_latency":0.1}}',
    "SGLang's events": b'data: {"text":"","meta_info":{"completion_tokens":123,"cached_tokens":0}}\n\ndata: [DONE]\n\n',
    "usage": b'"usage":{"prompt_tokens":5,"completion_tokens":123,"completion_tokens_details":null}}',
    "usage that ends with it": b'"usage": {"prompt_tokens": 5, "completion_tokens": 123}}\n',
}
SILENT = {
    "nothing": b"",
    "null": b'{"completion_tokens":null,"a":1}',
    "a text that speaks of it": b'{"content":"it says \\"completion_tokens\\":123, or so"}',
    "below zero": b'{"completion_tokens":-5,"a":1}',
}


@pytest.mark.parametrize("end", [*TELLING.values(), *SILENT.values()], ids=[*TELLING, *SILENT])
def test_the_end_of_an_answer_tells_its_tokens_or_nothing(end: bytes) -> None:
    assert sampled_tokens(end) == (123 if end in TELLING.values() else 0)


MODEL: dict[str, Any] = {
    "model_path": "/models/a",
    "served_model_name": "a",
    "tokenizer_path": "/models/a",
    "model_type": "qwen3_moe",
    "weight_version": 7,
    "preferred_sampling_params": {"top_k": 20},
    "tool_call_parser": "qwen25",
    "reasoning_parser": None,
}
SERVER: dict[str, Any] = {
    "model_path": "/models/launched",
    "tool_call_parser": "auto",
    "version": "0.5.23",
    "dp_size": 2,
    "chat_template": None,
    "default_chat_template_kwargs": {"enable_thinking": False},
    "incremental_streaming_output": True,
    "startup_time": {"scheduler_e2e": 12.3456789},
    "internal_states": [{"load": 1}],
}
SCHEMA: dict[str, Any] = {
    "paths": {"/generate": {}, "/ready": {}},
    "components": {"schemas": {"ChatCompletionRequest": {"properties": {"messages": {}}}, "Odd": 7}},
}
DOCUMENTS = ("/model_info", "/server_info", "/openapi.json")


def read(model: object = None, server: object = None, schema: object = None) -> Facts:
    bodies = (None if each is None else orjson.dumps(each) for each in (model, server, schema))
    return read_facts(dict(zip(DOCUMENTS, bodies, strict=True)))


def test_everything_that_an_engine_says_is_read() -> None:
    facts = read(MODEL, SERVER, SCHEMA)
    assert (facts.engine, facts.version, facts.dp_size, facts.weight_version) == (USUAL, "0.5.23", 2, "7")
    assert (facts.model_path, facts.served_model_name, facts.tokenizer_path) == ("/models/a", "a", "/models/a")
    assert (facts.model_type, facts.tool_call_parser, facts.reasoning_parser) == ("qwen3_moe", "qwen25", "")
    assert facts.template == {"chat_template": None, "default_chat_template_kwargs": {"enable_thinking": False}}
    assert facts.incremental_streaming is True
    assert facts.preferred_sampling_params == {"top_k": 20}
    assert facts.endpoints == frozenset({"/generate", "/ready"})
    assert facts.takes_field("ChatCompletionRequest", "messages") is True
    assert facts.takes_field("ChatCompletionRequest", "other") is facts.takes_field("Other", "x") is False
    assert facts.process is not None


@pytest.mark.parametrize("odd", [7, [], "x", True])
def test_values_of_another_type_say_nothing(odd: object) -> None:
    names = ("dp_size", "incremental_streaming_output", "version", "model_type")
    facts = read(dict.fromkeys(MODEL, odd), dict.fromkeys(names, odd), {"paths": odd, "components": odd})
    assert facts.dp_size in (None, 7)
    assert facts.incremental_streaming in (None, True)
    assert facts.version in (None, "x")
    assert (facts.preferred_sampling_params, facts.endpoints, facts.schemas) == (None, None, None)


def test_one_process_is_known_again_by_how_long_it_took_to_start() -> None:
    facts = read(MODEL, SERVER)
    assert read(MODEL, {**SERVER, "internal_states": [], "weight_version": "8"}).process == facts.process
    assert read(MODEL, {**SERVER, "startup_time": {"scheduler_e2e": 12.3456788}}).process != facts.process
    assert read(MODEL, {**SERVER, "dp_size": 1}).process != facts.process
    assert read(MODEL, {**SERVER, "startup_time": None}).process is None
