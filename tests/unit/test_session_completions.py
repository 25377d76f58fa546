"""`/v1/completions` within a session: where a prompt hangs, what is asked for, recorded, and shown to the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces import completions
from middleware_hub.openai_session.faces.completions import CONTEXT, StreamedCompletion, ask, body, generated, shown
from middleware_hub.openai_session.sessions.tree import Turn
from middleware_hub.openai_session.turns.asking import Asked
from miles_router.engines.events import DATA, END, LAST_EVENT
from miles_router.errors import BadRequest
from tests.support.sessions import SYSTEM, Scene, user


def choice(
    text: str = "ab",
    ids: Sequence[int] = (11, 12),
    prompt: Sequence[int] | None = (5, 6),
    index: int = 0,
    finish: str | None = "length",
) -> dict[str, Any]:
    """As SGLang 0.5.23 gives it with `logprobs: 0`, which asks for those of the sampled tokens alone."""
    told = {
        "text_offset": [-1] * len(ids),
        "token_logprobs": [-1.0 / each for each in ids],
        "tokens": [],
        "top_logprobs": [],
    }
    return {
        "index": index,
        "text": text,
        "logprobs": told,
        "finish_reason": finish,
        "matched_stop": None,
        "token_ids": list(ids),
        **({} if prompt is None else {"prompt_token_ids": list(prompt)}),
    }


def answer(*choices: dict[str, Any], versions: Sequence[str] = ("1",)) -> dict[str, Any]:
    spans = [{"version": version, "start": place, "end": place + 1} for place, version in enumerate(versions)]
    if len(versions) == 1:
        spans[0]["end"] = len(choices[0]["token_ids"])
    metadata = {"weight_version": versions[-1], "weight_versions": spans}
    return {"id": "r", "object": "text_completion", "choices": list(choices), "usage": {}, "metadata": metadata}


def asked_for(scene: Scene, prompt: object, **fields: Any) -> Asked:
    return ask(scene.session, {"prompt": prompt, **fields}, now=scene.time)


def turns(scene: Scene, prompt: object, *choices: dict[str, Any], **fields: Any) -> list[Turn]:
    asked = asked_for(scene, prompt, **fields)
    scene.time += 1
    return scene.record(asked, *generated(answer(*choices)))


def ids_of(turn: Turn) -> list[int]:
    found: list[int] = turn.trajectory().tokens.tolist()
    return found


# Where it hangs


@pytest.mark.parametrize("parsed", [[], {}, {"prompt": None}, {"prompt": 3}, {"prompt": {}}])
def test_a_request_without_a_prompt_is_refused(parsed: object) -> None:
    with pytest.raises(BadRequest):
        ask(Scene().session, parsed, now=0.0)


def test_a_text_is_a_root_whose_ids_the_engine_tells() -> None:
    scene = Scene()
    asked = asked_for(scene, "Hello")
    assert (asked.place.parent, asked.given, asked.held, asked.batch) == (None, None, None, ())
    (turn,) = turns(scene, "Hello", choice())
    assert ids_of(turn) == [5, 6, 11, 12]
    assert turn.appended == ({"role": "prompt", "content": "Hello"},)
    assert turn.answer == {"role": "assistant", "content": "ab"}


def test_ids_that_begin_with_a_held_turn_s_extend_it() -> None:
    scene = Scene()
    (first,) = turns(scene, [5, 6], choice())
    prompt = [*ids_of(first), 7, 8, 9]
    (second,) = turns(scene, prompt, choice("c", [13], prompt))
    assert second.parent is first
    assert ids_of(second) == [*prompt, 13]
    assert second.given.tokens.tolist() == [7, 8, 9]
    assert second.trajectory().loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert (second.reason, scene.recorder.statistics.reused_tokens, scene.recorder.statistics.given_tokens) == (
        None,
        4,
        5,
    )


def test_ids_that_are_all_held_go_on_without_anything_new() -> None:
    scene = Scene()
    (first,) = turns(scene, [5, 6], choice())
    (second,) = turns(scene, ids_of(first), choice("c", [13], ids_of(first)))
    assert (second.parent, len(second.given), ids_of(second)) == (first, 0, [5, 6, 11, 12, 13])


def test_of_held_turns_that_ids_begin_with_the_deepest_is_extended() -> None:
    scene = Scene()
    (first,) = turns(scene, [5], choice(ids=[6], prompt=[5]))
    (second,) = turns(scene, [5, 6, 7], choice(ids=[8, 9], prompt=[5, 6, 7]))
    (shallow,) = turns(scene, [5, 6], choice(ids=[7], prompt=[5, 6]))
    assert (second.parent, shallow.parent) == (first, first)
    assert asked_for(scene, [5, 6, 7, 8, 9, 1]).place.parent is second
    assert asked_for(scene, [5, 6, 7, 8]).place.parent is shallow
    assert asked_for(scene, [5, 6, 2]).place.parent is first
    assert asked_for(scene, [5, 7]).place.parent is None


def test_of_turns_with_equal_ids_the_latest_is_extended() -> None:
    scene = Scene()
    turns(scene, [5], choice(ids=[6], prompt=[5]))
    (again,) = turns(scene, [5], choice(ids=[6], prompt=[5]))
    assert again.reason == "retry"
    assert asked_for(scene, [5, 6, 7]).place.parent is again


def test_a_chat_turn_is_not_extended_by_a_completion_nor_the_other_way_round() -> None:
    scene = Scene()
    chat = scene.turn([SYSTEM, user("a")])
    assert asked_for(scene, [*ids_of(chat), 1]).place.parent is None
    (completion,) = turns(scene, "x", choice())
    messages = [{"role": "prompt", "content": "x"}, completion.answer, user("b")]
    assert scene.session.place(messages, [b""], scene.equal).parent is None


@pytest.mark.parametrize("prompt", [[], [-1], [2**40], [1, True], [1.5], ["a", "b"], [[1, 2], [3]], [3, "a"]])
def test_prompts_that_are_no_ids_extend_nothing(prompt: list[Any]) -> None:
    scene = Scene()
    turns(scene, [1], choice(ids=[2], prompt=[1]))
    asked = asked_for(scene, prompt)
    assert (asked.place.parent, asked.given) == (None, None)


def test_ids_are_held_once_as_tokens_and_never_as_a_list() -> None:
    scene = Scene()
    ids = list(range(50_000))
    (first,) = turns(scene, ids, choice(prompt=ids))
    (second,) = turns(scene, [*ids_of(first), 7], choice(prompt=[*ids_of(first), 7]))
    assert scene.session.nbytes < 50_000 * 4 + 20_000
    assert [turn.appended[0]["content"].partition(",")[0] for turn in (first, second)] == [
        "50000 token ids",
        "1 token ids",
    ]


def test_a_text_that_goes_on_from_a_held_one_says_why_it_is_a_root() -> None:
    scene = Scene()
    turns(scene, "Hello", choice(" you"))
    (more,) = turns(scene, "Hello you, and", choice())
    assert (more.parent, more.reason) == (None, "text_prompt")
    assert turns(scene, "Bye", choice())[0].reason == "sub_agent"
    assert turns(scene, "Hello", choice())[0].reason == "retry"


def test_other_ids_are_another_request_and_the_same_ids_a_retry() -> None:
    scene = Scene()
    turns(scene, [1, 2], choice(prompt=[1, 2]))
    assert turns(scene, [1, 3], choice(prompt=[1, 3]))[0].reason == "sub_agent"
    assert turns(scene, [1, 2], choice(prompt=[1, 2]))[0].reason == "retry"


# Several prompts, several choices


def test_choices_of_one_prompt_share_what_was_given() -> None:
    scene = Scene()
    first, second = turns(scene, "a", choice(ids=[11]), choice(ids=[12], index=1), n=2)
    assert first.given is second.given
    assert [turn.reason for turn in (first, second)] == [None, "choice"]
    assert (scene.recorder.statistics.given_tokens, scene.recorder.statistics.sampled_tokens) == (2, 2)


@pytest.mark.parametrize("prompts", [["a", "b"], [[5], [6]]])
def test_a_batch_of_prompts_is_answered_prompt_by_prompt(prompts: list[Any]) -> None:
    scene = Scene()
    made = turns(
        scene, prompts, *(choice(ids=[20 + place], prompt=[5 + place // 2], index=place) for place in range(4)), n=2
    )
    assert [ids_of(turn) for turn in made] == [[5, 20], [5, 21], [6, 22], [6, 23]]
    assert [turn.reason for turn in made] == [None, "choice", "batch", "choice"]
    assert [turn.appended for turn in made[::2]] == [asked.appended for asked in asked_for(scene, prompts).batch]
    assert made[0].appended == made[1].appended != made[2].appended
    assert [turn.first for turn in made] == [None, made[0], None, made[2]]


def test_a_batch_of_equal_prompts_is_one_prompt_with_several_choices() -> None:
    scene = Scene()
    made = turns(scene, ["a", "a"], choice(), choice(index=1))
    assert [turn.reason for turn in made] == [None, "choice"]


def test_a_batch_of_one_prompt_is_that_prompt() -> None:
    scene = Scene()
    (first,) = turns(scene, [[5, 6]], choice())
    assert asked_for(scene, [[*ids_of(first), 1]]).place.parent is first
    assert asked_for(scene, ["a"]).place.appended == ({"role": "prompt", "content": "a"},)


def test_a_batch_that_is_not_answered_evenly_is_unusable() -> None:
    scene = Scene()
    with pytest.raises(UnusableAnswer, match="3 choices for 2 prompts"):
        turns(scene, ["a", "b"], *(choice(index=place) for place in range(3)))
    assert scene.session.turns == []


# What is asked for, and what is seen


def test_ids_and_logprobs_are_asked_for_and_nothing_else_changes() -> None:
    scene = Scene()
    parsed = {"prompt": [5, 6], "n": 2, "suffix": "x", "unknown": [1]}
    assert orjson.loads(body(ask(scene.session, parsed, now=0.0))) == {
        **parsed,
        "return_token_ids": True,
        "logprobs": 0,
    }
    assert orjson.loads(body(asked_for(scene, "a", logprobs=3)))["logprobs"] == 3


@pytest.mark.parametrize("prompt", ["a", [1], ["a", "b"]])
def test_echo_cannot_be_recorded(prompt: object) -> None:
    assert completions.untraceable({"prompt": prompt, "echo": True}) is not None
    assert completions.untraceable({"prompt": prompt, "echo": False, "suffix": "x"}) is None
    assert completions.untraceable({"prompt": prompt}) is None
    assert completions.untraceable([prompt]) is None


def test_what_the_client_did_not_ask_for_is_taken_out() -> None:
    scene, whole = Scene(), answer(choice(), choice(index=1))
    found = shown(whole, asked_for(scene, "a", n=2))
    assert [set(each) for each in found["choices"]] == [
        {"index", "text", "logprobs", "finish_reason", "matched_stop"}
    ] * 2
    assert [each["logprobs"] for each in found["choices"]] == [None, None]
    assert {**found, "choices": whole["choices"]} == whole


@pytest.mark.parametrize("logprobs", [0, 1])
def test_what_the_client_asked_for_itself_it_gets(logprobs: int) -> None:
    scene, whole = Scene(), answer(choice())
    assert shown(whole, asked_for(scene, "a", logprobs=logprobs, return_token_ids=True)) == whole


# What is recorded


def test_a_whole_answer_tells_what_was_sampled() -> None:
    (found,) = generated(answer(choice(), versions=("1", "2")))
    assert (found.ids, found.logprobs, found.prompt) == ([11, 12], [-1 / 11, -1 / 12], [5, 6])
    assert (found.versions, found.facts["versions"], found.facts["rid"]) == ([("1", 0, 1), ("2", 1, 2)], "engine", "r")
    assert (found.finish_reason, found.matched) == ("length", None)


def test_the_versions_of_the_first_choice_hold_for_all_if_they_are_one() -> None:
    whole = answer(choice(), choice(ids=[13, 14, 15], index=1))
    whole["metadata"]["weight_version"] = "later"
    found = generated(whole)
    assert [each.versions for each in found] == [[("1", 0, 2)], [("1", 0, 3)]]
    assert {each.facts["versions"] for each in found} == {"engine_first_choice"}
    with pytest.raises(UnusableAnswer, match="weights changed"):
        generated(answer(choice(), choice(index=1), versions=("1", "2")))


def test_an_engine_that_tells_no_version_is_taken_at_its_word() -> None:
    assert [each.versions for each in generated({"choices": [choice()]})] == [[]]
    assert [each.versions for each in generated({"choices": [choice(), choice(index=1)]})] == [[], []]


@pytest.mark.parametrize(
    "bad",
    [None, "a", {}, {**choice(), "finish_reason": None}, {**choice(), "token_ids": 3}, {**choice(), "logprobs": [1]}],
)
def test_an_answer_that_lacks_something_is_unusable(bad: Any) -> None:
    with pytest.raises(UnusableAnswer):
        generated({"choices": [choice(), bad], "metadata": {"weight_version": "1"}})


@pytest.mark.parametrize("metadata", ["1", {"weight_versions": [{"start": 0}]}, {"weight_versions": [3]}])
@pytest.mark.parametrize("count", [1, 2])
def test_versions_of_another_form_are_unusable(metadata: object, count: int) -> None:
    with pytest.raises(UnusableAnswer):
        generated({"choices": [choice()] * count, "metadata": metadata})


def test_an_engine_that_was_given_other_ids_than_it_was_sent_is_not_believed() -> None:
    scene = Scene()
    (first,) = turns(scene, [5, 6], choice())
    prompt = [*ids_of(first), 7]
    for told in ([0, *prompt], prompt[1:], [*prompt[:-1], 8]):
        with pytest.raises(UnusableAnswer, match="other ids than it was sent"):
            turns(scene, prompt, choice(prompt=told))
    assert len(scene.session.turns) == 1


# Streams


def event(*choices: Mapping[str, Any], **fields: Any) -> bytes:
    return DATA + orjson.dumps({"id": "r", "object": "text_completion", "choices": choices, **fields}) + END


STREAM = [
    event(choice("a", [11], finish=None)),
    event(choice("", [12], None, finish=None)),
    event({**choice("b", [13], None, finish="stop"), "matched_stop": 13}),
    event(usage={"completion_tokens": 3}),
    LAST_EVENT,
]


def read(events: Sequence[bytes], **fields: Any) -> tuple[StreamedCompletion, list[bytes]]:
    reading = StreamedCompletion(asked_for(Scene(), "p", stream=True, **fields), lambda: "4")
    return reading, [reading.feed(each) for each in events]


def test_a_stream_tells_ids_and_logprobs_with_each_chunk() -> None:
    reading, live = read(STREAM)
    (found,) = reading.generated()
    assert (found.ids, found.logprobs, found.prompt) == ([11, 12, 13], [-1 / 11, -1 / 12, -1 / 13], [5, 6])
    assert (found.message, found.versions) == ({"role": "assistant", "content": "ab"}, [("4", 0, 3)])
    assert (found.finish_reason, found.matched, found.facts["rid"]) == ("stop", 13, "r")
    assert found.facts["first_token_at"] == reading.first_token_at is not None
    assert [bool(each) for each in live] == [True, True, False, False, False]
    assert reading.done
    assert reading.release().endswith(STREAM[3] + LAST_EVENT)


def test_a_stream_shows_what_the_client_asked_for() -> None:
    assert not any(name in each for each in read(STREAM)[1] for name in (b"token_ids", b"token_logprobs"))
    assert read(STREAM, logprobs=0, return_token_ids=True)[1][:2] == STREAM[:2]


def test_choices_of_a_stream_are_told_apart_and_end_each_on_its_own() -> None:
    events = [
        event(choice("x", [1], [5], 2, finish=None), id="c"),
        event(choice("y", [2], [5], 0, finish="length"), id="a"),
        event(choice("z", [3], [5], 1, finish="length"), id="b"),
        event(choice("!", [4], None, 2), id="c"),
        LAST_EVENT,
    ]
    reading, live = read(events, n=3)
    assert [(each.index, each.ids, each.facts["rid"]) for each in reading.generated()] == [
        (0, [2], "a"),
        (1, [3], "b"),
        (2, [1, 4], "c"),
    ]
    assert [bool(each) for each in live] == [True, False, False, False, False]


def test_a_stream_that_is_cut_or_ends_with_an_error_is_unusable() -> None:
    reading, _ = read(STREAM[:2])
    with pytest.raises(UnusableAnswer, match="no finish reason"):
        reading.generated()
    reading, live = read([STREAM[2], b'data: {"error": {"message": "timeout"}}\n\n', *STREAM[3:]], n=2)
    assert live[1] == b""
    assert b"timeout" in reading.release()
    with pytest.raises(UnusableAnswer, match="error"):
        reading.generated()


def test_a_session_s_completions_have_a_context_of_their_own() -> None:
    scene = Scene()
    (turn,) = turns(scene, "a", choice())
    assert turn.context == CONTEXT
    assert turn.path == "/v1/completions"
    assert ids_of(turn) == [5, 6, 11, 12]
