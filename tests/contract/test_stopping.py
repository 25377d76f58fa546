"""Where a generation ends, and what of its end the text shows while the ids tell all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.client import WorkerClient

LAST_IDS = {
    "simulated": 1023,
    "paced": 1023,
    "sglang": 151_935,
}  # of the models, whose vocabularies are larger than the tokenizers'
THEN_B = "a{6}b[xy]{30}"  # single characters, so that no tokenisation can hide the stop string from the worker


async def ended_by_eos(worker: WorkerClient, **sampling: Any) -> Any:
    """A generation whose text is `aaa`, and after which the grammar leaves nothing but the end."""
    return await worker.generate(text="One", sampling_params={"regex": "a{3}", **sampling})


async def test_length(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_the_stop_token_is_among_the_ids_and_not_in_the_text(worker: WorkerClient) -> None:
    answer = await ended_by_eos(worker)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}
    assert answer["text"] == "aaa"
    assert await worker.decode(answer["output_ids"][:-1]) == "aaa"


@pytest.mark.parametrize("alone", [{"no_stop_trim": True}, {"skip_special_tokens": False}], ids=str)
async def test_one_of_the_two_flags_does_not_show_the_stop_token(worker: WorkerClient, alone: dict[str, Any]) -> None:
    assert (await ended_by_eos(worker, **alone))["text"] == "aaa"


async def test_both_flags_show_the_stop_token(worker: WorkerClient) -> None:
    answer = await ended_by_eos(worker, no_stop_trim=True, skip_special_tokens=False)
    assert answer["text"] == await worker.decode(answer["output_ids"])
    assert answer["text"].startswith("aaa<")


async def test_ignore_eos_makes_the_end_an_ordinary_token(worker: WorkerClient) -> None:
    eos = (await ended_by_eos(worker))["output_ids"][-1]
    sampling = {"max_new_tokens": 7, "logit_bias": {str(eos): 100}}
    stopped = await worker.generate(text="One", sampling_params={**sampling, "ignore_eos": True})
    assert stopped["meta_info"]["finish_reason"] == {"type": "length", "length": 7}


async def test_without_a_budget_nothing_is_an_end(worker: WorkerClient) -> None:
    eos = (await ended_by_eos(worker))["output_ids"][-1]
    sampling = {"max_new_tokens": 0, "logit_bias": {str(eos): 10_000}}
    answer = await worker.generate(text="One", sampling_params=sampling)
    assert (answer["output_ids"], answer["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})


async def test_a_token_that_is_forced_says_whether_the_model_ends_with_it(worker: WorkerClient) -> None:
    *_, before, eos = (await ended_by_eos(worker))["output_ids"]
    for token, finish in ((eos, {"type": "stop", "matched": eos}), (before, {"type": "length", "length": 1})):
        sampling = {"max_new_tokens": 1, "logit_bias": {str(token): 10_000}}
        answer = await worker.generate(input_ids=[token], sampling_params=sampling)
        assert (answer["output_ids"], answer["meta_info"]["finish_reason"]) == ([token], finish)


async def test_ids_that_the_tokenizer_does_not_have_are_shown_as_id_0(
    worker: WorkerClient, request: pytest.FixtureRequest
) -> None:
    padding = LAST_IDS[request.node.callspec.params["worker"]]
    sampling = {"max_new_tokens": 3, "ignore_eos": True, "logit_bias": {str(padding): 100}}
    answer = await worker.generate(text="One", sampling_params=sampling)
    assert answer["output_ids"] == [padding] * 3
    assert answer["text"] == await worker.decode([0] * 3) != ""
    assert await worker.decode([padding] * 3) == "", "but `/v1/detokenize` leaves them out"


async def test_a_stop_string_is_trimmed_from_the_text_and_not_from_the_ids(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params={"regex": THEN_B, "stop": "b"})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    assert answer["text"] == "aaaaaa"
    assert (await worker.decode(answer["output_ids"])).startswith("aaaaaab")


async def test_no_stop_trim_keeps_the_stop_string(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params={"regex": THEN_B, "stop": "b", "no_stop_trim": True})
    assert answer["text"].startswith("aaaaaab")


async def test_of_several_stop_strings_the_one_met_is_named(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params={"regex": THEN_B, "stop": ["q", "b"]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    assert answer["text"] == "aaaaaa"


async def test_a_stop_token_id_ends_the_text_before_it(worker: WorkerClient) -> None:
    stops = [(await worker.encode(digit))[0] for digit in "89"]
    sampling = {"regex": "a{6}[89]{30}", "stop_token_ids": stops}
    answer = await worker.generate(text="One", sampling_params=sampling)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}
    assert answer["output_ids"][-1] in stops
    assert answer["text"] == "aaaaaa"
    kept = await worker.generate(text="One", sampling_params={**sampling, "no_stop_trim": True})
    assert kept["text"] in ("aaaaaa8", "aaaaaa9")


async def test_ignore_eos_ignores_stop_token_ids_and_not_stop_strings(worker: WorkerClient) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    plain = await worker.generate(text="One", sampling_params=greedy)
    stops = {"stop_token_ids": plain["output_ids"]}
    by_id = await worker.generate(text="One", sampling_params={**greedy, **stops})
    assert by_id["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    by_text = await worker.generate(text="One", sampling_params={"regex": THEN_B, "stop": "b", "ignore_eos": True})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}


async def test_the_whole_output_satisfies_a_json_schema(worker: WorkerClient) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["x", "y"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    answer = await worker.generate(text="One", sampling_params={"json_schema": json.dumps(schema)})
    made = json.loads(answer["text"])
    assert made["name"] in ("x", "y")
    assert made["count"] in range(10)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
