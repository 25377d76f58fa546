"""`POST /generate` with `stream`: framing, and what each event carries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.contract.client import WorkerClient

SHORT = {"max_new_tokens": 8, "ignore_eos": True}


async def test_events_are_data_lines_and_the_last_says_done(worker: WorkerClient) -> None:
    async with worker.stream("/generate", text="One", sampling_params=SHORT) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["transfer-encoding"] == "chunked"
        events = [event async for event in stream.raw()]
    assert all(event.startswith(b"data: {") for event in events[:-1])
    assert events[-1] == b"data: [DONE]"


async def test_text_and_ids_are_cumulative(worker: WorkerClient) -> None:
    events = await worker.events("/generate", text="One", sampling_params=SHORT)
    assert len(events) > 1
    for earlier, later in pairwise(events):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [len(e["output_ids"]) for e in events]
    assert len(events[-1]["output_ids"]) == 8


async def test_logprobs_are_cumulative_and_aligned(worker: WorkerClient) -> None:
    for event in await worker.events("/generate", text="One", sampling_params=SHORT, return_logprob=True):
        assert [token for _, token, _ in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]


async def test_every_event_has_the_request_s_id(worker: WorkerClient) -> None:
    events = await worker.events("/generate", text="One", sampling_params=SHORT, rid="streamed")
    assert {event["meta_info"]["id"] for event in events} == {"streamed"}


async def test_only_the_last_event_has_a_finish_reason_and_version_spans(worker: WorkerClient) -> None:
    *others, last = await worker.events("/generate", text="One", sampling_params=SHORT)
    assert all(event["meta_info"]["finish_reason"] is None for event in others)
    assert not any("weight_versions" in event["meta_info"] for event in others)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert last["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]


async def test_a_stream_says_what_a_plain_answer_says(worker: WorkerClient) -> None:
    request: dict[str, Any] = {"text": "One", "sampling_params": {**SHORT, "temperature": 0}}
    plain = await worker.generate(**request)
    streamed = (await worker.events("/generate", **request))[-1]
    assert (streamed["text"], streamed["output_ids"]) == (plain["text"], plain["output_ids"])
    assert set(streamed) == set(plain)


async def test_an_unfinished_character_is_held_back(worker: WorkerClient) -> None:
    sampling = {"regex": "(😀|🤖){6}", "max_new_tokens": 60}
    events = await worker.events("/generate", text="One", sampling_params=sampling)
    texts = [event["text"] for event in events]
    assert set("".join(texts)) <= {"😀", "🤖"}
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(texts[-1]) == 6


async def test_a_stop_string_is_not_in_the_last_text(worker: WorkerClient) -> None:
    sampling = {"regex": "a{6}b[xy]{30}", "stop": "b"}
    *_, last = await worker.events("/generate", text="One", sampling_params=sampling)
    assert last["text"] == "aaaaaa"
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}


async def test_one_prompt_has_no_index(worker: WorkerClient) -> None:
    assert not any("index" in event for event in await worker.events("/generate", text="One", sampling_params=SHORT))


async def test_events_of_a_list_say_which_prompt_they_belong_to(worker: WorkerClient) -> None:
    events = await worker.events("/generate", input_ids=[[5], [5, 6], [5, 6, 7]], sampling_params=SHORT)
    assert {(event["index"], event["meta_info"]["prompt_tokens"]) for event in events} == {(0, 1), (1, 2), (2, 3)}
    finished = [event["index"] for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


async def test_events_of_n_samples_say_which_they_belong_to(worker: WorkerClient) -> None:
    events = await worker.events("/generate", text="One", sampling_params={**SHORT, "n": 2})
    assert {event["index"] for event in events} == {0, 1}
    assert len({(event["index"], event["meta_info"]["id"]) for event in events}) == 2


async def test_no_new_tokens_stream_one_event(worker: WorkerClient) -> None:
    (event,) = await worker.events("/generate", text="One", sampling_params={"max_new_tokens": 0})
    assert event["output_ids"] == []
    assert event["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
