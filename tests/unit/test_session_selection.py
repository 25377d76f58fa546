"""Which leaves become samples, and in which of them each token is trained."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.selection import (
    Selection,
    side_calls,
    trained_before,
    trained_elsewhere,
    trained_tokens,
)
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn, line_trajectory
from miles_router.errors import BadRequest, ConfigError
from tests.support.sessions import SYSTEM, Scene, system, user

START = [SYSTEM, user("Add.")]
TITLE = [system("Write a title."), user("Add.")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
HERE = __name__


def first_root(session: Session) -> Sequence[Turn]:
    return session.roots[:1]


def everything(session: Session) -> Sequence[Turn]:
    return session.turns


def of_another_session(session: Session) -> Sequence[Turn]:
    return [Scene().turn(START)]


def selected(scene: Scene, policy: object = "all", allowed: Sequence[str] = (), *, aside: bool = True) -> list[int]:
    without = () if aside else side_calls(scene.session)
    return [leaf.number for leaf in Selection(allowed).leaves(scene.session, policy, without=without)]


def test_every_leaf_the_last_and_those_that_no_retry_superseded() -> None:
    scene = Scene()
    first = scene.turn(START, "a")
    scene.turn(START, "b")
    scene.turn(START, "c")
    scene.follow(first, user("more"))
    assert selected(scene) == [1, 2, 3]
    assert selected(scene, "last") == [3]
    assert selected(scene, "drop-superseded") == [2, 3]


def test_a_session_without_turns_has_no_leaves() -> None:
    for policy in ("all", "last", "drop-superseded"):
        assert selected(Scene(), policy) == []


def test_a_retry_supersedes_its_own_request_alone() -> None:
    scene = Scene()
    scene.turn(START)
    scene.turn([{"role": "system", "content": "Search."}, user("a")])
    scene.turn([{"role": "system", "content": "Search."}, user("a")])
    assert [scene.reason(turn) for turn in scene.session.turns] == [None, "sub_agent", "retry"]
    assert selected(scene, "drop-superseded") == [0, 2]


def test_a_retry_inside_a_branch_supersedes_its_sibling() -> None:
    scene = Scene()
    first = scene.turn(START)
    for text in ("b", "c", "b", "b"):
        scene.follow(first, user(text))
    assert selected(scene, "drop-superseded") == [2, 4]


def test_choices_of_one_answer_are_superseded_together() -> None:
    scene = Scene()
    scene.choices(START, "a", "b")
    assert selected(scene, "drop-superseded") == [0, 1]
    scene.choices(START, "c", "d")
    assert selected(scene, "drop-superseded") == [2, 3]


def test_parallel_answers_supersede_nothing() -> None:
    scene = Scene()
    asked = [scene.ask(START) for _ in range(2)]
    scene.time += 1
    for each in asked:
        scene.record(each, scene.generated(each, "ok"))
    assert selected(scene, "drop-superseded") == [0, 1]


def test_the_operator_s_own_policy_is_named_by_its_path() -> None:
    scene = Scene()
    scene.follow(scene.turn(START), user("b"))
    assert selected(scene, f"{HERE}.first_root", [f"{HERE}.first_root"]) == [0]


# The main line and side calls


def main_line(scene: Scene) -> list[int]:
    return selected(scene, aside=False)


def test_what_has_another_first_message_is_a_side_call() -> None:
    scene = Scene()
    first = scene.turn(START)
    scene.turn(TITLE)
    scene.follow(first, user("more"))
    assert selected(scene) == [1, 2]
    assert main_line(scene) == [2]


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


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_a_remark_at_the_first_question_leaves_the_main_line_whole(tools: list[dict[str, object]] | None) -> None:
    scene = Scene()
    first = scene.turn([user("Add.")], tools=tools)
    second = scene.follow(first, user("more"), tools=tools, sampled=20)
    rewritten = [user("Add. Be brief."), first.answer, user("more"), second.answer, user("and")]
    turn = scene.turn(rewritten, tools=tools)
    scene.follow(turn, user("again"), tools=tools)
    assert (scene.reason(turn), scene.edit(turn) and scene.edit(turn)["message"]) == ("edited_history", 0)
    assert main_line(scene) == selected(scene) == [1, 3]


def test_another_first_question_without_recorded_answers_is_another_conversation() -> None:
    scene = Scene()
    scene.turn([user("Add.")], "a", tools=TOOLS, sampled=20)
    assert scene.reason(scene.turn([user("Search.")], "b", tools=TOOLS)) == "sub_agent"
    foreign = {"role": "assistant", "content": "never recorded"}
    assert scene.reason(scene.turn([user("Look."), foreign, user("On.")], "c", tools=TOOLS)) == "sub_agent"
    assert main_line(scene) == [0]


def test_without_tools_the_main_line_has_the_most_turns() -> None:
    scene = Scene()
    scene.turn(TITLE)
    first = scene.turn(START)
    assert main_line(scene) == [0], "of equal ones the first"
    scene.follow(first, user("more"))
    assert main_line(scene) == [2]


def test_segments_of_the_main_line_are_no_side_calls() -> None:
    scene = Scene()
    first = scene.turn(START, tools=TOOLS)
    second = scene.follow(first, user("more"), tools=TOOLS)
    scene.turn([SYSTEM, user("So far: much.")], tools=TOOLS)
    scene.follow(second, user("and"), tools=[*TOOLS, *TOOLS])
    scene.turn(START, tools=TOOLS)
    assert [scene.reason(turn) for turn in scene.session.turns] == [None, None, "compaction", "changed_tools", "retry"]
    assert main_line(scene) == selected(scene) == [1, 2, 3, 4]


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


def test_an_agent_of_nothing_but_side_calls_has_no_main_line() -> None:
    scene = Scene()
    scene.turn(START, tools=TOOLS, side_call=True)
    assert (main_line(scene), selected(scene)) == ([], [0])


def test_policies_choose_among_what_is_left_without_side_calls() -> None:
    scene = Scene()
    scene.turn(START, tools=TOOLS)
    scene.turn(START, tools=TOOLS)
    scene.turn(TITLE)
    own = f"{HERE}.everything"
    assert selected(scene, own, [own]) == [0, 1, 2]
    assert [selected(scene, policy, [own], aside=False) for policy in ("last", "drop-superseded", own)] == [
        [1],
        [1],
        [0, 1],
    ]


@pytest.mark.parametrize("policy", ["some", f"{HERE}.first_root", None, 3, ["all"], {}])
def test_a_policy_that_may_not_be_named_is_refused(policy: object) -> None:
    with pytest.raises(BadRequest, match="branches must be one of all, last, drop-superseded"):
        selected(Scene(), policy)


def test_a_policy_that_cannot_be_loaded_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="branch_policies"):
        Selection([f"{HERE}.nothing"])


def test_a_policy_selects_turns_of_its_session_alone() -> None:
    scene = Scene()
    scene.turn(START)
    with pytest.raises(UnusableSample, match="leaves_of_the_session"):
        selected(scene, f"{HERE}.of_another_session", [f"{HERE}.of_another_session"])


def test_a_shared_turn_is_trained_in_the_first_sample_that_has_it() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=3)
    leaves = [scene.follow(first, user(text), sampled=2) for text in "bc"]
    one, other = trained_elsewhere(leaves)
    assert one == {first: 0, leaves[0]: 0}
    assert other == {first: 3, leaves[1]: 0}


def test_stop_token_dropped_by_one_sample_is_trained_in_the_next() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=3)
    leaves = [scene.follow(first, user(f"{number}"), dropped=drop) for number, drop in enumerate((1, 0, 1, 0))]
    assert [plan[first] for plan in trained_elsewhere(leaves)] == [0, 2, 3, 3]


def test_a_leaf_selected_twice_is_trained_once() -> None:
    scene = Scene()
    leaf = scene.turn(START, sampled=3)
    assert [plan[leaf] for plan in trained_elsewhere([leaf, leaf])] == [0, 3]


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
