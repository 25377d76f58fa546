"""A turn whose answer comes in one piece: what is an answer, what it says, and what the agent sees of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.whole import Collector, generated, read_answer, shown, was_aborted
from tests.support.sessions import SYSTEM, Scene, user
from tests.unit.test_session_answers import CHOICE

MESSAGES = [SYSTEM, user("Add.")]
ANSWER: dict[str, Any] = {
    "id": "f83d",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{**CHOICE, "response_token_ids": [5468, 103814, 151645]}],
    "usage": {"prompt_tokens": 3},
    "metadata": {"weight_version": "2"},
}
OWN = {"prompt_token_ids", "response_token_ids", "meta_info"}


def seen(**fields: Any) -> dict[str, Any]:
    """The first choice as an agent sees it that asked for these fields."""
    choice: dict[str, Any] = shown(ANSWER, Scene().ask(MESSAGES, **fields))["choices"][0]
    return choice


def test_what_the_agent_did_not_ask_for_is_taken_out() -> None:
    choice = {**CHOICE, "logprobs": {"content": [{"token": "a"}]}}
    found = shown({**ANSWER, "choices": [choice]}, Scene().ask(MESSAGES))
    (only,) = found["choices"]
    assert only.keys() == CHOICE.keys() - OWN
    assert only["logprobs"] is None
    assert only["message"] is CHOICE["message"]
    assert {**found, "choices": []} == {**ANSWER, "choices": []}
    assert choice.keys() == CHOICE.keys(), "what is recorded stays as it is"


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("return_prompt_token_ids", {"prompt_token_ids", "response_token_ids"}),
        ("return_token_ids", {"prompt_token_ids", "response_token_ids"}),
        ("return_meta_info", {"meta_info", "response_token_ids"}),
        ("logprobs", {"response_token_ids"}),
    ],
)
def test_what_the_agent_asked_for_itself_it_gets(field: str, given: set[str]) -> None:
    assert seen(**{field: True}).keys() & OWN == given
    assert seen(**{field: False}).keys() & OWN == {"response_token_ids"}
    assert (seen(**{field: True})["logprobs"] is None) is (field != "logprobs")


def test_meta_info_has_logprobs_only_where_they_were_asked_for() -> None:
    meta = CHOICE["meta_info"]
    assert seen(return_meta_info=True, logprobs=True)["meta_info"] == meta
    assert meta.keys() - seen(return_meta_info=True)["meta_info"].keys() == {
        "output_token_logprobs",
        "output_token_logprobs_length",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
    }


def test_every_choice_is_read_and_shown() -> None:
    answer = {**ANSWER, "choices": [{**CHOICE, "index": index} for index in range(3)]}
    assert [choice.index for choice in generated(answer)] == [0, 1, 2]
    assert [choice["index"] for choice in shown(answer, Scene().ask(MESSAGES))["choices"]] == [0, 1, 2]
    with pytest.raises(UnusableAnswer):
        generated({**answer, "choices": [CHOICE, None]})


@pytest.mark.parametrize(
    "body", [b"", b"no", b"[]", b"{}", b'{"choices": null}', b'{"choices": []}', b'{"choices": {"0": {}}}']
)
def test_a_body_without_choices_is_no_answer(body: bytes) -> None:
    with pytest.raises(UnusableAnswer):
        read_answer(body)


def test_an_answer_is_aborted_if_one_choice_is() -> None:
    def cut(*reasons: Any) -> bool:
        return was_aborted(orjson.dumps({"choices": [{"finish_reason": reason} for reason in reasons]}))

    assert not cut("stop", "length", None)
    assert cut("stop", "abort")
    assert not was_aborted(b'{"choices": ["abort"]}')


async def collected(status: int = 200, *headers: tuple[bytes, bytes]) -> Collector:
    collector = Collector()
    await collector.send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await collector.send({"type": "http.response.body", "body": b"ab", "more_body": True})
    await collector.send({"type": "http.response.body", "body": b"c", "more_body": True})
    await collector.send({"type": "http.response.body"})
    return collector


JSON = (b"content-type", b"application/json; charset=utf-8")


async def test_a_reply_is_collected_part_by_part() -> None:
    assert (await collected(200, JSON)).body == b"abc"


@pytest.mark.parametrize(
    ("status", "headers", "is_answer"),
    [
        (200, [JSON], True),
        (400, [JSON], False),
        (201, [JSON], False),
        (200, [(b"content-type", b"text/plain")], False),
        (200, [], False),
        (200, [JSON, (b"content-encoding", b"gzip")], False),
    ],
)
async def test_only_the_engine_s_own_json_is_an_answer(
    status: int, headers: list[tuple[bytes, bytes]], is_answer: bool
) -> None:
    assert (await collected(status, *headers)).is_answer is is_answer


def test_what_never_began_is_no_answer() -> None:
    assert not Collector().is_answer
