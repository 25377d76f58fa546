"""A request that goes on from the last one is read as if there had been none, in each API, and placed where a walk from
the beginning leads."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.openai_session.faces.messages import request as messages_request
from middleware_hub.openai_session.faces.messages.echo import Echo
from middleware_hub.openai_session.faces.responses import request as responses_request
from middleware_hub.openai_session.faces.responses.envelope import Responses
from middleware_hub.openai_session.sessions.equality import MEANING
from middleware_hub.openai_session.sessions.messages import Message, SentList
from middleware_hub.openai_session.sessions.recent import KnownRequests
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest
from tests.support.sessions import SYSTEM, Scene, assistant, user
from tests.support.tiers import examples

texts = st.sampled_from(["a", "b", "", "x-anthropic-billing-header: 1"])
ids = st.sampled_from(["1", "2", "3"])

text_block = st.fixed_dictionaries({"type": st.just("text"), "text": texts})
result = st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": ids, "content": texts})
reference = st.just({"type": "tool_reference", "tool_name": "later"})
loading = st.builds(lambda each: {"type": "tool_result", "tool_use_id": "1", "content": [each]}, reference)
use = st.builds(lambda call_id: {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": 1}}, ids)
thinking = st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": ""}, texts)
anthropic_messages = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(lambda blocks: {"role": "user", "content": blocks}, st.lists(text_block | result | loading, max_size=3)),
    st.builds(lambda blocks: {"role": "assistant", "content": blocks}, st.lists(text_block | use | thinking)),
    st.builds(lambda text: {"role": "system", "content": text}, texts),
    st.just({"role": "user", "content": [{"type": "image"}]}),
)
ANTHROPIC = {
    "model": "m",
    "max_tokens": 9,
    "system": "s",
    "tools": [
        {"name": "add", "input_schema": {}},
        {"name": "later", "input_schema": {}, "defer_loading": True},
    ],
}

item_ids = st.sampled_from([f"msg_{'0' * 32}_0", f"fc_{'0' * 32}_1", f"msg_{'1' * 32}_0", "other"])
items = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system", "bad"]), texts),
    st.builds(lambda text, item: {"role": "assistant", "content": text, "id": item}, texts, item_ids),
    st.builds(lambda text: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}, texts),
    st.builds(
        lambda call_id, item: {
            "type": "function_call", "call_id": call_id, "id": item, "name": "add", "arguments": "{}"
        },
        ids,
        item_ids,
    ),
    st.builds(lambda call_id, text: {"type": "function_call_output", "call_id": call_id, "output": text}, ids, texts),
)  # fmt: skip
RESPONSES = {"model": "m", "instructions": "s", "tools": [{"type": "function", "name": "add"}]}


def grown(draw: Any, some: st.SearchStrategy[Any]) -> list[list[Any]]:
    """Lists, most of which go on from the one before."""
    made: list[list[Any]] = [[draw(some)]]
    for _ in range(draw(st.integers(2, 6))):
        before = made[-1] if draw(st.integers(0, 5)) else draw(st.sampled_from(made))
        made.append([*before, *draw(st.lists(some, min_size=1, max_size=3))])
    return made


def read(work: Any) -> object:
    try:
        return work()
    except BadRequest as error:
        return str(error)


@settings(max_examples=examples(150))
@given(data=st.data(), anywhere=st.booleans())
def test_messages_that_go_on_are_read_as_anew(data: st.DataObject, anywhere: bool) -> None:
    requests, echo = KnownRequests(), Echo()
    for sent in grown(data.draw, anthropic_messages):
        body = orjson.dumps({**ANTHROPIC, "messages": sent})

        def fields(request: Any, echo: Echo) -> Any:
            asked = messages_request.read(request, echo, system_anywhere=anywhere)
            contexts = [context.key for context in asked.contexts(asked.fields)]
            return copy.deepcopy(orjson.loads(orjson.dumps(asked.fields))), contexts

        known = requests.read("s", body, "messages")
        assert read(lambda: fields(known, echo)) == read(lambda: fields(orjson.loads(body), Echo()))  # noqa: B023


@settings(max_examples=examples(150))
@given(data=st.data(), anywhere=st.booleans())
def test_items_that_go_on_are_read_as_anew(data: st.DataObject, anywhere: bool) -> None:
    requests, responses = KnownRequests(), Responses()
    given_out: list[tuple[Any, bytes]] = []
    for sent in grown(data.draw, items):
        body = orjson.dumps({**RESPONSES, "input": sent})

        def fields(request: Any, responses: Responses) -> Any:
            asked = responses_request.read(request, responses, system_anywhere=anywhere)
            given_out.append((asked.fields["messages"], orjson.dumps(asked.fields["messages"])))
            return orjson.loads(orjson.dumps(asked.fields))

        known = requests.read("s", body, "input")
        assert read(lambda: fields(known, responses)) == read(lambda: fields(orjson.loads(body), Responses()))  # noqa: B023
    for messages, as_it_was in given_out:
        assert orjson.dumps(messages) == as_it_was, "what was given out does not change"


def behind(base: SentList, *messages: Message) -> SentList:
    return SentList([*base, *messages], base)


def go_on(scene: Scene, messages: SentList, answer: str = "a") -> Turn:
    (turn,) = scene.record(asked := scene.ask(messages), scene.generated(asked, answer))
    return turn


ASKED, ANSWER = user("a"), assistant("a")


def test_what_was_asked_before_may_lead_further_than_the_last_answer() -> None:
    scene, first = Scene(), SentList([SYSTEM, ASKED])
    go_on(scene, first)
    second = go_on(scene, behind(first, ANSWER, ASKED))
    again = SentList([SYSTEM, ASKED])
    go_on(scene, again)
    messages = behind(again, ANSWER, ASKED, ANSWER, ASKED)
    assert scene.session.history.find_parent(messages, (b"",), MEANING).parent is second


def test_what_was_asked_at_once_may_lead_further_than_the_last_answer() -> None:
    scene, one, other = Scene(), SentList([SYSTEM, ASKED]), SentList([SYSTEM, ASKED])
    asked, later = scene.ask(one), scene.ask(other)
    scene.record(asked, scene.generated(asked, "a"))
    second = go_on(scene, behind(one, ANSWER, ASKED))
    scene.record(later, scene.generated(later, "a"))
    messages = behind(other, ANSWER, ASKED, ANSWER, ASKED)
    assert scene.session.history.find_parent(messages, (b"",), MEANING).parent is second


def test_the_last_answer_is_gone_on_from_in_its_context_alone() -> None:
    scene, first = Scene(), SentList([SYSTEM, ASKED])
    turn = go_on(scene, first)
    for contexts, parent in (((b"t",), None), ((b"t", b""), turn)):
        assert scene.session.history.find_parent(behind(first, ANSWER, ASKED), contexts, MEANING).parent is parent


@settings(max_examples=examples(200))
@given(data=st.data())
def test_a_list_that_goes_on_is_placed_where_it_is_placed_without_its_number(data: st.DataObject) -> None:
    scene, sent = Scene(), [SentList([SYSTEM, ASKED])]
    spelled = st.sampled_from([ANSWER, {**ANSWER, "refusal": None}, assistant("b")])
    for _ in range(data.draw(st.integers(2, 12))):
        base = data.draw(st.sampled_from([sent[-1], *sent]))
        more = data.draw(st.lists(st.tuples(spelled, st.sampled_from([ASKED, user("b")])), max_size=2))
        messages = behind(base, *chain.from_iterable(more))
        sent.append(messages)
        contexts = data.draw(st.sampled_from([(b"",), (b"",), (b"t", b"")]))
        place = scene.session.history.find_parent(messages, contexts, MEANING)
        assert place == scene.session.history.find_parent(list(messages), contexts, MEANING)
        replies = data.draw(st.sampled_from(["a", "a", "a", "b", "ab"]))
        asked = scene.ask(messages)
        scene.record(asked, *(scene.generated(asked, each, index=index) for index, each in enumerate(replies)))
