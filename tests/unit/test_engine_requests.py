"""Requests to engines: prompts, control requests, adapters, ranks, cache keys, recomputed logprobs."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.actions import (
    MEMORY,
    Abort,
    AbortAll,
    Action,
    ChangeAdapter,
    EndGroup,
    NameVersion,
    Other,
    Pause,
    Sleep,
    Update,
    Wake,
)
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.control import Arguments, BadArguments
from miles_router.engines.engine import NO_WISH, RankWish
from miles_router.engines.generate import MAX_GENERATIONS, GenerateRequest, UnknownShape
from miles_router.engines.known import CONTROL, ReadOrder, read_facts
from miles_router.engines.models import model_of
from miles_router.engines.recomputing import (
    RecomputationCut,
    adapter_in,
    possible_defaults,
    read,
    read_next,
    request_next,
    reshaped_by,
    temperature,
)
from miles_router.engines.sglang.adapters import with_adapter
from miles_router.engines.sglang.caches import with_cache_key
from miles_router.engines.sglang.ranks import MAX_RANKS, RankScanner, wish


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text": ["a", 1]}, "text"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": True}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"n": MAX_GENERATIONS + 1}}, "too_many"),
        ({"text": ["a", "b"], "rid": ["r", 1]}, "rid"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_field(body: object, reason: str) -> None:
    with pytest.raises(UnknownShape) as refused:
        GenerateRequest.read(body)
    assert refused.value.reason == reason


def test_a_generation_alone_is_asked_for_with_what_is_its_own() -> None:
    body = {
        "text": ["a", "b"],
        "rid": "r",
        "stream": True,
        "sampling_params": [{"n": 1, "stop": "x"}, {"max_new_tokens": 3}],
        "lora_path": ["l", None],
        "token_ids_logprob": [4, 5],
        "return_logprob": True,
    }
    read = GenerateRequest.read(body)
    common = {"stream": True, "return_logprob": True, "token_ids_logprob": [4, 5]}
    assert read.single(0) == {"text": "a", "rid": "r_0", "sampling_params": {"stop": "x"}, "lora_path": "l", **common}
    second = {"text": "b", "rid": "r_1", "sampling_params": {"max_new_tokens": 3}, "lora_path": None}
    assert read.single(1) == {**second, **common}


@pytest.mark.parametrize(
    ("path", "fields", "action"),
    [
        ("/pause_generation", {}, Pause("abort")),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, Sleep({"cuda_graph"})),
        ("/resume_memory_occupation", {}, Wake(frozenset())),
        ("/abort_request", {"rid": "a", "abort_all": True}, AbortAll()),
        ("/abort_request", {"group": 3}, EndGroup(3)),
        ("/update_weight_version", {"new_version": "7"}, NameVersion("7", aborts=True)),
        ("/update_weights_from_disk", {"model_path": "m", "weight_version": 7}, Update("7", flushes=True)),
        ("/update_weights_from_disk", {"model_path": "m", "flush_cache": False}, Update(None)),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, ChangeAdapter("a", "/a", loads=True)),
        ("/unload_lora_adapter", {"lora_name": 1}, ChangeAdapter(None, loads=False)),
        ("/abort_requests", {"request_ids": ["chatcmpl-a"]}, Abort("a")),
        ("/collective_rpc", {"method": "reload_weights"}, Update(None)),
        ("/collective_rpc", {"method": "ping"}, Other("/collective_rpc")),
        ("/freeze_gc", {}, Other("/freeze_gc")),
    ],
)
def test_a_control_request_is_read_as_what_it_means(path: str, fields: dict[str, Any], action: Action) -> None:
    assert CONTROL[path].read(Arguments(fields, {})) == action


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/pause_generation", {"mode": "now"}),
        ("/abort_request", {}),
        ("/abort_request", {"group": True}),
        ("/abort_request", {"rid": ""}),
        ("/abort_request", {"rid": "a", "abort_all": "false"}),
        ("/update_weight_version", {}),
    ],
)
def test_arguments_that_no_engine_understands_are_refused(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadArguments):
        CONTROL[path].read(Arguments(fields, {}))


@pytest.mark.parametrize(
    ("target", "action"),
    [
        ("/pause?clear_cache=T&mode=keep", Pause("retract")),
        ("/pause?clear_cache=off&mode=keep", Pause("in_place")),
        ("/pause?mode=keep&clear_cache=false&clear_cache=true", None),
        ("/pause?mode=keep&clear_cache=", None),
        ("/pause?mode=abort&mode=keep", None),
        ("/pause?wait_for_inflight_requests=true", None),
        ("/wake_up?tags=weights&tags=kv_cache", Wake(MEMORY)),
        ("/wake_up?tags=weights,kv_cache", None),
        ("/wake_up?tags=", None),
    ],
)
def test_a_query_is_read_as_vllm_reads_it_or_refused(target: str, action: Action | None) -> None:
    request = CONTROL[target.partition("?")[0]]
    with pytest.raises(BadArguments) if action is None else contextlib.nullcontext():
        assert ReadOrder.read(request, target.encode(), {}).action == action


@pytest.mark.parametrize(
    ("own", "written"),
    [
        (None, "x"),
        ([], "x"),
        ("y", "y"),
        ([None, "y"], ["x", "y"]),
        ([None, ""], ["x", "x"]),
    ],
)
def test_prompts_that_name_no_adapter_have_the_request_s(own: object, written: object) -> None:
    body = orjson.dumps({"text": "a", "lora_path": own, "model": "m:x"})
    assert orjson.loads(with_adapter("/generate", body, "x", orjson.loads))["lora_path"] == written


values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.lists(st.tuples(st.sampled_from(["model", "a", "b", "c"]), values)), st.sampled_from(["", "\n  "]))
def test_it_is_what_a_parser_finds(fields: list[tuple[str, Any]], space: str) -> None:
    body = f"{space}{{{space}".encode() + b", ".join(
        orjson.dumps(name) + b": " + orjson.dumps(value) for name, value in dict(fields).items()
    )
    body += b"}"
    assert model_of(body, orjson.loads) == orjson.loads(body).get("model")


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "headers", "body", "said"),
    [
        ("/generate", [], b'{"text": "x"}', NO_WISH),
        ("/generate", [], b'{"text": "\\"routed_dp_rank\\": 1"}', NO_WISH),
        ("/generate", [], b'{"routed_dp_rank": 1}', RankWish(1, True)),
        ("/generate", [], b'{"routed_dp_rank": "1"}', RankWish(None, True)),
        ("/generate", [], b'{"data_parallel_rank": 1, "routed_dp_rank": 3}', RankWish(3, True)),
        ("/generate", [(b"x-data-parallel-rank", b"1")], b"{}", RankWish(1, False)),
        ("/generate", [(b"x-override-routed-dp-rank", b"1")], b"{}", RankWish(None, True)),
        (CHAT, [(b"x-data-parallel-rank", b"1")], b'{"routed_dp_rank": 3}', RankWish(1, True)),
        (CHAT, [(b"x-data-parallel-rank", b"9" * 5000)], b"{}", RankWish(None, True)),
        (CHAT, [], b'{"routed_dp_rank": 3}', RankWish(3, True)),
    ],
)
def test_what_a_client_says_of_ranks(path: str, headers: Any, body: bytes, said: RankWish) -> None:
    assert wish(path, headers, body, orjson.loads) == said


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


KEY = b"weights-12345678-7"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"text": "a"}', b'{"text": "a","extra_key":"%b"}' % KEY),
        (b" {} \n", b' {"extra_key":"%b"}' % KEY),
        (b'{"text":"say \\"extra_key\\""}', b'{"text":"say \\"extra_key\\"","extra_key":"%b"}' % KEY),
        (b'{"extra_key":null}', b'{"extra_key":"%b"}' % KEY),
        (b'{"extra_key":"mine","n":1}', b'{"extra_key":"%b/mine","n":1}' % KEY),
        (b'{"extra_key":["a",""]}', b'{"extra_key":["%b/a","%b"]}' % (KEY, KEY)),
    ],
)
def test_a_request_gets_the_key_in_front_of_its_own(body: bytes, expected: bytes) -> None:
    assert with_cache_key(body, KEY.decode()) == expected


IDS = [5, 6, 7]


def answer(**changed: Any) -> bytes:
    meta = {
        "finish_reason": {"type": "length", "length": 0},
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]],
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 0}],
        **changed,
    }
    return orjson.dumps({"meta_info": {name: value for name, value in meta.items() if value != "absent"}})


@pytest.mark.parametrize(
    "changed",
    [
        {"input_token_logprobs": "absent"},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None]]},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 8, None]]},
        {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [None, 7, None]]},
        {"input_token_logprobs": 7},
    ],
)
def test_what_is_no_answer_for_these_ids_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UnreadableAnswer):
        read(answer(**changed), IDS)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"meta_info": null}', b"nonsense"])
def test_what_is_no_answer_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(UnreadableAnswer):
        read(body, IDS)


def test_one_that_was_aborted_or_saw_the_weights_change_may_be_asked_again() -> None:
    for changed in (
        {"finish_reason": {"type": "abort"}, "input_token_logprobs": "absent"},
        {"weight_version": "4"},
    ):
        with pytest.raises(RecomputationCut):
            read(answer(**changed), IDS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 1, "stop": ["x"]}, None),
        ({"repetition_penalty": 1.05}, "repetition_penalty"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "auto", "tools": [{"function": {"name": "a"}}, 7, {}]}, None),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"function": {"name": "a", "strict": True}}]}, "tools"),
    ],
)
def test_settings_that_reshape_logprobs(fields: dict[str, Any], reason: str | None) -> None:
    assert reshaped_by(fields) == reason


@pytest.mark.parametrize(
    ("fields", "defaults", "value"),
    [
        ({}, [], 1.0),
        ({"temperature": 0.6}, [], 0.6),
        ({"temperature": 0}, [], 1.0),  # greedy ones are not divided
        ({"temperature": 1}, [{"temperature": 0.6}], 1.0),
        ({}, [{}, {"temperature": 0.6}], 0.6),
        ({}, [{"temperature": 1.0}, {"temperature": 0.6}], None),  # nobody knows which counts
        ({"temperature": [0.6]}, [], None),
    ],
)
def test_the_temperature_of_a_request(
    fields: dict[str, Any], defaults: list[dict[str, Any]], value: float | None
) -> None:
    assert temperature(fields, *defaults) == value


def test_one_token_is_asked_for_at_its_temperature() -> None:
    asked = orjson.loads(request_next(np.array([1, 2], np.int32), 3, 0.6, ""))
    assert asked == {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.6},
        "return_logprob": True,
        "token_ids_logprob": [3],
    }
    assert read_next(answer(output_token_ids_logprobs=[[[-0.5, 3, None]]]), 3).logprobs.tolist() == [-0.5]
    others: list[Any] = [[], [None], [[]], [[[-0.5, 4, None]]], [[[None, 3, None]]], "absent"]
    for wrong in others:
        with pytest.raises(UnreadableAnswer):
            read_next(answer(output_token_ids_logprobs=wrong), 3)


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({}, ""),
        ({"model": "poet"}, ""),  # which the engine takes for the base weights
        ({"lora_path": "poet"}, "poet"),
        ({"lora_path": ["poet"]}, None),
        ({"model": "base:poet"}, "poet"),
        ({"model": "with:colon:poet"}, "poet"),
    ],
)
def test_the_adapter_of_a_request(fields: dict[str, Any], adapter: str | None) -> None:
    assert adapter_in(fields, ["base", "with:colon"]) == adapter


@pytest.mark.parametrize(
    ("said", "chat", "value"),
    [
        ({"sampling_defaults": "model"}, True, 0.6),
        ({"sampling_defaults": "openai"}, True, 1.0),
        ({}, True, None),  # an engine that does not say
        ({}, False, 1.0),
        ({"sampling_defaults": "model", "preferred_sampling_params": {"temperature": 0.9}}, True, None),
        ({"sampling_defaults": "openai", "preferred_sampling_params": {"temperature": 0.9}}, True, 0.9),
    ],
)
def test_what_an_engine_assumes_is_what_it_says(said: dict[str, Any], chat: bool, value: float | None) -> None:
    facts = read_facts({"/server_info": orjson.dumps({"version": "0.5.23", **said})})
    assert temperature({}, *possible_defaults(facts, {"temperature": 0.6, "min_new_tokens": 9}, chat=chat)) == value
    assert reshaped_by({}, *possible_defaults(facts, {"temperature": 0.6, "min_new_tokens": 9}, chat=chat)) is None
