"""A session's tree: where a request's turns hang, why, and which tokens a line of turns has."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from middleware_hub.openai_session.sessions.equality import ARGUMENTS_AS_JSON, MEANING
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.messages import Message, message_bytes
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn, line_ends, line_trajectory
from miles_router.trajectory import Piece
from tests.support.sessions import STOP, SYSTEM, Scene, assistant, call, history, tool, user

START = [SYSTEM, user("Add.")]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def place(scene: Scene, messages: Sequence[Message], context: bytes = b"") -> ParentMatch:
    return scene.session.history.find_parent(messages, [context], scene.equal)


def shape(line: Sequence[Turn]) -> list[tuple[list[int], list[int]]]:
    """Given and sampled ids, turn by turn."""
    return [
        (turn.given.tokens.tolist(), [token for piece in turn.sampled for token in piece.tokens.tolist()])
        for turn in line
    ]


def test_a_first_request_is_a_root_with_all_of_its_messages() -> None:
    assert place(Scene(), START, b"tools") == ParentMatch(None, tuple(START), b"tools")


def test_a_request_hangs_under_the_turn_that_its_history_ends_with() -> None:
    scene = Scene()
    first = scene.turn(START, "ok")
    second = scene.follow(first, user("more"))
    found = place(scene, [*history(second), user("and more"), user("yet more")])
    assert found.parent is second
    assert found.appended == (user("and more"), user("yet more"))


def test_a_history_without_anything_behind_it_hangs_under_its_last_turn() -> None:
    scene = Scene()
    turn = scene.turn(START)
    assert place(scene, history(turn)) == ParentMatch(turn, (), b"")


@pytest.mark.parametrize("sent", [START, START[:1], [*START, user("more")], [*START, assistant("no"), user("more")]])
def test_a_history_without_the_held_answer_extends_nothing(sent: list[Message]) -> None:
    scene = Scene()
    scene.turn(START, "ok")
    assert place(scene, sent).parent is None


def test_of_several_turns_that_fit_the_deepest_is_taken() -> None:
    scene = Scene()
    first = scene.turn(START, "ok")
    second = scene.follow(first, user("more"), sampled=1)
    whole = scene.turn(history(second)[:-1], second.answer)  # a root would be the same history in one turn
    assert whole.parent is first
    scene.follow(first, user("else"))
    assert place(scene, [*history(second), user("x")]).parent is whole


def test_of_equal_histories_the_latest_is_taken() -> None:
    scene = Scene()
    scene.turn(START, "ok")
    again = scene.turn(START, "ok")
    assert place(scene, [*history(again), user("x")]).parent is again


def test_a_turn_of_another_context_is_not_extended() -> None:
    scene = Scene()
    plain = scene.turn(START)
    with_tools = scene.turn(START, tools=TOOLS)
    assert place(scene, history(plain)).parent is plain
    assert place(scene, history(with_tools), with_tools.context).parent is with_tools
    assert place(scene, history(plain), b"other").parent is None


def test_a_request_that_allows_no_tools_goes_on_where_they_were_shown() -> None:
    scene = Scene()
    shown = scene.turn(START, tools=TOOLS)
    last = scene.follow(shown, user("now answer"), tools=TOOLS, tool_choice="none")
    assert last.parent is shown
    assert last.context is shown.context
    assert scene.follow(last, user("go on"), tools=TOOLS).parent is last


def test_tools_that_the_prompt_does_not_show_are_no_turn_s_own() -> None:
    scene = Scene()
    plan = scene.turn(START, tools=TOOLS, tool_choice="none")
    act = scene.follow(plan, user("now act"), tools=TOOLS)
    assert (act.parent, scene.reason(act)) == (None, "changed_tools")


def test_what_equal_means_is_the_session_s_choice() -> None:
    scene = Scene(equal=ARGUMENTS_AS_JSON)
    turn = scene.turn(START, assistant("", tool_calls=[call("add", '{"a": 1}')]))
    echoed = assistant("", tool_calls=[call("add", '{"a":1}')])
    assert place(scene, [*START, echoed, tool("5")]).parent is turn


# Reasons


def test_a_first_turn_and_one_that_goes_on_have_no_reason() -> None:
    scene = Scene()
    first = scene.turn(START)
    assert [scene.reason(first), scene.reason(scene.follow(first, user("more")))] == [None, None]


def test_choices_of_one_answer_say_so() -> None:
    scene = Scene()
    roots = scene.choices(START, "a", "b", "c")
    assert [scene.reason(turn) for turn in roots] == [None, "choice", "choice"]
    inner = scene.choices([*history(roots[1]), user("more")], "a", "b")
    assert [(turn.parent, scene.reason(turn)) for turn in inner] == [(roots[1], None), (roots[1], "choice")]


def test_the_same_request_again_is_a_retry() -> None:
    scene = Scene()
    first = scene.turn(START, "a")
    assert scene.reason(scene.turn(START, "b")) == "retry"
    scene.follow(first, user("more"))
    assert scene.reason(scene.follow(first, user("more"))) == "retry"
    assert [scene.reason(turn) for turn in scene.choices(START, "c", "d")] == ["retry", "choice"]


def test_a_retry_knows_the_first_turn_of_its_request() -> None:
    scene = Scene()
    first = scene.turn(START, "a")
    other = scene.turn([SYSTEM, user("Subtract.")])
    again = [scene.turn(START, text) for text in "bc"]
    assert [
        scene.classify(first).first,
        scene.classify(other).first,
        *(scene.classify(turn).first for turn in again),
    ] == [None, None, first, first]


@pytest.mark.parametrize("depth", [0, 1])
def test_what_was_asked_before_the_other_was_answered_is_parallel(depth: int) -> None:
    scene = Scene()
    before = history(scene.turn(START)) if depth else []
    asked = [scene.ask([*before, SYSTEM, user(text)]) for text in "abb"]
    scene.time += 1
    turns = [scene.record(each, scene.generated(each, "ok"))[0] for each in asked]
    assert [scene.reason(turn) for turn in turns] == [None, "parallel", "parallel"]


def test_a_retry_is_one_whatever_else_was_under_way() -> None:
    scene = Scene()
    scene.turn(START, "a")
    other = scene.ask([SYSTEM, user("else")])
    again = scene.ask(START)
    scene.time += 1
    scene.record(other, scene.generated(other, "ok"))
    assert scene.reason(scene.record(again, scene.generated(again, "ok"))[0]) == "retry"


def test_another_message_behind_a_turn_that_has_one_is_edited_history() -> None:
    scene = Scene()
    first = scene.turn(START)
    scene.follow(first, user("more"))
    edited = scene.follow(first, user("else"))
    assert (edited.parent, scene.reason(edited)) == (first, "edited_history")


def test_an_answer_that_comes_back_changed_is_edited_history() -> None:
    scene = Scene()
    scene.turn(START, "ok")
    edited = scene.turn([*START, assistant("OK!"), user("more")])
    assert (edited.parent, scene.reason(edited)) == (None, "edited_history")


def test_tools_that_change_between_turns_say_so() -> None:
    scene = Scene()
    first = scene.turn(START)
    assert scene.reason(scene.follow(first, user("more"), tools=TOOLS)) == "changed_tools"


def test_the_first_request_again_with_other_tools_says_so() -> None:
    scene = Scene()
    scene.turn(START)
    again = scene.turn(START, tools=TOOLS)
    assert (scene.reason(again), scene.classify(again).first) == ("changed_tools", None)


def test_another_beginning_is_a_sub_agent() -> None:
    scene = Scene()
    scene.turn(START)
    assert scene.reason(scene.turn([{"role": "system", "content": "Search."}, user("Add.")])) == "sub_agent"


def test_sub_agents_at_work_together_are_sub_agents() -> None:
    scene = Scene()
    scene.turn(START)
    asked = [scene.ask([{"role": "system", "content": text}, user("a")]) for text in "ab"]
    scene.time += 1
    assert [scene.reason(scene.record(each, scene.generated(each, "ok"))[0]) for each in asked] == ["sub_agent"] * 2


def test_a_shorter_history_after_some_turns_is_a_compaction() -> None:
    scene = Scene()
    scene.follow(scene.turn(START), user("b"), user("c"))
    assert scene.reason(scene.turn([SYSTEM, user("In short: a, b, c.")])) == "compaction"


def test_a_sub_agent_s_long_history_makes_no_compaction_of_an_edit() -> None:
    scene = Scene()
    scene.turn(START)
    helper = scene.turn([{"role": "system", "content": "Search."}, user("a")])
    scene.follow(helper, user("b"), user("c"), user("d"))
    assert scene.reason(scene.turn([SYSTEM, user("Subtract.")])) == "edited_history"


def test_why_a_history_held_in_words_is_not_continued_in_tokens_is_the_reason() -> None:
    scene = Scene()
    first = scene.turn(START)
    asked = scene.ask([SYSTEM, user("x")], segment="not_text")
    assert scene.reason(first) is None
    assert scene.reason(scene.record(asked, scene.generated(asked, "ok"))[0]) == "not_text"


# What was changed


def test_the_first_message_that_was_edited_is_shown_with_its_field_and_both_texts() -> None:
    scene = Scene()
    scene.follow(scene.turn(START, "The sum is " + "5" * 300), user("b"))
    edited = scene.turn([*START, assistant("The sum is " + "5" * 299 + "6"), user("b")])
    assert scene.edit(edited) is not None
    held, sent = scene.edit(edited)["held"], scene.edit(edited)["sent"]
    assert (scene.edit(edited)["message"], scene.edit(edited)["field"]) == (2, "content")
    assert (held, sent) == ("…" + "5" * 41, "…" + "5" * 40 + "6")


def test_what_is_shown_of_an_edit_is_bounded() -> None:
    scene = Scene()
    scene.turn(START, "x" * 100_000)
    edited = scene.turn([*START, assistant("y" * 100_000), user("b")])
    assert scene.edit(edited) == {"message": 2, "field": "content", "held": "x" * 160 + "…", "sent": "y" * 160 + "…"}


def test_an_edit_behind_a_held_turn_counts_the_messages_before_it() -> None:
    scene = Scene()
    first = scene.turn(START)
    scene.follow(first, user("more"), user("and more"))
    edited = scene.follow(first, user("more"), user("else"))
    assert scene.edit(edited) == {"message": 4, "field": "content", "held": "and more", "sent": "else"}


def test_messages_that_were_left_out_and_added_ones_are_edits_of_none() -> None:
    scene = Scene()
    scene.follow(scene.turn(START), user("b"))
    shorter = scene.turn(START[:1])
    assert (scene.reason(shorter), scene.edit(shorter) and scene.edit(shorter)["sent"]) == ("compaction", None)
    assert scene.edit(shorter) is not None
    assert (scene.edit(shorter)["message"], scene.edit(shorter)["field"]) == (1, "message")


def test_a_compaction_shows_where_it_departs() -> None:
    scene = Scene()
    scene.follow(scene.turn(START), user("b"), user("c"))
    edit = scene.edit(scene.turn([SYSTEM, user("In short: a, b, c.")]))
    assert edit == {"message": 1, "field": "content", "held": "Add.", "sent": "In short: a, b, c."}


def test_a_first_message_that_changes_under_the_same_question_is_shown() -> None:
    scene = Scene()
    scene.turn([{"role": "system", "content": "It is 10:01."}, user("Add.")])
    later = scene.turn([{"role": "system", "content": "It is 10:02."}, user("Add.")])
    assert (scene.reason(later), scene.edit(later)) == (
        "sub_agent",
        {"message": 0, "field": "content", "held": "It is 10:01.", "sent": "It is 10:02."},
    )
    assert scene.edit(scene.turn([{"role": "system", "content": "Search."}, user("Find.")])) is None


def test_tools_and_settings_that_change_are_shown() -> None:
    scene = Scene()
    first = scene.turn(START, tools=TOOLS)
    less = scene.follow(first, user("more"), tools=[])
    assert scene.edit(less) is not None
    assert (scene.edit(less)["field"], scene.edit(less)["sent"]) == ("tools", None)
    assert "add" in scene.edit(less)["held"]
    other = scene.follow(first, user("more"), tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    assert scene.edit(other) is not None
    assert (scene.edit(other)["field"], scene.edit(other)["sent"]) == (
        "chat_template_kwargs",
        '{"enable_thinking":false}',
    )


def test_what_was_not_changed_shows_no_edit() -> None:
    scene = Scene()
    first = scene.turn(START, "a")
    turns = [first, scene.follow(first, user("b")), scene.turn(START, "c"), *scene.choices(START, "d", "e")]
    assert [scene.edit(turn) for turn in turns] == [None] * 5


# Work


class Counted:
    """An equality that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, held: Message, sent: Message) -> bool:
        self.asked += 1
        return MEANING(held, sent)


def respelled(messages: Sequence[Message]) -> list[Message]:
    """As another library writes answers."""
    return [{**m, "refusal": None} if m["role"] == "assistant" else {**m} for m in messages]


def test_a_spelling_that_comes_back_each_time_is_read_once() -> None:
    equal = Counted()
    scene = Scene(equal=equal)
    turn = scene.turn(START)
    for number in range(50):
        turn = scene.turn([*respelled(history(turn)), user(f"{number}")])
    assert len(scene.session.roots) == 1
    assert equal.asked <= 50


def test_edited_history_is_walked_once_and_not_once_per_root() -> None:
    equal = Counted()
    scene = Scene(equal=equal)
    before = [SYSTEM, *(user(f"{number}") for number in range(100))]
    counts = []
    for number in range(60):
        scene.turn([*before, user(f"note {number}"), user("go on")])
        counts.append(equal.asked)
        equal.asked = 0
    assert len(scene.session.roots) == 60
    assert counts[-1] <= 10 * len(counts)


# Tokens


def test_a_line_s_tokens_are_what_was_given_and_sampled_turn_by_turn() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2)
    second = scene.follow(first, user("b"), given=3, sampled=1)
    line = second.line()
    assert [id(turn) for turn in line] == [id(first), id(second)]
    assert second.trajectory().tokens.tolist() == [token for turn in shape(line) for part in turn for token in part]
    assert (first.prompt_tokens, first.tokens) == (3, 5)
    assert (second.prompt_tokens, second.tokens) == (8, 9)
    assert line_ends(line) == [5, 9]
    assert second.trajectory().loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]


def test_a_dropped_token_is_in_no_line_through_the_turn_that_dropped_it() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2)
    kept, dropped = scene.follow(first, user("b"), sampled=1), scene.follow(first, user("c"), dropped=1, sampled=1)
    (given, (sampled, stop)), own, other = *shape([first]), *shape([dropped]), *shape([kept])
    assert dropped.trajectory().tokens.tolist() == [*given, sampled, *own[0], *own[1]]
    assert kept.trajectory().tokens.tolist() == [*given, sampled, stop, *other[0], *other[1]]
    assert first.trajectory().tokens.tolist() == [*given, sampled, stop]
    assert (dropped.prompt_tokens, dropped.tokens, line_ends(dropped.line())) == (6, 7, [4, 7])


def test_a_drop_can_take_whole_pieces() -> None:
    scene = Scene()
    first = scene.turn(START, sampled=2, versions=[("1", 0, 1), ("2", 1, 2)])
    second = scene.follow(first, user("c"), dropped=1, sampled=1)
    assert [tuple(run) for run in second.trajectory().weight_versions] == [("1", 3, 4), ("1", 6, 7)]
    longer = scene.turn(START, sampled=3, versions=[("1", 0, 1), ("2", 1, 3)])
    assert len(scene.follow(longer, user("c"), dropped=3, given=0, sampled=1).trajectory()) == 3 + 1


@pytest.mark.parametrize("elsewhere", range(4))
def test_tokens_that_another_sample_trains_are_out_of_the_loss(elsewhere: int) -> None:
    scene = Scene()
    turn = scene.turn(START, sampled=3, versions=[("1", 0, 2), ("2", 2, 3)])
    found = line_trajectory([turn], elsewhere={turn: elsewhere})
    assert found.loss_mask.tolist() == [0, 0, 0, *([0] * elsewhere), *([1] * (3 - elsewhere))]
    plain = turn.trajectory()
    assert found.tokens.tolist() == plain.tokens.tolist()
    assert found.logprobs.tolist() == plain.logprobs.tolist()
    assert found.weight_versions == plain.weight_versions


def test_the_last_token_of_a_turn_without_any_is_none() -> None:
    scene = Scene()
    asked = scene.ask(START)
    (turn,) = scene.record(asked, scene.generated(asked, "", sampled=0, stop=False, finish="abort"))
    assert (turn.last_id, turn.tokens, turn.ended_itself) == (None, 3, False)
    after = scene.follow(turn, user("b"), sampled=1)
    assert (after.parent, after.tokens, after.last_id) == (turn, 6, STOP)


def test_leaves_are_the_turns_that_nothing_extends_in_their_order() -> None:
    scene = Scene()
    first = scene.turn(START)
    alone = scene.turn([SYSTEM, user("x")])
    second = scene.follow(first, user("b"))
    assert [id(leaf) for leaf in scene.session.leaves()] == [id(alone), id(second)]
    assert [turn.number for turn in scene.session.turns] == [0, 1, 2]
    assert {turn.number for turn in scene.session.history.descendants(first)} == {0, 2}


# Memory


def copied(messages: Sequence[Message]) -> list[Message]:
    """As a parser gives them: equal, and other objects."""
    return [{**message} for message in messages]


def test_a_message_that_is_sent_again_is_stored_once() -> None:
    scene = Scene()
    first = scene.turn(copied(START), "a")
    retry = scene.turn(copied(START), "b")
    edited = scene.turn([*copied(START), assistant("no"), user("c")])
    moved = scene.turn([*copied(START), assistant("no"), user("c")], tools=TOOLS)
    for turn in (retry, edited, moved):
        assert [id(one) for one in turn.appended[:2]] == [id(one) for one in first.appended]
    assert [id(one) for one in moved.appended] == [id(one) for one in edited.appended]


def test_held_messages_are_counted_when_they_are_new() -> None:
    session = Session("s", now=0.0, clock=0.0)
    held, nbytes = session.history.intern(ParentMatch(None, tuple(copied(START)), b"context"))
    assert nbytes > len(b"context") + sum(len(str(message["content"])) for message in START)
    again, nothing = session.history.intern(ParentMatch(None, tuple(copied(START)), bytes(bytearray(b"context"))))
    assert nothing == 0
    assert again.context is held.context
    assert session.history.intern(ParentMatch(None, (*copied(START), user("b")), b"context"))[1] == message_bytes(
        user("b")
    )


def test_a_long_line_s_tokens_take_time_in_proportion_to_it() -> None:
    def seconds(turns: int) -> float:
        """Of this thread's, whatever the machine does beside it."""
        session = Session("s", now=0.0, clock=0.0)
        turn: Turn | None = None
        for number in range(turns):
            given, sampled = Piece.given([number]), Piece.sampled([1], [-1.0], "1")
            turn = Turn("/", turn, (), b"", user("x"), given, 0, (sampled,), "stop", True, number)
            session.history.append(turn)
        assert turn is not None
        began = time.thread_time()
        assert len(turn.trajectory()) == 2 * turns
        return time.thread_time() - began

    small, large = (min(seconds(turns) for _ in range(3)) for turns in (400, 4000))
    assert large < 40 * small


def test_a_cleared_session_s_turns_are_gone_without_the_garbage_collector() -> None:
    scene = Scene()
    first = scene.turn(START)
    second = scene.follow(first, user("b"))
    gone = [weakref.ref(turn) for turn in (first, second)]
    gc.disable()
    try:
        scene.session.replies["t"] = None
        scene.session.clear()
        assert (scene.session.turns, scene.session.roots, scene.session.replies) == ([], [], {})
        everything = ParentMatch(None, tuple(copied(START)), b"")
        assert scene.session.history.intern(everything) == Session("new", now=0.0, clock=0.0).history.intern(everything)
        assert second.parent is first, "a request in flight keeps what it extends"
        del first, second
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_recorded_turn_cannot_be_changed() -> None:
    turn: Any = Scene().turn(START)
    with pytest.raises(FrozenInstanceError):
        turn.rows = {}


def test_a_turn_is_shown_without_its_tree() -> None:
    scene = Scene()
    turn = scene.turn(START, "the first answer")
    for number in range(sys.getrecursionlimit() // 10):
        turn = scene.follow(turn, user(f"{number}"), sampled=1)
    assert "the first answer" not in repr(turn)


# Answers that nobody recorded


def test_only_a_history_with_an_unrecorded_answer_is_marked() -> None:
    scene = Scene()
    first = scene.turn([SYSTEM, user("Add.")], "5")
    second = scene.follow(first, user("Again."))
    edited = scene.turn([SYSTEM, user("Add!"), first.answer, user("Go on")])
    assert not any(scene.classify(turn).unrecorded for turn in (first, second, edited))
    begun_anew = scene.turn([SYSTEM, user("Multiply."), assistant("6"), user("Again.")])
    appended = scene.follow(second, user("And?"), assistant("of its own"), user("Go on"))
    assert scene.classify(begun_anew).unrecorded
    assert scene.classify(appended).unrecorded
    assert not scene.classify(scene.follow(begun_anew, user("Go on"))).unrecorded  # the turn before says it
    assert scene.store.statistics.unrecorded_history == 2


def test_an_answer_is_the_recorded_one_however_an_agent_spells_it() -> None:
    scene = Scene()
    first = scene.turn(
        [SYSTEM, user("Add.")], assistant("", tool_calls=[call("add", '{"a": 1}')], reasoning_content="hm")
    )
    again = assistant([{"type": "text", "text": ""}], tool_calls=[call("add", '{"a":1}', "other")])  # type: ignore[arg-type]
    assert first.answer != again
    assert not scene.classify(scene.turn([user("Sum up."), again, tool("1", "other")])).unrecorded
    assert scene.classify(scene.turn([user("Sum up."), assistant("", tool_calls=[call("sub")]), tool("1")])).unrecorded
