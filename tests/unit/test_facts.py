"""Facts: what is read of an engine's answers, and what holds from one question to the next."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from miles_router.engines.facts import Facts
from miles_router.engines.known import USUAL, read_facts
from miles_router.forwarding.processes import Processes

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


def test_older_names_and_forms_are_read() -> None:
    facts = read({"preferred_sampling_params": '{"top_p": 0.5}'}, {"stream_output": True})
    assert (facts.incremental_streaming, facts.preferred_sampling_params) == (True, {"top_p": 0.5})
    assert read({"preferred_sampling_params": None}).preferred_sampling_params == {}
    assert read(None, {"incremental_streaming_output": False, "stream_output": True}).incremental_streaming is False


@pytest.mark.parametrize("body", [None, b"", b"{", b"[]", b'"a"', b"\xff", b"{}"])
def test_what_cannot_be_read_says_nothing(body: bytes | None) -> None:
    facts = read_facts(dict.fromkeys(DOCUMENTS, body))
    named = {name: value for name, value in vars(facts).items() if name != "_learned"}
    assert set(named.values()) == {None}, named
    assert facts.takes_field("ChatCompletionRequest", "messages") is None


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


def test_a_process_that_nests_what_it_says_too_deep_is_not_known_again() -> None:
    deep = b'{"startup_time": 1.5, "x": ' + b"[" * 300 + b"]" * 300 + b"}"
    assert read_facts({"/server_info": deep}).process is None


class Ends(set[int]):
    """What some layer learns."""


def test_what_was_learned_stays_with_its_process_and_model() -> None:
    facts = read(MODEL, SERVER)
    facts.learned(Ends).add(2)
    assert facts.learned(Ends) == {2}
    assert read(MODEL, SERVER).after(facts).learned(Ends) == {2}
    assert read({**MODEL, "weight_version": "8"}, SERVER).after(facts).learned(Ends) == {2}
    restarted = {**SERVER, "startup_time": {"scheduler_e2e": 1.0}}
    unnamed = {**SERVER, "startup_time": None}
    for other in (read(MODEL, restarted), read({**MODEL, "model_path": "/b"}, SERVER), read(MODEL, unnamed)):
        assert other.after(facts).learned(Ends) == set()
    assert read(MODEL, unnamed).after(read(MODEL, unnamed)).learned(Ends) == set()
    assert facts.after(None) is facts


def test_another_model_contradicts_and_other_weights_or_silence_do_not() -> None:
    facts = read(MODEL, SERVER, SCHEMA)
    assert not facts.contradicts(read({**MODEL, "weight_version": "8"}))
    assert not facts.contradicts(Facts())
    assert facts.contradicts(read({**MODEL, "model_path": "/models/b"}))
    assert facts.contradicts(read({**MODEL, "reasoning_parser": "qwen3"}))


def test_a_process_has_one_number_for_as_long_as_any_connection_to_it_stays() -> None:
    processes = Processes()
    assert processes.number("a") is None
    processes.connected("a")
    first = processes.number("a")
    processes.connected("b")
    processes.connected("a")
    processes.disconnected("a")
    assert (processes.number("a"), processes.number("b") == first) == (first, False)
    processes.disconnected("a")
    assert processes.number("a") is None
    processes.connected("a")
    assert processes.number("a") not in (None, first)
