"""One generation of several attempts: what is asked to go on, how answers are joined, what the cut leaves."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.asgi.exchange import Exchange
from miles_router.engines.facts import Facts
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.sglang.questions import STATEFUL
from miles_router.generation.continuation import PENALTIES, continuation
from miles_router.generation.generation import (
    CUT,
    ENDED,
    GIVEN_UP,
    OPAQUE,
    RUNNING,
    CannotResume,
    GenerationState,
    ResumableGeneration,
    generations_of,
)
from miles_router.generation.joining import find_stop_across, join, stop_may_form
from miles_router.generation.questions import EngineQuestions
from miles_router.middlewares.router import Router
from miles_router.partial_rollouts.moves.balance import choose_move
from miles_router.partial_rollouts.moves.checks import Immovable, check_size, read_movable

PROMPT = 3
LENGTH = {"type": "length"}
ABORT = {"type": "abort", "message": "Aborted"}


class Whole:
    """A generation, and what an engine answers of any stretch of it."""

    def __init__(self, pieces: Sequence[str], versions: Sequence[str], row_bytes: int, experts_start: int = 0) -> None:
        self.pieces = pieces
        self.versions = versions
        self.start = experts_start
        self.rows = [bytes((7 * row + column) % 256 for column in range(row_bytes)) for row in range(200)]

    def answer(self, begin: int, end: int) -> dict[str, Any]:
        """Tokens `begin` to `end`, by an engine that was given those before as its prompt."""
        ids = list(range(100 + begin, 100 + end))
        rows = self.rows[PROMPT + begin - 1 if begin else self.start : PROMPT + end - 1]
        meta = {
            "id": "r" if not begin else f"r-{begin}",
            "finish_reason": {**LENGTH, "length": end - begin} if end == len(self.pieces) else ABORT,
            "prompt_tokens": PROMPT + begin,
            "completion_tokens": end - begin,
            "cached_tokens": 2 if not begin else PROMPT + begin - 1,
            "num_retractions": 0,
            "output_token_logprobs": [[-0.5 * id, id, None] for id in ids],
            "output_token_logprobs_length": end - begin,
            "output_top_logprobs": [[[-0.25, id, None]] for id in ids],
            "weight_version": self.versions[end - 1] if end else "",
            "weight_versions": spans(self.versions[begin:end]),
            "routed_experts": base64.b64encode(b"".join(rows)).decode(),
        }
        return {"text": "".join(self.pieces[begin:end]), "output_ids": ids, "meta_info": meta}


def spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """As SGLang writes them: one span a run, and one that is empty where there is nothing."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": version, "start": at, "end": at + 1})
    return found or [{"version": "0", "start": 0, "end": 0}]


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    pieces = draw(st.lists(st.text(max_size=3), min_size=1, max_size=12))
    versions = sorted(draw(st.lists(st.sampled_from("123"), min_size=len(pieces), max_size=len(pieces))))
    return Whole(pieces, versions, draw(st.integers(1, 9)), draw(st.integers(0, PROMPT - 1)))


@given(wholes(), st.data())
def test_joining_any_cut_gives_the_uncut_answer(whole: Whole, data: st.DataObject) -> None:
    end = len(whole.pieces)
    places = sorted(data.draw(st.lists(st.integers(1, end), max_size=5)))
    bounds = [0, *places, end]
    parts = [whole.answer(begin, after) for begin, after in itertools.pairwise(bounds)]
    joined = parts[0]
    for part in parts[1:]:
        joined = join(joined, part)
    expected = whole.answer(0, end)
    if places:
        expected["meta_info"]["resumed"] = len(places)
    assert joined == expected


@given(
    st.text("ab", max_size=8), st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_straddling_agrees_with_a_search_of_every_place(first: str, second: str, stops: list[str]) -> None:
    text, boundary = first + second, len(first)
    places = [
        (at, stop)
        for at in range(boundary)
        for stop in stops
        if text.startswith(stop, at) and at + len(stop) > boundary
    ]
    assert find_stop_across(text, boundary, stops) == min(places, default=None)


@given(
    st.text("ab", max_size=8), st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_a_stop_string_is_forming_exactly_if_something_could_complete_it(
    first: str, second: str, stops: list[str]
) -> None:
    text, boundary = first + second, len(first)
    ends = ("".join(more) for size in range(5) for more in itertools.product("ab", repeat=size))
    seen = find_stop_across(text, boundary, stops)
    could = any(
        text.startswith(stop[: len(text) - at], at) and len(stop) > len(text) - at
        for at in range(boundary)
        for stop in stops
    )
    assert stop_may_form(text, boundary, stops) is could
    if not could:
        assert all(find_stop_across(text + end, boundary, stops) == seen for end in ends)


class Tokenizing(EngineQuestions):
    """A worker whose tokens are the characters' numbers."""

    def __init__(self) -> None:
        super().__init__(cast(Router, None), Exchange("it"), [])

    async def tokenize(self, text: str) -> list[int]:
        return list(map(ord, text))


def cut(body: dict[str, Any], sampled: Sequence[int], **meta: Any) -> ResumableGeneration:
    (generation,) = generations_of(GenerateRequest.read(body))
    generation.answer = {"text": "", "output_ids": list(sampled), "meta_info": {"prompt_tokens": 2, **meta}}
    return generation


async def asked(generation: ResumableGeneration) -> dict[str, Any]:
    """Without the name of its own that it has."""
    generation.attempt_rid = "attempt"
    found: dict[str, Any] = orjson.loads(await continuation(generation, Tokenizing()))
    assert found.pop("rid") == "attempt"
    return found


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"max_new_tokens": 125}),  # SGLang's default is 128
        ({"max_new_tokens": 10}, {"max_new_tokens": 7}),
        ({"max_new_tokens": None}, {"max_new_tokens": None}),
        ({"min_new_tokens": 5}, {"max_new_tokens": 125, "min_new_tokens": 2}),
        ({"min_new_tokens": 2}, {"max_new_tokens": 125, "min_new_tokens": 0}),
        ({"min_new_tokens": None}, {"max_new_tokens": 125, "min_new_tokens": None}),
        (
            {"frequency_penalty": 0, "beam_width": 1, "regex": ""},
            {"max_new_tokens": 125, "frequency_penalty": 0, "beam_width": 1, "regex": ""},
        ),
        ({"repetition_penalty": None}, {"max_new_tokens": 125, "repetition_penalty": None}),
        ({"n": 1, "top_p": 0.5, "sampling_seed": 7}, {"max_new_tokens": 125, "top_p": 0.5, "sampling_seed": 7}),
    ],
)
async def test_what_was_sampled_is_prompt_now_and_the_budget_less(given: dict[str, Any], left: dict[str, Any]) -> None:
    generation = cut({"input_ids": [1, 2], "sampling_params": given}, [7, 8, 9])
    assert await asked(generation) == {"input_ids": [1, 2, 7, 8, 9], "sampling_params": left}


@pytest.mark.parametrize("field", [*sorted(STATEFUL), *PENALTIES])
async def test_sampling_that_looks_back_is_not_carried_on_unless_it_has_only_queued(field: str) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {field: 1.5 if field in PENALTIES else "x"}}
    with pytest.raises(CannotResume, match=field):
        await asked(cut(body, [7]))
    assert await asked(cut(body, [])) == body


async def test_a_tokenizer_that_gives_another_prompt_is_not_believed() -> None:
    with pytest.raises(CannotResume, match="tokenizer"):
        await asked(cut({"text": "abc"}, [7]))


def generation(**request: Any) -> ResumableGeneration:
    (made,) = generations_of(GenerateRequest.read({"input_ids": [1], **request}))
    return made


SAYS = Facts(context_length=4096, preferred_sampling_params={})


@pytest.mark.parametrize(
    ("loads", "movable", "expected"),
    [
        ({"a": 2, "b": 0}, "a", ("a", "b")),
        ({"a": 1, "b": 0}, "a", None),
        ({"a": 3, "b": 2}, "a", None),
        ({"a": 11, "b": 7}, "a", ("a", "b")),
        ({"a": 9, "b": 5, "c": 1}, "bc", ("b", "c")),
        ({"a": 9, "b": 2, "c": 1}, "bc", None),
        ({}, "", None),
    ],
)
def test_fullest_movable_worker_gives_to_the_idlest_when_far_apart(
    loads: dict[str, int], movable: str, expected: tuple[str, str] | None
) -> None:
    assert choose_move(loads, {place: ["a request"] if place in movable else [] for place in loads}) == expected


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2], "rid": "a-name", "sampling_params": {"max_new_tokens": 100}, **fields}


@pytest.mark.parametrize(
    ("reason", "fields", "engine"),
    [
        ("unreadable", {"input_ids": None, "prompt": "Hi"}, SAYS),
        ("unreadable", {"sampling_params": {"max_new_tokens": "5"}}, SAYS),
        ("unreadable", {"sampling_params": {"max_new_tokens": 1.5}}, SAYS),
        ("streamed", {"stream": True}, SAYS),
        ("several", {"sampling_params": {"n": 2}}, SAYS),
        ("several", {"input_ids": [[1]]}, SAYS),
        ("placed", {"data_parallel_rank": 0}, SAYS),
        ("placed", {"bootstrap_room": 7}, SAYS),
        ("media", {"image_data": ["data:"]}, SAYS),
        ("unnamed", {"rid": None}, SAYS),
        ("unnamed", {"rid": ""}, SAYS),
        ("named_alike", {"rid": "12"}, SAYS),
        ("named_alike", {"rid": "0123456789abcde"}, SAYS),
        ("stateful", {"session_params": {"id": "s"}}, SAYS),
        ("stateful", {}, Facts(context_length=4096, preferred_sampling_params={"repetition_penalty": 1.1})),
        ("too_long", {"sampling_params": {"max_new_tokens": 4087}}, SAYS),
        ("too_long", {"sampling_params": {"max_new_tokens": None}}, SAYS),
        ("too_long", {"input_ids": None, "text": "é" * 2000}, SAYS),
        ("too_long", {}, Facts()),
    ],
)
def test_what_might_not_be_carried_on_is_known_before(reason: str, fields: dict[str, Any], engine: Facts) -> None:
    with pytest.raises(Immovable) as refusal:
        read_movable(body(**fields), [SAYS, engine])
    assert refusal.value.reason == reason


def test_a_body_that_cannot_fit_is_not_read() -> None:
    check_size(b" " * 16 * 4096, [SAYS])
    for engine in (SAYS, Facts()):
        with pytest.raises(Immovable, match="too_long"):
            check_size(b" " * (16 * 4096 + 1), [SAYS, engine])


HAPPENS: dict[str, Callable[[ResumableGeneration], None]] = {
    "next attempt": ResumableGeneration.next_attempt,
    "cut": lambda made: made.cut(Facts(), ABORT),
    "unreadable event": ResumableGeneration.mark_unreadable,
    "end": ResumableGeneration.end,
    "giving up": ResumableGeneration.give_up,
}
STATES = {RUNNING: [], CUT: ["cut"], OPAQUE: ["unreadable event"], ENDED: ["end"], GIVEN_UP: ["cut", "giving up"]}
REFUSED = {
    *((OPAQUE, each) for each in ("next attempt", "cut", "giving up")),
    *((ENDED, each) for each in ("next attempt", "end")),
    *((GIVEN_UP, each) for each in HAPPENS),
}


@pytest.mark.parametrize("event", HAPPENS)
@pytest.mark.parametrize("state", GenerationState)
def test_what_cannot_follow_a_state_is_refused_by_name(state: GenerationState, event: str) -> None:
    made = generation()
    for each in STATES[state]:
        HAPPENS[each](made)
    assert made.state is state
    if (state, event) not in REFUSED:
        HAPPENS[event](made)
        assert made.state is state or state in (RUNNING, CUT) or (state, event) == (OPAQUE, "end")
        return
    with pytest.raises(RuntimeError, match=f"{state.value}: {event}"):
        HAPPENS[event](made)
    assert made.state is state


@given(st.lists(st.sampled_from([*HAPPENS])))
def test_a_generation_that_was_unreadable_ended_or_given_up_is_never_continued(events: list[str]) -> None:
    made, over = generation(), False
    for each in events:
        over = over or made.state not in (RUNNING, CUT)
        with suppress(RuntimeError):
            HAPPENS[each](made)
        assert not over or made.state not in (RUNNING, CUT)
        assert not made.is_cut or made.abort == ABORT
