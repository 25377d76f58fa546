"""How a session ends: which end may replace which, what its records name, and that a row restores it."""

from __future__ import annotations

import pytest

from middleware_hub.openai_session.episodes.contract import (
    FORGOTTEN,
    NEXT,
    SPENT,
    STOPPED,
    SessionEnd,
    SessionStatus,
    restored_end,
)

ENDS = [status for status in SessionStatus if status is not SessionStatus.OPEN]


def ended(*ends: str) -> SessionEnd:
    state = SessionEnd()
    for end in ends:
        state = state.after(SessionStatus(end))
    return state


@pytest.mark.parametrize(
    ("ends", "status", "reason"),
    [
        (("turns",), "turns", "turns"),
        (("budget_tokens", "turns"), "budget_tokens", "budget_tokens"),
        (("context", "budget_tokens"), "budget_tokens", "budget_tokens"),
        (("context", "context"), "context", "context"),
        (("context", "finalized"), "finalized", "context"),
        (("budget_tokens", "aborted"), "aborted", "budget_tokens"),
        (("deadline", "aborted"), "aborted", "deadline"),
        (("deadline", "turns"), "deadline", "deadline"),
        (("finalized", "aborted"), "finalized", "finalized"),
        (("finalized", "deleted"), "deleted", "finalized"),
        (("expired", "deleted"), "expired", "expired"),
        (("discarded", "deleted"), "discarded", "deleted"),
    ],
)
def test_a_later_end_replaces_an_earlier_one_as_the_table_says(ends: tuple[str, ...], status: str, reason: str) -> None:
    state = ended(*ends)
    assert (state.status.value, state.reason) == (status, reason)


def test_a_recorded_turn_reopens_a_full_context_and_nothing_else() -> None:
    assert ended("context").reopened() == SessionEnd()
    assert ended("context", "finalized").reopened() == SessionEnd(SessionStatus.FINALIZED)
    for end in ENDS[1:]:
        assert SessionEnd(end, end).reopened() == SessionEnd(end, end)


def test_every_status_has_a_row_in_the_table_and_forgotten_ones_are_last() -> None:
    assert NEXT.keys() == set(SessionStatus)
    assert [status for status, following in NEXT.items() if not following] == [*FORGOTTEN]


@pytest.mark.parametrize("first", [end for end in ENDS if not end.is_forgotten])
@pytest.mark.parametrize("second", [end for end in ENDS if not end.is_forgotten])
def test_what_a_row_says_restores_the_end(first: SessionStatus, second: SessionStatus) -> None:
    state = SessionEnd().after(first).after(second)
    finalized = state.status is SessionStatus.FINALIZED
    assert restored_end(state.reason, state.stopped_by, finalized=finalized) == state


def test_a_row_that_names_no_status_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        restored_end("nonsense", None, finalized=False)


#: The later a status stands here, the less may follow it.
RANKS = [(SessionStatus.OPEN, SessionStatus.CONTEXT), SPENT, STOPPED, (SessionStatus.FINALIZED,), FORGOTTEN]
TURN_RECORDED: None = None


def rank(status: SessionStatus) -> int:
    return next(number for number, statuses in enumerate(RANKS) if status in statuses)


def after(state: SessionEnd, event: SessionStatus | None) -> SessionEnd:
    return state.reopened() if event is TURN_RECORDED else state.after(event)


def test_no_order_of_ends_and_turns_takes_back_an_end_or_its_cause() -> None:
    known, walk = {SessionEnd()}, [SessionEnd()]
    for before in walk:  # each state that any events lead to, and each event
        for event in (*ENDS, TURN_RECORDED):
            state = after(before, event)
            assert rank(state.status) >= rank(before.status), (before, event)
            assert event is TURN_RECORDED or rank(event) <= rank(state.status), (before, event)
            assert state.cause is before.cause or before.cause in (None, SessionStatus.CONTEXT), (before, event)
            assert state.status in (before.status, event, SessionStatus.OPEN), (before, event)
            if state not in known:
                known.add(state)
                walk.append(state)
    assert {state.status for state in known} == set(SessionStatus)
