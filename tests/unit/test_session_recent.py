"""What is kept of the last turns changes nothing: requests are read as they are, ids are written as they are, and no
more is kept than there is room for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.openai_session.sessions import recent
from middleware_hub.openai_session.sessions.agent_request import PromptIds
from middleware_hub.openai_session.sessions.messages import message_bytes
from middleware_hub.openai_session.sessions.recent import KnownRequests, WrittenIds
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.engines.client_json import read_json
from miles_router.errors import BadRequest
from miles_router.trajectory import Piece
from tests.support.sessions import SYSTEM, Scene, history, user
from tests.support.tiers import examples

START = [SYSTEM, user("Add.")]


def prompt(parent: Turn, *given: int, dropped: int = 0) -> PromptIds:
    return PromptIds(parent, Piece.given(given), dropped)


def line(turns: int) -> tuple[Scene, list[Turn]]:
    scene = Scene()
    made = [scene.turn(START)]
    while len(made) < turns:
        made.append(scene.follow(made[-1], user("more"), given=4))
    return scene, made


@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("given", [(), (7,), (7, 0, 2**31 - 1)])
def test_a_text_that_goes_on_says_the_ids(dropped: int, given: tuple[int, ...]) -> None:
    scene, turns = line(3)
    wanted = prompt(turns[-1], *given, dropped=dropped)
    kept = b"".join(scene.store.written_ids.prompt(scene.session.id, wanted))
    assert kept == b"".join(WrittenIds().prompt(scene.session.id, wanted))
    assert orjson.loads(kept) == wanted.ids().tolist()


def test_the_last_turn_of_each_session_is_kept_and_others_are_written_anew() -> None:
    scene, turns = line(3)
    written = scene.store.written_ids
    before = written.nbytes
    for turn in turns:
        wanted = prompt(turn, 1)
        assert orjson.loads(b"".join(written.prompt(scene.session.id, wanted))) == wanted.ids().tolist()
    assert written.nbytes == before == len(written.prompt(scene.session.id, prompt(turns[-1]))[0])


def test_a_session_that_is_deleted_leaves_nothing() -> None:
    scene, _ = line(2)
    assert scene.store.written_ids.nbytes > 0
    scene.store.delete(scene.session)
    assert scene.store.written_ids.nbytes == 0


def test_where_there_is_no_room_the_session_that_was_used_last_is_kept() -> None:
    _, (first,) = line(1)
    written = WrittenIds(most=100)
    text = b"[" + b",".join([b"1"] * 30), b"]"
    for name in ("a", "b", "a", "c"):
        written.recorded(name, first, text)
        assert written.nbytes <= 100
    size = written.nbytes
    written.forget("b")
    assert written.nbytes == size
    written.forget("c")
    assert written.nbytes == 0
    written.recorded("d", first, (text[0] * 2, b"]"))
    assert written.nbytes == 0


def test_turns_are_written_as_they_are_whichever_way_a_session_goes() -> None:
    scene, turns = line(2)
    branch = scene.turn([*history(turns[0]), user("other")])
    for parent in (branch, turns[1], turns[0], branch):
        wanted = prompt(parent, 3, 4)
        assert orjson.loads(b"".join(scene.store.written_ids.prompt(scene.session.id, wanted))) == wanted.ids().tolist()


# Requests


def python_json(request: Any) -> bytes:
    return json.dumps(request).encode()


def indented(request: Any) -> bytes:
    return json.dumps(request, indent=2).encode()


def asked(*texts: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user" if place % 2 else "assistant", "content": text} for place, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **fields}


@pytest.mark.parametrize("write", [orjson.dumps, python_json, indented])
@pytest.mark.parametrize("fields", [{}, {"tools": [{"a": ["]"]}], "stop": ["x", "y"]}])
def test_a_request_that_goes_on_is_read_from_where_the_last_one_ended(
    write: Callable[[Any], bytes], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = KnownRequests()
    texts = ["a", 'b"]', "c,", "[d", "é", "f", "g"]
    before: list[Any] = []
    for count in range(1, len(texts) + 1):
        body = write(asked(*texts[:count], **fields))
        parsed = requests.read("s", body, "messages")
        assert parsed == orjson.loads(body)
        shared = parsed["messages"].shared
        assert shared == count - 1
        assert all(map(is_, before[:shared], parsed["messages"]))
        before = parsed["messages"]
    monkeypatch.setattr(recent, "read_json", None)
    body = write(asked(*texts, "h", "i", **fields))
    assert requests.read("s", body, "messages") == orjson.loads(body)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "another field": lambda body: body.replace(b'"model":"m"', b'"model":"n"'),
    "another message": lambda body: body.replace(b'"a"', b'"A"'),
    "a field behind": lambda body: body[:-1] + b',"n":2}',
    "a second list": lambda body: body[:-1] + b',"messages":[{"role":"user","content":"other"}]}',
    "a list that ends sooner": lambda body: body.replace(b"]}", b'],"x":[1]}'),
    "nothing added": lambda body: body.replace(b',{"role":"user","content":"d"}', b""),
    "a comma alone": lambda body: body.replace(b',{"role":"user","content":"d"}', b","),
    "another list in place of items": lambda body: body.replace(b',{"role":"user","content":"d"}', b'],"messages":[1'),
    "two lists in place of items": lambda body: body.replace(b',{"role":"user","content":"d"}', b",1],[2"),
    "no JSON": lambda body: body.replace(b',{"role":"user","content":"d"}', b',{"role":"user"'),
    "too deep": lambda body: body.replace(b',{"role":"user","content":"d"}', b"," + b"[" * 199 + b"]" * 199),
    "deep": lambda body: body.replace(b',{"role":"user","content":"d"}', b"," + b"[" * 198 + b"]" * 198),
    "no UTF-8": lambda body: body.replace(b'"d"', b'"\xff"'),
    "spaces": lambda body: body.replace(b'"d"}', b'"d"} '),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_request_that_changes_in_any_other_way_is_read_as_it_is(change: str) -> None:
    requests = KnownRequests()
    for texts in ("a", "ab", "abc"):
        requests.read("s", orjson.dumps(asked(*texts)), "messages")
    body = CHANGES[change](orjson.dumps(asked(*"abcd")))
    assert read(partial(requests.read, "s", body, "messages")) == read(partial(read_json, body))
    body = orjson.dumps(asked(*"abcde"))
    assert requests.read("s", body, "messages") == orjson.loads(body)


def read(work: Callable[[], Any]) -> tuple[object, str]:
    try:
        return work(), ""
    except BadRequest as error:
        return None, type(error).__name__


HIDDEN: dict[str, tuple[bytes, ...]] = {
    "a list in an item": (
        b'{"l":[{"a":[1]}]}',
        b'{"l":[{"a":[1,2],"a":[1]},{"b":[3]}]}',
        b'{"l":[{"a":[1,2],"a":[1]},{"b":[3,4]}]}',
    ),
    "a list beside it": (
        b'{"l":[5],"x":[1]}',
        b'{"l":[5],"x":[1,2],"l":[5,6],"x":[1]}',
        b'{"l":[5],"x":[1,2],"l":[5,6],"x":[1,3]}',
    ),
    "a list of its name in another field": (b'{"x":{"l":[1]},"l":[2]}', b'{"x":{"l":[1,3]},"l":[2]}'),
    "a list of its name behind it": (b'{"l":[1],"l":[2]}', b'{"l":[1,3],"l":[2]}'),
    "a field of its name that is no list": (b'{"x":{"l":"]"},"l":[2]}', b'{"x":{"l":",3]"},"l":[2]}'),
    "a text": (
        b'{"l":[{"a":"]"}]}',
        b'{"l":[{"a":",","a":"]"},{"b":"]"}]}',
        b'{"l":[{"a":",","a":"]"},{"b":",1]"}]}',
    ),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_bracket_in_front_of_which_fields_hide_others_is_not_taken_for_the_list_s(case: str) -> None:
    requests = KnownRequests()
    for body in HIDDEN[case]:
        assert requests.read("s", body, "l") == orjson.loads(body)


PIECES = (b'{"l":[', b"]", b"}", b",", b"1", b"true", b'"]"', b'"x', b'"', b"[", b"[]", b'{"l":1}', b'"l":', b" ")
puts = st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join)


@settings(max_examples=examples(300))
@given(data=st.data())
def test_whatever_stands_in_a_row_of_requests_is_read_as_it_is(data: st.DataObject) -> None:
    requests, body = KnownRequests(), b'{"l":[1]}'
    for _ in range(data.draw(st.integers(2, 8))):
        if data.draw(st.booleans()):  # a text in front of some bracket, as where a list goes on
            brackets = [place for place, byte in enumerate(body) if byte == ord("]")] or [0]
            place = data.draw(st.sampled_from(brackets))
            body = b"".join((body[:place], b",", data.draw(puts), body[place:]))
        else:
            begin = data.draw(st.integers(0, len(body)))
            body = b"".join((body[:begin], data.draw(puts), body[data.draw(st.integers(begin, len(body))) :]))
        found, wanted = read(partial(requests.read, "s", body, "l")), read(partial(read_json, body))
        assert repr(found) == repr(wanted)  # `true` is not 1
        if wanted == (None, "BadRequest"):
            body = b'{"l":[1,2]}'


def test_a_request_with_another_list_and_a_long_one_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = KnownRequests()
    for texts in ("a", "ab", "abc"):
        requests.read("s", orjson.dumps(asked(*texts)), "messages")
    other = orjson.dumps({"input": [1, 2], "messages": [3]})
    assert requests.read("s", other, "input") == {"input": [1, 2], "messages": [3]}
    assert requests.read("s", b"[1]", "input") == [1]
    monkeypatch.setattr(recent, "LONGEST", 10)
    size = requests.nbytes
    assert requests.read("t", orjson.dumps(asked("a")), "messages") == asked("a")
    assert requests.nbytes == size


@pytest.mark.parametrize("item", [b"{}", b'{"":0}', b"[0]", b"1.5", b'"ab"'])
def test_what_is_kept_counts_with_the_memory_that_it_takes(item: bytes) -> None:
    requests = KnownRequests()
    for count in (1, 1000, 2000, 3000):
        body = b'{"l":[%b]}' % b",".join([item] * count)
        assert requests.nbytes < len(body) + message_bytes(parsed := requests.read("s", body, "l")) <= requests.nbytes
    assert parsed["l"].shared == 2000
    requests.forget("s")
    assert requests.nbytes == 0
