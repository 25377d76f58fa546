"""Prefill/decode pairs on the wire: what both halves are asked, and the one answer that their two make."""

from __future__ import annotations

import base64
import random
from typing import Any

import orjson
import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.engine import CannotServe
from miles_router.engines.events import Event, write_event
from miles_router.engines.known import read_facts
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.engines.pairs.joining import LostByRetraction, join_answer, join_event
from miles_router.engines.pairs.prefill import PrefillAnswer
from miles_router.engines.pairs.request import PairedRequest
from miles_router.engines.rows import EXPERT_FIELDS, INDEXER_FIELDS
from miles_router.engines.sglang.pairs import paired, with_room

GENERATE = "/generate"


def asked(path: str = GENERATE, **body: Any) -> PairedRequest:
    return paired(path, orjson.dumps(body), orjson.loads)


def handed(version: str | None = "1", **meta: Any) -> PrefillAnswer:
    told = {"id": "p", "finish_reason": {"type": "length", "length": 0}, "completion_tokens": 1, **meta}
    body = {"text": "", "output_ids": [7], "meta_info": told | ({} if version is None else {"weight_version": version})}
    return read(orjson.dumps(body))


def taken(body: bytes) -> tuple[bytes, RowStrings]:
    """An answer without its rows, which came in pieces, and these."""
    rows = RowStrings([EXPERT_FIELDS, INDEXER_FIELDS])
    remains = b"".join(rows.feed(body[at : at + 7]) for at in range(0, len(body), 7))
    return remains + rows.end(), rows


def read(body: bytes, *, streamed: bool = False) -> PrefillAnswer:
    return PrefillAnswer.read(GENERATE, *taken(body), streamed=streamed)


def one(body: bytes, prefill: PrefillAnswer, request: PairedRequest, *, changed: bool = False) -> bytes:
    return b"".join(join_answer(*taken(body), prefill, request, changed=changed))


def answer(versions: list[tuple[str, int, int]] = [("1", 0, 3)], **meta: Any) -> bytes:  # noqa: B006
    spans = [{"version": version, "start": start, "end": end} for version, start, end in versions]
    told = {"num_retractions": 0, "weight_version": spans[-1]["version"], "weight_versions": spans, **meta}
    return orjson.dumps({"text": "", "output_ids": [7, 8, 9], "meta_info": told})


def joined(body: bytes, prefill: PrefillAnswer, request: PairedRequest | None = None, *, changed: bool = False) -> Any:
    return orjson.loads(one(body, prefill, request or asked(), changed=changed))["meta_info"]


def test_the_room_stands_behind_all_that_a_client_sent() -> None:
    assert with_room(b'{"a":1}', "h", 9, 5) == b'{"a":1,"bootstrap_host":"h","bootstrap_port":9,"bootstrap_room":5}'
    assert orjson.loads(with_room(b'{"bootstrap_room":1}', "h", 9, 5))["bootstrap_room"] == 5


def test_a_request_is_sent_as_it_came() -> None:
    for body in (
        b'{"text":"Hi"}',
        b'{"text":"Hi","sampling_params":{"n":1}}',
        b"no json",
        b'{"n":2',
        b'{"text": "n\\""}',
    ):
        assert paired(GENERATE, body, orjson.loads).body == body


def test_samples_of_one_prompt_are_prompts_of_a_list() -> None:
    request = asked(text="Hi", sampling_params={"n": 2, "top_p": 0.5}, rid="r", image_data=["a", "b"], stream=True)
    assert orjson.loads(request.body) == {
        "text": ["Hi", "Hi"],
        "sampling_params": [{"top_p": 0.5}] * 2,
        "image_data": [["a", "b"]] * 2,
        "stream": True,
    }


def test_samples_of_a_list_keep_their_prompts_fields() -> None:
    body = asked(
        input_ids=[[1], [2]],
        sampling_params=[{"n": 2, "top_p": 0.1}, {"n": 2, "top_p": 0.2}],
        return_logprob=True,
        extra_key=["a", "b"],
        token_ids_logprob=[5, 6],
    ).body
    assert orjson.loads(body) == {
        "input_ids": [[1], [1], [2], [2]],
        "sampling_params": [{"top_p": 0.1}] * 2 + [{"top_p": 0.2}] * 2,
        "return_logprob": True,
        "extra_key": ["a", "a", "b", "b"],
        "token_ids_logprob": [5, 6],
    }


def test_what_is_wanted_of_the_prefill_half_is_seen() -> None:
    assert not asked(text="Hi", return_logprob=True, logprob_start_len=-1).prompt_logprobs
    assert asked(text="Hi", return_logprob=True, logprob_start_len=0).prompt_logprobs
    assert asked(text=["Hi"], logprob_start_len=[3]).prompt_logprobs
    assert asked(text="Hi", token_ids_logprob=[1]).prompt_logprobs
    assert asked(text="Hi", return_routed_experts=False).rows == ()
    assert asked(text="Hi", return_routed_experts=True).rows == (EXPERT_FIELDS,)
    assert asked(text="Hi", return_routed_experts=True, return_indexer_topk=True).rows == (
        EXPERT_FIELDS,
        INDEXER_FIELDS,
    )
    assert asked("/v1/chat/completions", return_routed_experts=True, return_meta_info=True).rows == (EXPERT_FIELDS,)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {}),
        ("/v1/audio/transcriptions", {}),
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"return_routed_experts": True}),
        ("/v1/chat/completions", {"return_routed_experts": True, "return_meta_info": True, "stream": True}),
        ("/v1/messages", {"return_routed_experts": True}),
        (GENERATE, {"input_embeds": [[1.0]], "sampling_params": {"n": 2}}),
    ],
)
def test_what_a_pair_cannot_do_is_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(CannotServe):
        asked(path, **body)


@pytest.mark.parametrize(
    ("finishes", "outcome"),
    [
        ([{"type": "length", "length": 0}] * 2, "handed_over"),
        ([{"type": "abort", "status_code": None}] * 2, "aborted"),
        ([{"type": "abort", "status_code": None}, {"type": "length", "length": 0}], "partly_aborted"),
        ([{"type": "abort", "status_code": 500}, {"type": "length", "length": 0}], "failed"),
    ],
)
def test_what_became_of_a_prompt_is_seen(finishes: list[Any], outcome: str) -> None:
    answers = [{"meta_info": {"finish_reason": each, "completion_tokens": 1}} for each in finishes]
    assert read(orjson.dumps(answers)).outcome == outcome
    events = b"".join(write_event({**each, "index": index}) for index, each in enumerate(answers))
    assert read(events, streamed=True).outcome == outcome


def test_a_stream_that_tells_of_an_error_has_failed() -> None:
    event = write_event({"error": {"message": "temperature"}})
    assert read(event, streamed=True).outcome == "failed"


def test_more_than_the_first_token_is_no_prefill_halfs_answer() -> None:
    with pytest.raises(UnreadableAnswer, match="not a prefill half"):
        handed(completion_tokens=2)


def test_the_weights_that_a_prefill_half_names_are_one_or_uncertain() -> None:
    assert (handed().version, handed().several_versions) == ("1", False)
    assert handed(None).version is None
    two = orjson.dumps([{"meta_info": {"weight_version": each}} for each in "12"])
    told = read(two)
    assert (told.version, told.several_versions) == (None, True)


def test_an_answer_that_lacks_nothing_passes_byte_for_byte() -> None:
    spaced = answer().replace(b",", b" , ")
    assert one(spaced, handed(), asked(), changed=True) == spaced
    assert one(b"anything", handed(None), asked()) == b"anything"


@pytest.mark.parametrize(
    ("told", "is_so"),
    [
        ([("2", 0, 3)], [("1", 0, 1), ("2", 1, 3)]),
        ([("2", 0, 1)], [("1", 0, 1)]),
        ([("2", 0, 1), ("3", 1, 3)], [("1", 0, 1), ("3", 1, 3)]),
        ([("2", 0, 2), ("3", 2, 3)], [("1", 0, 1), ("2", 1, 2), ("3", 2, 3)]),
        ([("1", 0, 2), ("3", 2, 3)], [("1", 0, 2), ("3", 2, 3)]),
        ([("2", 0, 0)], [("2", 0, 0)]),
    ],
)
def test_the_first_token_is_stamped_by_the_half_that_sampled_it(
    told: list[tuple[str, int, int]], is_so: list[tuple[str, int, int]]
) -> None:
    meta = joined(answer(told), handed())
    assert [(each["version"], each["start"], each["end"]) for each in meta["weight_versions"]] == is_so
    assert meta["weight_version"] == is_so[-1][0]


def test_a_chats_account_is_stamped_in_both_places() -> None:
    spans = [{"version": "2", "start": 0, "end": 3}]
    body = {
        "choices": [{"index": 0, "meta_info": {"weight_versions": spans}}],
        "metadata": {"weight_version": "2", "weight_versions": spans},
    }
    whole = orjson.loads(one(orjson.dumps(body), handed(), asked()))
    for told in (whole["metadata"], whole["choices"][0]["meta_info"]):
        assert [each["version"] for each in told["weight_versions"]] == ["1", "2"]


def test_what_was_retracted_over_an_update_is_refused() -> None:
    for told, changed in ((answer([("2", 0, 3)], num_retractions=1), False), (answer(num_retractions=1), True)):
        with pytest.raises(LostByRetraction, match="the weight versions"):
            one(told, handed(), asked(), changed=changed)
    assert joined(answer(num_retractions=1), handed())["num_retractions"] == 1


def test_rows_of_what_was_retracted_are_refused() -> None:
    told = answer(num_retractions=1, routed_experts="AAAA")
    with pytest.raises(LostByRetraction, match="its rows"):
        one(told, handed(routed_experts="AAAA"), asked(return_routed_experts=True))


def test_rows_that_the_prefill_half_does_not_tell_are_missed() -> None:
    with pytest.raises(UnreadableAnswer, match="prefill half returned no routed_experts"):
        one(answer(routed_experts="AAAA"), handed(), asked(return_routed_experts=True))


def test_rows_that_are_no_answers_are_refused() -> None:
    told = orjson.dumps({**orjson.loads(answer()), "sglext": {"routed_experts": "AAAA"}})
    with pytest.raises(UnreadableAnswer, match="outside of every answer"):
        one(told, handed(routed_experts="AAAA"), asked(return_routed_experts=True))


def test_a_refusal_keeps_its_rows() -> None:
    body = orjson.dumps({"routed_experts": "AAAA", "indexer_topk": "BBBB", "more": {"routed_experts": ""}})
    remains, rows = taken(body)
    assert b"".join(rows.with_own_rows(remains)) == body


def event_of(told: dict[str, Any], prefill: PrefillAnswer) -> bytes | None:
    remains, rows = taken(write_event(told))
    pieces = join_event(Event.read(remains), rows, prefill, prefill.metas(), asked(return_routed_experts=True))
    return None if pieces is None else b"".join(pieces)


def test_an_answer_that_the_prefill_half_does_not_know_is_refused() -> None:
    with pytest.raises(UnreadableAnswer, match="no answer with index 3"):
        event_of({"index": 3, "meta_info": {"routed_experts": "AAAA"}}, handed(routed_experts="AAAA"))


def test_events_without_anything_of_the_prompt_are_not_touched() -> None:
    assert event_of({"meta_info": {"finish_reason": None}}, handed()) is None


def test_an_answer_of_one_token_has_the_rows_that_were_handed_over() -> None:
    told = {"meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}
    event = event_of(told, handed(routed_experts="AAAA"))
    assert event is not None
    assert Event.read(event).parse()["meta_info"]["routed_experts"] == "AAAA"


def joint(own: bytes, prompts: bytes) -> bytes:
    told, request = answer(routed_experts=base64.b64encode(own).decode()), asked(return_routed_experts=True)
    meta = joined(told, handed(routed_experts=base64.b64encode(prompts).decode()), request)
    return base64.b64decode(meta["routed_experts"], validate=True)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 12])
def test_rows_are_joined_at_any_place(width: int) -> None:
    dice = random.Random(width)
    for prompts in range(5):
        for sampled in range(-1, 4):
            theirs = dice.randbytes(prompts * width)
            own = dice.randbytes(max(0, prompts + sampled) * width)
            assert joint(own, theirs) == (theirs + own[len(theirs) :])[: len(own)]


@pytest.mark.parametrize("broken", ["AAA", "A===", "****"])
def test_rows_that_are_no_base64_are_refused(broken: str) -> None:
    with pytest.raises(UnreadableAnswer):
        joined(answer(routed_experts=broken), handed(routed_experts="YWI="), asked(return_routed_experts=True))


def test_an_engine_says_which_half_it_is() -> None:
    for mode in ("prefill", "decode"):
        facts = read_facts({"/model_info": orjson.dumps({"disaggregation_mode": mode, "weight_version": "1"})})
        assert facts.half == mode
        assert facts.engine is not None
        assert facts.engine.pauses == {"retract": "in_place"}
    assert read_facts({"/model_info": b'{"disaggregation_mode":"null","weight_version":"1"}'}).engine is not None
    assert read_facts({"/model_info": b'{"weight_version":"1"}'}).half is None
