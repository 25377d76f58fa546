"""`POST /generate`, not streaming: which requests answer what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.client import FLUSH, WorkerClient, covers

SHORT = {"max_new_tokens": 6, "ignore_eos": True}
META = {
    *("id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version"),
    *("weight_versions", "e2e_latency", "num_retractions"),
}


def well_formed(answer: Any) -> bool:
    meta = answer["meta_info"]
    return (
        isinstance(answer["text"], str)
        and set(meta) >= META
        and len(answer["output_ids"]) == meta["completion_tokens"]
        and covers(meta["weight_versions"], meta["completion_tokens"])
    )


async def test_one_text_answers_one_object(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One two three", sampling_params=SHORT)
    assert well_formed(answer)
    assert answer["meta_info"]["prompt_tokens"] == len(await worker.encode("One two three"))
    assert answer["meta_info"]["completion_tokens"] == 6
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert answer["meta_info"]["weight_version"] == "default"


async def test_the_answer_is_json_of_known_length(worker: WorkerClient) -> None:
    answer = await worker.ask("POST", "/generate", {"text": "One", "sampling_params": SHORT})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(answer.body))


async def test_put_is_taken_as_post(worker: WorkerClient) -> None:
    answer = await worker.ask("PUT", "/generate", {"text": "One", "sampling_params": SHORT})
    assert answer.status == 200
    assert well_formed(answer.json)


async def test_token_ids_are_the_prompt_as_they_are(worker: WorkerClient) -> None:
    answer = await worker.generate(input_ids=[5, 6, 7, 5], sampling_params=SHORT)
    assert well_formed(answer)
    assert answer["meta_info"]["prompt_tokens"] == 4


async def test_a_list_of_texts_answers_a_list_in_its_order(worker: WorkerClient) -> None:
    texts = ["One two three", "One", "One two"]
    answers = await worker.generate(text=texts, sampling_params=SHORT)
    assert all(map(well_formed, answers))
    lengths = [len(await worker.encode(text)) for text in texts]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == lengths


async def test_a_list_of_id_lists_answers_a_list_in_its_order(worker: WorkerClient) -> None:
    answers = await worker.generate(input_ids=[[5, 6, 7], [5], [5, 6]], sampling_params=SHORT)
    assert all(map(well_formed, answers))
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 1, 2]


@pytest.mark.parametrize("prompts", [{"text": ["One"]}, {"input_ids": [[5]]}], ids=["texts", "ids"])
async def test_a_list_of_one_prompt_answers_a_list_of_one(worker: WorkerClient, prompts: dict[str, Any]) -> None:
    answers = await worker.generate(**prompts, sampling_params=SHORT)
    assert isinstance(answers, list)
    assert len(answers) == 1


async def test_a_list_of_no_prompts_answers_an_empty_list(worker: WorkerClient) -> None:
    assert await worker.generate(text=[], sampling_params=SHORT) == []


async def test_n_answers_a_list_of_independent_samples(worker: WorkerClient) -> None:
    answers = await worker.generate(text="One", sampling_params={**SHORT, "n": 3})
    assert all(map(well_formed, answers))
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


async def test_n_of_a_list_answers_prompt_by_prompt(worker: WorkerClient) -> None:
    answers = await worker.generate(input_ids=[[5], [5, 6]], sampling_params={**SHORT, "n": 2})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 1, 2, 2]


async def test_each_prompt_may_have_its_own_sampling_parameters(worker: WorkerClient) -> None:
    each = [{**SHORT, "max_new_tokens": count} for count in (2, 5)]
    answers = await worker.generate(text=["One", "Two"], sampling_params=each)
    assert [len(answer["output_ids"]) for answer in answers] == [2, 5]


async def test_a_rid_is_the_answer_s_id(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params=SHORT, rid="named")
    assert answer["meta_info"]["id"] == "named"


async def test_a_rid_of_a_list_is_numbered(worker: WorkerClient) -> None:
    answers = await worker.generate(text=["One", "Two"], sampling_params=SHORT, rid="named")
    assert [answer["meta_info"]["id"] for answer in answers] == ["named_0", "named_1"]


async def test_each_prompt_may_have_its_own_rid(worker: WorkerClient) -> None:
    answers = await worker.generate(text=["One", "Two"], sampling_params=SHORT, rid=["a", "b"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


async def test_rids_are_not_kept_where_n_is_more_than_one(worker: WorkerClient) -> None:
    answers = await worker.generate(text="One", sampling_params={**SHORT, "n": 2}, rid="named")
    ids = {answer["meta_info"]["id"] for answer in answers}
    assert len(ids) == 2
    assert not any(name.startswith("named") for name in ids)


async def test_logprobs_are_aligned_with_the_sampled_tokens(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params=SHORT, return_logprob=True)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0.0 for logprob, _, _ in meta["output_token_logprobs"])
    assert all(text is None for _, _, text in meta["output_token_logprobs"])
    assert meta["output_token_logprobs_length"] == 6
    assert meta["input_token_logprobs"] == []


async def test_there_are_no_logprobs_unasked(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params=SHORT)
    assert not [name for name in answer["meta_info"] if "logprob" in name]


async def test_logprobs_have_their_text_on_request(worker: WorkerClient) -> None:
    answer = await worker.generate(
        text="One", sampling_params={"regex": "[a-z]{12}"}, return_logprob=True, return_text_in_logprobs=True
    )
    texts = [text for _, _, text in answer["meta_info"]["output_token_logprobs"]]
    assert "".join(texts[:-1]) == answer["text"]


async def test_prompt_logprobs_cover_the_prompt_and_have_none_for_its_first_token(worker: WorkerClient) -> None:
    answer = await worker.generate(
        input_ids=[5, 6, 7, 8], sampling_params=SHORT, return_logprob=True, logprob_start_len=0
    )
    prompt = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in prompt] == [5, 6, 7, 8]
    assert [logprob is None for logprob, _, _ in prompt] == [True, False, False, False]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 1000}, {"temperature": 0}])
async def test_a_prompt_s_logprobs_are_those_that_its_tokens_were_sampled_with(
    worker: WorkerClient, params: dict[str, Any]
) -> None:
    """As far as low precision goes: audits are built on it."""
    sampled = await worker.generate(
        input_ids=[5, 6, 7, 8],
        sampling_params={"max_new_tokens": 24, "ignore_eos": True, **params},
        return_logprob=True,
    )
    ids = [5, 6, 7, 8, *sampled["output_ids"]]
    asked = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 3}
    again = await worker.generate(input_ids=ids, **asked)
    recorded = [logprob for logprob, _, _ in sampled["meta_info"]["output_token_logprobs"]]
    (nothing, first, _), *told = again["meta_info"]["input_token_logprobs"]
    assert (nothing, first, again["output_ids"]) == (None, 8, [])
    assert [logprob for logprob, _, _ in told] == pytest.approx(recorded, abs=0.05)


async def test_one_token_can_be_asked_for_at_a_temperature(worker: WorkerClient) -> None:
    params = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0.6}
    sampled = await worker.generate(input_ids=[5, 6, 7], sampling_params=params, return_logprob=True)
    ((logprob, token, _),) = sampled["meta_info"]["output_token_logprobs"]
    asked = await worker.generate(
        input_ids=[5, 6, 7], sampling_params=params, return_logprob=True, token_ids_logprob=[token]
    )
    (((told, same, _),),) = asked["meta_info"]["output_token_ids_logprobs"]
    assert (same, told) == (token, pytest.approx(logprob, abs=0.01))


async def test_top_logprobs_list_alternatives_for_each_token(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params=SHORT, return_logprob=True, top_logprobs_num=2)
    alternatives = answer["meta_info"]["output_top_logprobs"]
    assert [len(entry) for entry in alternatives] == [2] * 6
    assert all(first[0] >= second[0] for first, second in alternatives)


async def test_a_prompt_seen_before_is_cached_but_for_its_last_token(worker: WorkerClient) -> None:
    prompt = list(range(100, 140))
    assert (await worker.ask("POST", FLUSH)).status == 200
    first = await worker.generate(input_ids=prompt, sampling_params=SHORT)
    second = await worker.generate(input_ids=prompt, sampling_params=SHORT)
    longer = await worker.generate(input_ids=[*prompt, 7, 8], sampling_params=SHORT)
    cached = [answer["meta_info"]["cached_tokens"] for answer in (first, second, longer)]
    assert cached == [0, 39, 40]


async def test_a_prompt_is_cached_for_requests_with_the_same_extra_key_alone(worker: WorkerClient) -> None:
    prompt = list(range(100, 140))
    assert (await worker.ask("POST", FLUSH)).status == 200
    keys: list[dict[str, Any]] = [{}, {"extra_key": "a"}, {"extra_key": "a"}, {"extra_key": "b"}, {"extra_key": ""}]
    answers = [await worker.generate(input_ids=prompt, sampling_params=SHORT, **key) for key in keys]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 0, 39, 0, 39]


async def test_temperature_zero_repeats_itself(worker: WorkerClient) -> None:
    greedy = {**SHORT, "temperature": 0}
    answers = [await worker.generate(text="One", sampling_params=greedy) for _ in range(2)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


async def test_unknown_fields_are_ignored(worker: WorkerClient) -> None:
    assert well_formed(await worker.generate(text="One", sampling_params=SHORT, no_such_field=[1]))


async def test_no_new_tokens_are_a_complete_answer(worker: WorkerClient) -> None:
    answer = await worker.generate(text="One", sampling_params={"max_new_tokens": 0})
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
