"""Which messages a request has, and what they weigh."""

from __future__ import annotations

import pytest

from middleware_hub.openai_session.sessions.messages import checked_messages, message_bytes, only_text
from miles_router.errors import BadRequest
from tests.support.sessions import assistant, call, tool, user


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        ([], "must be a JSON object"),
        ({}, "a list with at least one message"),
        ({"messages": []}, "a list with at least one message"),
        ({"messages": {"role": "user"}}, "a list with at least one message"),
        ({"messages": [user("a"), "b"]}, r"messages\[1\] must be an object with a role"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] must be an object with a role"),
        ({"messages": [{"role": 1}]}, r"messages\[0\] must be an object with a role"),
    ],
)
def test_a_request_without_messages_is_refused(parsed: object, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        checked_messages(parsed)


def test_messages_are_those_of_the_request_and_no_copies() -> None:
    messages = [user("a"), assistant("b")]
    found = checked_messages({"messages": messages, "model": "m"})
    assert [id(one) for one in found] == [id(one) for one in messages]


def test_parts_that_ids_alone_do_not_carry_are_told_from_text() -> None:
    text = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert only_text([user("a"), {"role": "user", "content": text}, {"role": "assistant"}, tool("1")])
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {}, 3):
        assert not only_text([user("a"), {"role": "user", "content": [*text, part]}])


def test_the_memory_of_a_message_is_that_of_its_text() -> None:
    assert 1000 <= message_bytes(user("a" * 1000)) - message_bytes(user("")) <= 1100
    assert message_bytes(user("🚀" * 1000)) - message_bytes(user("")) >= 4000
    assert message_bytes(assistant("", tool_calls=[call("f", "x" * 500)])) > 500
