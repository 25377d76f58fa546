"""Completions: what answers say was sampled, and where prompts of a session hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from middleware_hub.openai_session.agent_apis.completions import CompletionsApi
from middleware_hub.openai_session.continuing.continuation import Continuation
from middleware_hub.openai_session.sessions.equality import STRICT
from middleware_hub.openai_session.sessions.session import AgentRequest
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.openai_session.turns.plan import TurnGrant, TurnPlan
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.openai.completions import CompletionsEndpoint
from miles_router.errors import BadRequest
from tests.support.sessions import Scene
from tests.support.waiting import at_once

COMPLETIONS = CompletionsEndpoint()


def choice(ids: Sequence[int] = (11, 12), prompt: Sequence[int] = (5, 6), index: int = 0) -> dict[str, Any]:
    """As SGLang 0.5.23 gives it with `logprobs: 0`, which asks for those of the sampled tokens alone."""
    logprobs = {
        "text_offset": [-1] * len(ids),
        "token_logprobs": [-1.0 / each for each in ids],
        "tokens": [],
        "top_logprobs": [],
    }
    return {
        "index": index,
        "text": "ab",
        "logprobs": logprobs,
        "finish_reason": "length",
        "matched_stop": None,
        "token_ids": list(ids),
        "prompt_token_ids": list(prompt),
    }


def answer(*choices: dict[str, Any], versions: Sequence[str] = ("1",)) -> dict[str, Any]:
    spans = [{"version": version, "start": place, "end": place + 1} for place, version in enumerate(versions)]
    if len(versions) == 1:
        spans[0]["end"] = len(choices[0]["token_ids"])
    metadata = {"weight_version": versions[-1], "weight_versions": spans}
    return {"id": "r", "object": "text_completion", "choices": list(choices), "usage": {}, "metadata": metadata}


def test_the_versions_of_the_first_choice_hold_for_all_if_they_are_one() -> None:
    whole = answer(choice(), choice(ids=[13, 14, 15], index=1))
    whole["metadata"]["weight_version"] = "later"
    read = COMPLETIONS.choices(whole)
    assert [each.versions for each in read] == [[("1", 0, 2)], [("1", 0, 3)]]
    assert [each.facts for each in read] == [
        {"rid": None, "first_token_at": None, "versions": "engine_first_choice"}
    ] * 2
    with pytest.raises(UnreadableAnswer, match="weights changed"):
        COMPLETIONS.choices(answer(choice(), choice(index=1), versions=("1", "2")))


@pytest.mark.parametrize(
    "bad",
    [None, "a", {}, {**choice(), "finish_reason": None}, {**choice(), "token_ids": 3}, {**choice(), "logprobs": [1]}],
)
def test_an_answer_that_lacks_something_is_refused(bad: Any) -> None:
    with pytest.raises(UnreadableAnswer):
        COMPLETIONS.choices({"choices": [choice(), bad], "metadata": {"weight_version": "1"}})


def asked_for(scene: Scene, prompt: object, **fields: Any) -> AgentRequest:
    api = CompletionsApi(cast(Continuation, None), STRICT)
    return at_once(api.turn(scene.session, {"prompt": prompt, **fields}, now=scene.time))


def turns(scene: Scene, prompt: object, *choices: dict[str, Any], **fields: Any) -> list[Turn]:
    request = asked_for(scene, prompt, **fields)
    scene.time += 1
    return scene.record(TurnPlan(request, TurnGrant(request.fields)), *COMPLETIONS.choices(answer(*choices)))


def ids_of(turn: Turn) -> list[int]:
    ids: list[int] = turn.trajectory().tokens.tolist()
    return ids


def test_of_held_turns_that_ids_begin_with_the_deepest_is_extended() -> None:
    scene = Scene()
    (first,) = turns(scene, [5], choice(ids=[6], prompt=[5]))
    (second,) = turns(scene, [5, 6, 7], choice(ids=[8, 9], prompt=[5, 6, 7]))
    (shallow,) = turns(scene, [5, 6], choice(ids=[7], prompt=[5, 6]))
    assert (second.parent, shallow.parent) == (first, first)
    assert asked_for(scene, [5, 6, 7, 8, 9, 1]).parents[0].parent is second
    assert asked_for(scene, [5, 6, 7, 8]).parents[0].parent is shallow
    assert asked_for(scene, [5, 6, 2]).parents[0].parent is first
    assert asked_for(scene, [5, 7]).parents[0].parent is None


@pytest.mark.parametrize("prompt", [[-1], [2**40], [1, True], [1.5], [3, "a"], [None], [{}], [[1], [-1]], [["a"], "b"]])
def test_prompts_that_are_neither_texts_nor_ids_are_refused(prompt: list[Any]) -> None:
    with pytest.raises(BadRequest, match="prompt"):
        asked_for(Scene(), prompt)


@pytest.mark.parametrize("prompts", [["a", "b"], [[5], [6]]])
def test_a_batch_of_prompts_is_answered_prompt_by_prompt(prompts: list[Any]) -> None:
    scene = Scene()
    made = turns(
        scene, prompts, *(choice(ids=[20 + place], prompt=[5 + place // 2], index=place) for place in range(4)), n=2
    )
    assert [ids_of(turn) for turn in made] == [[5, 20], [5, 21], [6, 22], [6, 23]]
    assert [scene.reason(turn) for turn in made] == [None, "choice", "batch", "choice"]
    assert [turn.appended for turn in made[::2]] == [asked.appended for asked in asked_for(scene, prompts).parents]
    assert made[0].appended == made[1].appended != made[2].appended
    assert [scene.classify(turn).first for turn in made] == [None, made[0], None, made[2]]


@pytest.mark.parametrize("prompt", ["a", [1], ["a", "b"]])
def test_echo_cannot_be_recorded(prompt: object) -> None:
    api = CompletionsApi(cast(Continuation, None), STRICT)
    assert api.untraced_reason({"prompt": prompt, "echo": True}) is not None
    assert api.untraced_reason({"prompt": prompt, "echo": False, "suffix": "x"}) is None
    assert api.untraced_reason({"prompt": prompt}) is None
    assert api.untraced_reason([prompt]) is None
