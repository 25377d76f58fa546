"""What a worker says about itself, and its tokenizer over HTTP."""

from __future__ import annotations

import pytest

from miles_router.engines import paths
from miles_router.engines.known import GENERATION, USUAL, read_facts
from miles_router.engines.sglang.caches import takes_cache_key
from tests.contract.client import WorkerClient


async def test_model_info_names_the_model_and_its_weights(worker: WorkerClient) -> None:
    info = await worker.get("/model_info")
    assert {"model_path", "tokenizer_path", "served_model_name", "model_type", "architectures"} <= set(info)
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert await worker.get("/get_model_info") == info


async def test_server_info_lists_the_server_s_arguments(worker: WorkerClient) -> None:
    info = await worker.get("/server_info")
    assert info["model_path"] == (await worker.get("/model_info"))["model_path"]
    assert {"max_total_num_tokens", "internal_states", "version", "tp_size", "disaggregation_mode"} <= set(info)
    assert set(await worker.get("/get_server_info")) == set(info)


async def test_the_schema_tells_which_fields_a_chat_request_may_have(worker: WorkerClient) -> None:
    schema = await worker.get("/openapi.json")
    assert {"/generate", "/v1/chat/completions"} <= set(schema["paths"])
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "input_ids", "return_output_ids_in_sglext", "return_cached_tokens_details"} <= set(fields)


async def test_what_it_says_is_read_as_facts(worker: WorkerClient) -> None:
    names = ("/model_info", "/server_info", "/openapi.json")
    documents = {path: (await worker.ask("GET", path)).body for path in names}
    facts = read_facts(documents)
    assert (facts.engine, facts.weight_version, facts.dp_size) == (USUAL, "default", 1)
    assert (facts.incremental_streaming, facts.preferred_sampling_params) == (False, {})
    assert facts.sampling_defaults == "model"
    assert None not in (facts.version, facts.model_path, facts.model_type, facts.template)
    assert None not in (facts.tool_call_parser, facts.reasoning_parser)
    assert facts.takes_field("ChatCompletionRequest", "return_output_ids_in_sglext")
    assert {path for path in GENERATION if takes_cache_key(facts, path)} >= {
        *(paths.GENERATE, paths.CHAT, paths.COMPLETIONS)
    }
    assert facts.endpoints is not None
    assert "/generate" in facts.endpoints
    again = {"/server_info": (await worker.ask("GET", "/server_info")).body}
    assert read_facts(again).process == read_facts(documents).process is not None


async def test_models_are_listed_as_openai_does(worker: WorkerClient) -> None:
    listed = await worker.get("/v1/models")
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert set(model) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert (model["object"], model["owned_by"]) == ("model", "sglang")
    assert model["id"] == (await worker.get("/model_info"))["served_model_name"]


async def test_an_unknown_model_is_not_found(worker: WorkerClient) -> None:
    missing = await worker.ask("GET", "/v1/models/no-such-model")
    assert missing.status == 404
    assert missing.json["error"]["code"] == "model_not_found"


async def test_loads_count_what_runs(worker: WorkerClient) -> None:
    assert await worker.load() == (0, 0)
    async with worker.in_flight("one"), worker.in_flight("two"):
        (load,) = (await worker.get("/v1/loads"))["loads"]
    assert load["num_running_reqs"] == 2
    assert load["dp_rank"] == 0
    assert load["num_used_tokens"] > 0
    assert load["max_running_requests"] > 2


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
async def test_probes_answer_without_a_body(worker: WorkerClient, path: str) -> None:
    probe = await worker.ask("GET", path)
    assert (probe.status, probe.body) == (200, b"")


async def test_unknown_paths_and_methods_are_refused(worker: WorkerClient) -> None:
    missing = await worker.ask("GET", "/no/such/path")
    assert (missing.status, missing.json) == (404, {"detail": "Not Found"})
    refused = await worker.ask("GET", "/generate")
    assert (refused.status, refused.json) == (405, {"detail": "Method Not Allowed"})
    assert "POST" in refused.headers["allow"]


async def test_tokens_come_and_go(worker: WorkerClient) -> None:
    encoded = await worker.post("/v1/tokenize", prompt="One two three")
    assert set(encoded) == {"tokens", "count", "max_model_len"}
    assert encoded["count"] == len(encoded["tokens"]) > 0
    assert await worker.post("/v1/detokenize", tokens=encoded["tokens"]) == {"text": "One two three"}


async def test_tokenize_has_a_second_name_that_the_schema_leaves_out(worker: WorkerClient) -> None:
    wanted = {"prompt": "don't  Stop123\n\n", "add_special_tokens": False}
    assert await worker.post("/tokenize", **wanted) == await worker.post("/v1/tokenize", **wanted)
    shown = (await worker.get("/openapi.json"))["paths"]
    assert "/v1/tokenize" in shown
    assert "/tokenize" not in shown


async def test_lists_are_tokenized_and_detokenized_as_lists(worker: WorkerClient) -> None:
    encoded = await worker.post("/v1/tokenize", prompt=["One", "two three"])
    assert encoded["count"] == [len(ids) for ids in encoded["tokens"]]
    decoded = await worker.post("/v1/detokenize", tokens=encoded["tokens"])
    assert decoded == {"text": ["One", "two three"]}


async def test_messages_are_tokenized_with_the_chat_template(worker: WorkerClient) -> None:
    encoded = await worker.post("/v1/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert "<|im_start|>user\nhi<|im_end|>" in await worker.decode(encoded["tokens"])
