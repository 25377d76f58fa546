"""What is kept of the last turns changes nothing: ids are written as they are, and no more is kept than there is room
for."""

from __future__ import annotations

import orjson
import pytest

from middleware_hub.openai_session.sessions.agent_request import PromptIds
from middleware_hub.openai_session.sessions.recent import WrittenIds
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.trajectory import Piece
from tests.support.sessions import SYSTEM, Scene, history, user

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
    written = WrittenIds(max_bytes=100)
    text = b"[" + b",".join([b"1"] * 30), b"]"
    for name in ("a", "b", "a", "c"):
        written.keep(name, first, text)
        assert written.nbytes <= 100
    size = written.nbytes
    written.forget("b")
    assert written.nbytes == size
    written.forget("c")
    assert written.nbytes == 0
    written.keep("d", first, (text[0] * 2, b"]"))
    assert written.nbytes == 0


def test_turns_are_written_as_they_are_whichever_way_a_session_goes() -> None:
    scene, turns = line(2)
    branch = scene.turn([*history(turns[0]), user("other")])
    for parent in (branch, turns[1], turns[0], branch):
        wanted = prompt(parent, 3, 4)
        assert orjson.loads(b"".join(scene.store.written_ids.prompt(scene.session.id, wanted))) == wanted.ids().tolist()


# Requests
