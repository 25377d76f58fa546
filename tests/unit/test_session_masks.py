"""Builds and masks of samples: which tokens are the response, and which of the sampled ones are in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.samples import SampleMaker, SampleRequest, checked_defaults
from middleware_hub.openai_session.export.selection import Selection
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest, ConfigError
from miles_router.trajectory import Sample
from tests.support.sessions import STOP, SYSTEM, Scene, assistant, user

START = [SYSTEM, user("Add.")]
PROMPT = 3


def decode(ids: Sequence[int]) -> str:
    """Every id is a character."""
    return "".join("." if token >= STOP else chr(token) for token in ids)


def collected(scene: Scene, maker: SampleMaker | None = None, **request: Any) -> list[Sample]:
    maker = maker or SampleMaker(Selection(()), decode, {})
    return maker.plan(scene.session, SampleRequest.read(request)).make()


def three_turns(scene: Scene) -> Turn:
    """3 given, 3 sampled, 2 given, 4 sampled (of which 2 by the next weights), 1 given, 2 sampled."""
    first = scene.turn(START, sampled=3)
    second = scene.follow(first, user("b"), given=2, sampled=4, versions=[("1", 0, 2), ("2", 2, 4)])
    return scene.follow(second, user("c"), given=1, sampled=2, versions=[("2", 0, 2)])


def masks(samples: Sequence[Sample]) -> list[str]:
    return ["".join(map(str, sample.loss_mask.tolist())) for sample in samples]


@pytest.mark.parametrize(
    ("mask", "loss"),
    [
        ("all", "000111001111011"),
        ([], "000111001111011"),
        ("last_turn", "000000000000011"),
        ("newest_weights", "000000000011011"),
        (["newest_weights", "last_turn"], "000000000000011"),
        (["all", "last_turn"], "000000000000011"),
    ],
)
@pytest.mark.parametrize("build", ["concat", "last_step"])
def test_a_mask_leaves_some_of_the_sampled_tokens_in_the_loss(build: str, mask: Any, loss: str) -> None:
    scene = Scene()
    leaf = three_turns(scene)
    (sample,) = collected(scene, build=build, mask=mask)
    assert masks([sample]) == [loss]
    assert sample.tokens.tolist() == leaf.trajectory().tokens.tolist()
    assert sample.logprobs.tolist() == leaf.trajectory().logprobs.tolist()
    named = [mask] if isinstance(mask, str) else mask
    assert (sample.metadata["build"], sample.metadata["mask"]) == (build, [name for name in named if name != "all"])


@pytest.mark.parametrize(("mask", "prompt"), [("all", 3), ("newest_weights", 8), ("last_turn", 13)])
def test_the_response_of_a_last_step_begins_with_the_first_turn_in_the_loss(mask: str, prompt: int) -> None:
    scene = Scene()
    leaf = three_turns(scene)
    (sample,) = collected(scene, build="last_step", mask=mask)
    assert sample.response_length == leaf.tokens - prompt
    assert sample.response == decode(sample.tokens[prompt:].tolist())
    (whole,) = collected(scene, mask=mask)
    assert whole.response_length == leaf.tokens - PROMPT


def test_a_last_step_is_what_the_last_engine_was_given_and_answered() -> None:
    scene = Scene()
    first = three_turns(scene)
    other = scene.turn([SYSTEM, user("Else.")], sampled=2)
    (sample,) = collected(scene, build="last_step")
    assert (sample.metadata["leaf"], sample.tokens.tolist()) == (other.number, other.trajectory().tokens.tolist())
    both = collected(scene, build="last_step", branches="all")
    assert [each.metadata["leaf"] for each in both] == [first.number, other.number]


def test_a_turn_that_branches_share_is_in_one_loss_whatever_the_build() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2)
    for text in "bc":
        scene.follow(first, user(text), given=1, sampled=1)
    samples = collected(scene, build="last_step", branches="all")
    assert masks(samples) == ["0001101", "0000001"]
    assert [sample.prompt_length for sample in samples] == [3, 6]


def test_a_cut_sample_has_the_newest_weights_of_what_is_left() -> None:
    scene = Scene()
    three_turns(scene)
    (sample,) = collected(scene, mask="newest_weights", max_seq_len=10)
    assert masks([sample]) == ["0001110011"]


def test_newest_weights_that_nobody_knows_are_refused_by_name() -> None:
    scene = Scene()
    scene.follow(scene.turn(START), user("b"), versions=[])
    with pytest.raises(UnusableSample, match="newest_weights_are_known: turn 1"):
        collected(scene, mask="newest_weights")


def said(scene: Scene, text: str, **answer: Any) -> Turn:
    """A turn whose tokens spell this text, and a stop token."""
    asked = scene.ask(START)
    choice = scene.generated(asked, assistant("", **answer), sampled=len(text) + 1)
    choice.ids = [*map(ord, text), STOP]
    (turn,) = scene.record(asked, choice)
    return turn


@pytest.mark.parametrize(
    ("text", "answer", "left"),
    [
        ("<think>\nhm\n</think>\n\nyes", {"content": "yes", "reasoning_content": "\nhm\n"}, "\n\nyes."),
        ("hm\n</think>yes", {"content": "yes", "reasoning_content": "hm\n"}, "yes."),
        ("<mm:think>hm</mm:think>yes", {"content": "yes", "reasoning_content": "hm"}, "yes."),
        ("<think>hm</think><tool_call>", {"reasoning_content": "hm", "tool_calls": []}, "<tool_call>."),
        ("hm\n\nyes", {"content": "yes", "reasoning": "hm"}, "\n\nyes."),
        ("<think>hm</think>yes", {"content": "<think>hm</think>yes"}, "yes."),
        ("<think>hm", {"content": "<think>hm"}, ""),
        ("hm", {"content": "", "reasoning_content": "hm"}, "."),
        ("yes </think>", {"content": "yes </think>", "reasoning_content": None}, "yes </think>."),
    ],
)
def test_reasoning_may_be_left_out_of_the_loss(text: str, answer: dict[str, Any], left: str) -> None:
    scene = Scene()
    turn = said(scene, text, **answer)
    (sample,) = collected(scene, mask="no_reasoning")
    assert decode(sample.tokens[sample.loss_mask == 1].tolist()) == left
    assert sample.prompt_length == turn.prompt_tokens


def test_reasoning_that_is_not_in_the_tokens_is_refused_by_name() -> None:
    scene = Scene()
    said(scene, "yes", reasoning_content="hm")
    with pytest.raises(UnusableSample, match="reasoning_is_found: turn 0"):
        collected(scene, mask="no_reasoning")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"build": "snapshot"}, "build must be one of concat, last_step"),
        ({"build": None}, "build must be"),
        ({"mask": "none"}, "mask must be one of all, last_turn, newest_weights, no_reasoning, or a list of them"),
        ({"mask": ["last_turn", "x"]}, "mask must be"),
        ({"mask": None}, "mask must be"),
        ({"mask": [["last_turn"]]}, "mask must be"),
        ({"side_calls": "no"}, "side_calls must be true or false"),
        ({"side_calls": 0}, "side_calls must be true or false"),
    ],
)
def test_a_build_or_mask_that_there_is_not_is_refused(request_: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        SampleRequest.read(request_)


def test_an_operator_may_name_what_requests_that_say_nothing_get() -> None:
    scene = Scene()
    three_turns(scene)
    maker = SampleMaker(Selection(()), decode, {}, *checked_defaults("m", "last_step", ["last_turn"]))
    scene.turn([user("Title?")])
    maker = replace(maker, side_calls=False)
    (sample,) = collected(scene, maker)
    assert (masks([sample]), sample.prompt_length) == (["000000000000011"], 13)
    assert masks(collected(scene, maker, build="concat", mask="all")) == ["000111001111011"]
    both = collected(scene, maker, build="concat", branches="all", side_calls=True)
    assert [each.metadata["side_call"] for each in both] == [False, True]
    for build, mask in (("x", []), ("concat", ["x"])):
        with pytest.raises(ConfigError, match=r"m\.default_"):
            checked_defaults("m", build, mask)
