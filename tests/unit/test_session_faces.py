"""Faces: where a request of each API hangs in its session's tree, and which ids the engine is given for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from middleware_hub.openai_session.continuing.continuation import Continuation, Extension, HeldEnd, NotAppendOnly
from middleware_hub.openai_session.continuing.roles import Roles
from middleware_hub.openai_session.continuing.templates import Renderer
from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces import FACES
from middleware_hub.openai_session.faces.chat import ChatFace
from middleware_hub.openai_session.faces.completions import CONTEXT, CompletionsFace
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.equality import STRICT
from middleware_hub.openai_session.sessions.prompting import Context
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.openai_session.turns.plan import TurnGrant, TurnPlan
from miles_router.errors import BadRequest
from miles_router.trajectory.rows import ROUTED_EXPERTS
from tests.support.sessions import SYSTEM, Scene, history, user
from tests.support.waiting import at_once
from tests.unit.test_completions_endpoint import COMPLETIONS, answer, choice

START = [SYSTEM, user("Hi")]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


class Template:
    """A chat template that writes the words of every message."""

    def render(self, messages: Sequence[Any], *_: object, **__: object) -> str:
        return "".join(str(message["content"]) for message in messages)


class Rendering:
    """A continuation that gives two ids and notes what it renders with; or refuses for a reason."""

    writes_ids = True

    def __init__(self, refusal: str | None = None) -> None:
        self.tools: Sequence[Any] | None = None
        self.settings: Mapping[str, Any] | None = None
        self._refusal = refusal
        self.roles = Roles(cast(Renderer, Template()))

    def readable(self, messages: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
        return messages, []

    def same_id(self, held: object, sent: object) -> bool:
        return held == sent

    async def after(self, turn: HeldEnd, appended: Sequence[Any], context: Context) -> Extension:
        if self._refusal is not None:
            raise NotAppendOnly(self._refusal)
        self.tools, self.settings = context.tools, context.template_kwargs
        return Extension(1, np.array([7, 8], dtype=np.int32))


def chat_turn(scene: Scene, messages: object, rendering: Rendering | None = None, **fields: Any) -> AgentRequest:
    face = ChatFace(cast(Continuation, rendering or Rendering()), STRICT)
    return at_once(face.turn(scene.session, {"messages": messages, **fields}, now=scene.time))


def test_each_api_has_a_path_of_its_own() -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
    assert [face.path for face in FACES] == paths


# Chat


@pytest.mark.parametrize("request_body", [[], {}, {"messages": []}, {"messages": [{"content": "Hi"}]}])
def test_what_is_no_chat_request_is_refused(request_body: object) -> None:
    with pytest.raises(BadRequest):
        at_once(ChatFace(cast(Continuation, Rendering()), STRICT).turn(Scene().session, request_body, now=0.0))


def test_a_first_turn_goes_as_messages() -> None:
    turn = chat_turn(Scene(), START, stream=True, n=2)
    assert (turn.places[0].parent, turn.prompt, turn.segment) == (None, None, None)
    assert turn.held_rows(ROUTED_EXPERTS) is None
    assert (turn.path, turn.stream, turn.has_several_choices) == ("/v1/chat/completions", True, True)


def test_turn_behind_a_held_one_gets_held_ids_and_what_the_template_appends() -> None:
    scene = Scene()
    first = scene.turn(START)
    turn = chat_turn(scene, [*history(first), user("more")])
    assert turn.prompt is not None
    held = first.trajectory().tokens.tolist()
    assert (turn.prompt.kept, turn.prompt.length, turn.prompt.dropped) == (len(held) - 1, len(held) + 1, 1)
    assert turn.prompt.ids().tolist() == [*held[:-1], 7, 8]
    assert turn.places[0].parent is first
    assert (turn.stream, turn.has_several_choices) == (False, False)


@pytest.mark.parametrize(
    ("fields", "segment"),
    [
        ({"input_ids": [1]}, "own_input_ids"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_history_that_cannot_be_continued_in_ids_is_a_root_by_name(fields: Mapping[str, Any], segment: str) -> None:
    scene = Scene()
    messages = [*history(scene.turn(START)), user("more")]
    turn = chat_turn(scene, messages, **fields)
    assert (turn.prompt, turn.segment, turn.places[0].parent) == (None, segment, None)
    assert turn.places[0].appended == tuple(messages)


def test_settings_that_the_engine_refuses_in_its_own_words_are_not_read_here() -> None:
    scene = Scene()
    first = scene.turn(START, chat_template_kwargs=[1])
    turn = chat_turn(scene, [*history(first), user("more")], chat_template_kwargs=[1])
    assert (turn.prompt, turn.segment) == (None, "invalid_chat_template_kwargs")


def test_what_the_template_cannot_append_and_parts_that_are_no_text_are_roots_too() -> None:
    scene = Scene()
    before = history(scene.turn(START))
    turn = chat_turn(scene, [*before, user("more")], Rendering("the template says no"))
    assert (turn.prompt, turn.segment) == (None, "the template says no")
    other = {"role": "user", "content": [{"type": "tool_reference", "name": "add"}]}
    assert chat_turn(scene, [*before, other]).segment == "not_text"


@pytest.mark.parametrize(
    "kind", ["image_url", "input_image", "image", "input_audio", "video_url", "file", "input_file"]
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_more_than_words_is_refused_by_its_name(kind: str, role: str) -> None:
    message = {"role": role, "content": [{"type": "text", "text": "See:"}, {"type": kind}]}
    with pytest.raises(BadRequest, match=rf"messages\[2\]: '{kind}' is not text, and a session records text only"):
        chat_turn(Scene(), [*START, message])


def behind(rendering: Rendering, first: Mapping[str, Any], second: Mapping[str, Any]) -> AgentRequest:
    """A turn asked with some fields, behind one that was asked with others."""
    scene = Scene()
    return chat_turn(scene, [*history(scene.turn(START, **first)), user("more")], rendering, **second)


def test_what_reasoning_means_for_the_template_is_told_as_the_engine_reads_it() -> None:
    rendering = Rendering()
    assert behind(rendering, {"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}).prompt is not None
    assert rendering.settings == {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}


@pytest.mark.parametrize("effort", ["high", 0, None])
def test_a_turn_with_other_template_settings_continues_none(effort: object) -> None:
    assert behind(Rendering(), {"reasoning_effort": "none"}, {"reasoning_effort": effort}).prompt is None
    assert effort is None or behind(Rendering(), {}, {"reasoning_effort": effort}).prompt is None


@pytest.mark.parametrize(("tool_choice", "shown"), [("auto", TOOLS), ("none", None), (TOOLS[1], TOOLS[1:])])
def test_a_turn_is_rendered_with_the_tools_that_the_held_one_was_rendered_with(
    tool_choice: object, shown: object
) -> None:
    rendering, fields = Rendering(), {"tools": TOOLS, "tool_choice": tool_choice}
    assert behind(rendering, fields, fields).prompt is not None
    assert rendering.tools == shown
    assert behind(rendering, {"tools": TOOLS}, fields).prompt is not None
    assert rendering.tools == TOOLS


# Completions


def completion(scene: Scene, request: object) -> AgentRequest:
    face = CompletionsFace(cast(Continuation, None), STRICT)
    return at_once(face.turn(scene.session, request, now=scene.time))


def asked_for(scene: Scene, prompt: object, **fields: Any) -> AgentRequest:
    return completion(scene, {"prompt": prompt, **fields})


def turns(scene: Scene, prompt: object, *choices: dict[str, Any], **fields: Any) -> list[Turn]:
    request = asked_for(scene, prompt, **fields)
    scene.time += 1
    return scene.record(TurnPlan(request, TurnGrant(request.fields)), *COMPLETIONS.choices(answer(*choices)))


def ids_of(turn: Turn) -> list[int]:
    ids: list[int] = turn.trajectory().tokens.tolist()
    return ids


@pytest.mark.parametrize("parsed", [[], {}, {"prompt": None}, {"prompt": 3}, {"prompt": {}}])
def test_a_request_without_a_prompt_is_refused(parsed: object) -> None:
    with pytest.raises(BadRequest):
        completion(Scene(), parsed)


def test_a_text_is_a_root_whose_ids_the_engine_tells() -> None:
    scene = Scene()
    asked = asked_for(scene, "Hello")
    assert (asked.places[0].parent, asked.prompt, len(asked.places)) == (None, None, 1)
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
    assert (scene.reason(second), scene.recorder.statistics.reused_tokens, scene.recorder.statistics.given_tokens) == (
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
    assert asked_for(scene, [5, 6, 7, 8, 9, 1]).places[0].parent is second
    assert asked_for(scene, [5, 6, 7, 8]).places[0].parent is shallow
    assert asked_for(scene, [5, 6, 2]).places[0].parent is first
    assert asked_for(scene, [5, 7]).places[0].parent is None


def test_of_turns_with_equal_ids_the_latest_is_extended() -> None:
    scene = Scene()
    turns(scene, [5], choice(ids=[6], prompt=[5]))
    (again,) = turns(scene, [5], choice(ids=[6], prompt=[5]))
    assert scene.reason(again) == "retry"
    assert asked_for(scene, [5, 6, 7]).places[0].parent is again


def test_a_chat_turn_is_not_extended_by_a_completion_nor_the_other_way_round() -> None:
    scene = Scene()
    chat = scene.turn([SYSTEM, user("a")])
    assert asked_for(scene, [*ids_of(chat), 1]).places[0].parent is None
    (completion,) = turns(scene, "x", choice())
    messages = [{"role": "prompt", "content": "x"}, completion.answer, user("b")]
    assert scene.session.history.find_parent(messages, [b""], scene.equal).parent is None


@pytest.mark.parametrize("prompt", [[], ["a", "b"], [[1, 2], [3]]])
def test_prompts_that_are_no_ids_extend_nothing(prompt: list[Any]) -> None:
    scene = Scene()
    turns(scene, [1], choice(ids=[2], prompt=[1]))
    asked = asked_for(scene, prompt)
    assert (asked.places[0].parent, asked.prompt) == (None, None)


@pytest.mark.parametrize("prompt", [[-1], [2**40], [1, True], [1.5], [3, "a"], [None], [{}], [[1], [-1]], [["a"], "b"]])
def test_prompts_that_are_neither_texts_nor_ids_are_refused(prompt: list[Any]) -> None:
    with pytest.raises(BadRequest, match="prompt"):
        asked_for(Scene(), prompt)


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
    assert (more.parent, scene.reason(more)) == (None, "text_prompt")
    assert scene.reason(turns(scene, "Bye", choice())[0]) == "sub_agent"
    assert scene.reason(turns(scene, "Hello", choice())[0]) == "retry"


def test_other_ids_are_another_request_and_the_same_ids_a_retry() -> None:
    scene = Scene()
    turns(scene, [1, 2], choice(prompt=[1, 2]))
    assert scene.reason(turns(scene, [1, 3], choice(prompt=[1, 3]))[0]) == "sub_agent"
    assert scene.reason(turns(scene, [1, 2], choice(prompt=[1, 2]))[0]) == "retry"


# Several prompts, several choices


def test_choices_of_one_prompt_share_what_was_given() -> None:
    scene = Scene()
    first, second = turns(scene, "a", choice(ids=[11]), choice(ids=[12], index=1), n=2)
    assert first.given is second.given
    assert [scene.reason(turn) for turn in (first, second)] == [None, "choice"]
    assert (scene.recorder.statistics.given_tokens, scene.recorder.statistics.sampled_tokens) == (2, 2)


@pytest.mark.parametrize("prompts", [["a", "b"], [[5], [6]]])
def test_a_batch_of_prompts_is_answered_prompt_by_prompt(prompts: list[Any]) -> None:
    scene = Scene()
    made = turns(
        scene, prompts, *(choice(ids=[20 + place], prompt=[5 + place // 2], index=place) for place in range(4)), n=2
    )
    assert [ids_of(turn) for turn in made] == [[5, 20], [5, 21], [6, 22], [6, 23]]
    assert [scene.reason(turn) for turn in made] == [None, "choice", "batch", "choice"]
    assert [turn.appended for turn in made[::2]] == [asked.appended for asked in asked_for(scene, prompts).places]
    assert made[0].appended == made[1].appended != made[2].appended
    assert [scene.classify(turn).first for turn in made] == [None, made[0], None, made[2]]


def test_a_batch_of_equal_prompts_is_one_prompt_with_several_choices() -> None:
    scene = Scene()
    made = turns(scene, ["a", "a"], choice(), choice(index=1))
    assert [scene.reason(turn) for turn in made] == [None, "choice"]


def test_a_batch_of_one_prompt_is_that_prompt() -> None:
    scene = Scene()
    (first,) = turns(scene, [[5, 6]], choice())
    assert asked_for(scene, [[*ids_of(first), 1]]).places[0].parent is first
    assert asked_for(scene, ["a"]).places[0].appended == ({"role": "prompt", "content": "a"},)


def test_a_batch_that_is_not_answered_evenly_is_unusable() -> None:
    scene = Scene()
    with pytest.raises(UnusableAnswer, match="3 choices for 2 prompts"):
        turns(scene, ["a", "b"], *(choice(index=place) for place in range(3)))
    assert scene.session.turns == []


@pytest.mark.parametrize("prompt", ["a", [1], ["a", "b"]])
def test_echo_cannot_be_recorded(prompt: object) -> None:
    face = CompletionsFace(cast(Continuation, None), STRICT)
    assert face.untraced_reason({"prompt": prompt, "echo": True}) is not None
    assert face.untraced_reason({"prompt": prompt, "echo": False, "suffix": "x"}) is None
    assert face.untraced_reason({"prompt": prompt}) is None
    assert face.untraced_reason([prompt]) is None


def test_an_engine_that_was_given_other_ids_than_it_was_sent_is_not_believed() -> None:
    scene = Scene()
    (first,) = turns(scene, [5, 6], choice())
    prompt = [*ids_of(first), 7]
    for told in ([0, *prompt], prompt[1:], [*prompt[:-1], 8]):
        with pytest.raises(UnusableAnswer, match="other ids than it was sent"):
            turns(scene, prompt, choice(prompt=told))
    assert len(scene.session.turns) == 1


def test_a_session_s_completions_have_a_context_of_their_own() -> None:
    scene = Scene()
    (turn,) = turns(scene, "a", choice())
    assert (turn.context, turn.path) == (CONTEXT, "/v1/completions")
    assert ids_of(turn) == [5, 6, 11, 12]
