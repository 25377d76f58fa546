"""Samples: which leaves become some, in which of them each token is trained, and what they hold exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.samples import SampleMaker, SampleRequest, checked_defaults
from middleware_hub.openai_session.export.selection import (
    Selection,
    side_calls,
    trained_before,
    trained_elsewhere,
    trained_tokens,
)
from middleware_hub.openai_session.sessions.turn import Turn, line_trajectory
from miles_router.errors import BadRequest, ConfigError
from miles_router.trajectory import Sample, from_arrays
from tests.support.sessions import STOP, SYSTEM, Scene, assistant, system, user

START = [SYSTEM, user("Add.")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def main_line(scene: Scene) -> list[int]:
    leaves = Selection(()).leaves(scene.session, "all", without=side_calls(scene.session))
    return [leaf.number for leaf in leaves]


def test_a_side_call_that_comes_first_is_one_where_the_main_line_has_tools() -> None:
    scene = Scene()
    probe = scene.turn([user("quota")])
    main = scene.turn(START, tools=TOOLS)
    assert [scene.reason(probe), scene.reason(main)] == [None, "sub_agent"]
    assert main_line(scene) == [1]
    scene.follow(main, user("more"), tools=TOOLS, sampled=9)
    helper = scene.turn([system("Search."), user("Where?")], tools=TOOLS)
    for text in ("And?", "And then?"):
        helper = scene.follow(helper, user(text), tools=TOOLS)
    assert main_line(scene) == [2], "beside a sub-agent with tools, and with more turns"


def test_the_whole_episode_decides_which_line_is_the_main_one() -> None:
    scene = Scene()
    scene.turn([user("Are you there?")], tools=TOOLS, sampled=2)
    assert main_line(scene) == [0]
    scene.turn([user("Add.")], tools=TOOLS, sampled=9)
    assert main_line(scene) == [1], "the first was a warm-up"
    fork = scene.turn([system("Search."), user("Where?")], tools=TOOLS, sampled=50, side_call=True)
    assert fork.side_call
    assert main_line(scene) == [1], "what its agent calls a side call is none, however long"
    scene.turn([user("Write all of it down.")], sampled=90)
    assert main_line(scene) == [1], "it was not shown tools"


def test_segments_of_the_main_line_are_no_side_calls() -> None:
    scene = Scene()
    first = scene.turn(START, tools=TOOLS)
    second = scene.follow(first, user("more"), tools=TOOLS)
    scene.turn([SYSTEM, user("So far: much.")], tools=TOOLS)
    scene.follow(second, user("and"), tools=[*TOOLS, *TOOLS])
    scene.turn(START, tools=TOOLS)
    assert [scene.reason(turn) for turn in scene.session.turns] == [None, None, "compaction", "changed_tools", "retry"]
    assert main_line(scene) == [1, 2, 3, 4]


def test_the_main_line_stays_where_its_system_message_changes_under_the_same_tools() -> None:
    scene = Scene()
    first = scene.turn([system("Today is Monday."), user("Add.")], tools=TOOLS)
    tuesday = [system("Today is Tuesday."), user("Add."), first.answer, user("more")]
    assert scene.reason(scene.turn(tuesday, tools=TOOLS)) == "sub_agent"
    scene.turn([system("Title"), user("Add.")])
    assert main_line(scene) == [0, 1]


def test_a_request_that_its_agent_calls_one_is_a_side_call_with_all_behind_it() -> None:
    scene = Scene()
    first = scene.turn(START, tools=TOOLS)
    fork = scene.follow(first, user("In passing:"), tools=TOOLS, side_call=True)
    scene.follow(fork, user("more"), tools=TOOLS)
    assert main_line(scene) == [0], "which nothing else extends"
    scene.follow(first, user("Go on"), tools=TOOLS)
    assert main_line(scene) == [3]
    scene.turn([SYSTEM, user("Review.")], tools=TOOLS, side_call=True)
    assert main_line(scene) == [3]


def test_what_is_trained_in_all_is_what_each_sample_trains_together() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=3)
    leaves = [scene.follow(first, user(f"{number}"), dropped=drop) for number, drop in enumerate((1, 0, 1, 0))]
    for some in (leaves, leaves[:1], leaves[::-1], [*leaves, first], [first], [], [leaves[0], leaves[0]]):
        plans = trained_elsewhere(some)
        for leaf, plan in zip(some, plans, strict=True):
            if some.count(leaf) == 1:
                assert trained_before(some, leaf) == plan
        masks = [line_trajectory(leaf.line(), elsewhere=plan).loss_mask for leaf, plan in zip(some, plans, strict=True)]
        assert trained_tokens(some) == sum(int(mask.sum()) for mask in masks)
    assert trained_before(leaves[:2], leaves[3])[first] == 3


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


def two_turns(scene: Scene) -> Turn:
    """3 given, 4 sampled, of which the last is dropped, 5 given, 2 sampled: [0,3) [3,6) [6,11) [11,13)."""
    first = scene.turn(START, sampled=4)
    return scene.follow(first, user("b"), given=5, dropped=1, sampled=2)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ([], "must be a JSON object"),
        ({"formt": "json"}, "unknown field 'formt'"),
        ({"format": "pickle"}, "format must be one of"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"max_seq_len": True}, "max_seq_len"),
        ({"metadata": []}, "metadata must be an object"),
        ({"build": "snapshot"}, "build must be one of concat, last_step"),
        ({"mask": [["last_turn"]]}, "mask must be"),
    ],
)
def test_a_request_that_is_not_understood_is_refused(request_: object, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        SampleRequest.read(request_)


@pytest.mark.parametrize("length", range(PROMPT + 1, 15))
def test_rewards_stand_within_the_tokens_that_a_sample_has(length: int) -> None:
    scene = Scene()
    two_turns(scene)
    spread = [{"turn": 0, "span": [1, 4], "name": "advantage", "value": 2.0}]
    spread += [{"segment": 0, "name": "advantage", "value": 1.0}]
    scene.session.rewards.set([*spread, *({"turn": turn, "name": "reward", "value": 1.0 + turn} for turn in (0, 1))])
    (sample,) = collected(scene, max_seq_len=length, per_token=["reward", "advantage"])
    values = sample.per_token
    has = [*(place < length for place in range(13))]
    advantages = [0, 0, 0, 1.0, 2.0, 2.0, 0, 0, 0, 0, 0, 1.0, 1.0]
    assert values["advantage"].tolist() == [value for value, there in zip(advantages, has, strict=True) if there]
    rewards = {min(length, 6) - 1: 1.0, **({min(length, 13) - 1: 2.0} if length > 11 else {})}
    assert {place: values["reward"][place] for place in values["reward"].nonzero()[0].tolist()} == rewards


@pytest.mark.parametrize("length", range(PROMPT + 1, 15))
def test_a_sample_is_cut_anywhere_behind_its_prompt(length: int) -> None:
    scene = Scene()
    whole = two_turns(scene).trajectory()
    (sample,) = collected(scene, max_seq_len=length)
    arrays = (sample.tokens, sample.logprobs, sample.loss_mask, sample.weight_versions)
    assert from_arrays(*arrays) == whole[:length]
    assert sample.status == ("truncated" if length < 13 else "completed")
    assert sample.response_length == min(length, 13) - PROMPT
    assert sample.response == decode(whole.tokens[PROMPT:length].tolist())
    spans = [(turn["start"], turn["end"]) for turn in sample.metadata["turns"]]
    assert spans == [(start, min(end, length)) for start, end in ((3, 6), (11, 13)) if start < length]
    assert all(run.end <= length for run in sample.weight_versions)
