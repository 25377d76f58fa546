"""The edge that a cut leaves, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miles_router.asgi.exchange import Exchange
from miles_router.engines.generate import GenerateRequest
from miles_router.generation.continuation import learn_prompt
from miles_router.generation.generation import ResumableGeneration, generations_of
from miles_router.generation.questions import EndTokens, EngineQuestions
from miles_router.generation.seam import Seam
from miles_router.middlewares.router import Router

PROMPT = list(b"Say: ")
ABORT = {"type": "abort", "message": "Aborted"}
LENGTH = {"type": "length", "length": 1}
END = 0
CONTEXT = 5  # tokens of the prompt that SGLang decodes together with the output


class Bytes(EngineQuestions):
    """A worker whose tokens are bytes, and whose model ends with `END`."""

    def __init__(self) -> None:
        super().__init__(cast(Router, None), Exchange("it"), [])

    async def detokenize(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        return [spelled(each) for each in ids]

    async def spell(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [spelled([byte for token in each for byte in (b"<END>" if token == END else [token])]) for each in ids]

    async def is_end(self, token: int) -> bool:
        self._facts.learned(EndTokens).ends.add(END)
        return token == END


def spelled(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token != END).decode("utf-8", "replace")


def said(prompt: Sequence[int], ids: Sequence[int], finish: object) -> dict[str, Any]:
    """What an engine answers: its text is what the last tokens of the prompt and the output spell beyond the prompt."""
    context = prompt[-CONTEXT:]
    text = spelled([*context, *ids])[len(spelled(context)) :]
    meta = {"id": "r", "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    return {"text": text, "output_ids": list(ids), "meta_info": meta}


async def cut(ids: Sequence[int], at: int, **sampling: Any) -> ResumableGeneration:
    """A generation whose first attempt a pause has cut after `at` tokens."""
    (generation,) = generations_of(GenerateRequest.read({"input_ids": PROMPT, "sampling_params": sampling}))
    generation.add(said(PROMPT, ids[:at], ABORT))
    generation.next_attempt()
    await learn_prompt(generation, Bytes())
    return generation


hard = st.text(st.sampled_from("aé世🚀 "), min_size=2, max_size=12).map(str.encode)
raw = st.lists(st.sampled_from([*"aé世🚀".encode(), 0x80, 0xF0]), min_size=2, max_size=30).map(bytes)


@given(hard, st.data())
async def test_a_character_that_the_cut_has_halved_is_whole(data: bytes, choice: st.DataObject) -> None:
    ids, at = list(data), choice.draw(st.integers(1, len(data) - 1))
    generation = await cut(ids, at)
    for end in range(at + 1, len(ids) + 1):  # as it streams
        generation.add(said([*PROMPT, *ids[:at]], ids[at:end], None if end < len(ids) else LENGTH))
        joined, stopped = await Seam(generation, Bytes()).mend(finished=end == len(ids))
        assert not stopped
    assert joined["text"] == data.decode()


@given(raw, st.data())
@example(b"\x80" * 20 + b"a", None)
async def test_bytes_that_are_no_character_stay_what_they_were(data: bytes, choice: st.DataObject | None) -> None:
    ids = list(data)
    at = 20 if choice is None else choice.draw(st.integers(1, len(data) - 1))
    generation = await cut(ids, at)
    generation.add(said([*PROMPT, *ids[:at]], ids[at:], LENGTH))
    joined, _ = await Seam(generation, Bytes()).mend(finished=True)
    assert joined["text"] == data.decode("utf-8", "replace")


def stopped_by(joined: dict[str, Any], stop: str) -> bool:
    return bool(joined["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop})


@given(
    st.text("abé", min_size=1, max_size=8),
    st.sampled_from(["<STOP>", "é", "世界", "bé", "é\n"]),
    st.text("xé", max_size=8),
    st.data(),
)
async def test_a_stop_string_across_the_cut_stops_at_the_token_that_completes_it(
    before: str, stop: str, behind: str, choice: st.DataObject
) -> None:
    before = before.replace("é", "e")
    ids = list(f"{before}{stop}{behind}".encode())
    first, last = len(before.encode()), len(f"{before}{stop}".encode())
    at = choice.draw(st.integers(first + 1, last - 1))
    generation = await cut(ids, at, stop=["never", stop])
    assert not await Seam(generation, Bytes()).end_at_cut()
    for end in range(at + 1, len(ids) + 1) if choice.draw(st.booleans()) else [len(ids)]:
        generation.add(said([*PROMPT, *ids[:at]], ids[at:end], None if end < len(ids) else LENGTH))
        joined, stopped = await Seam(generation, Bytes()).mend(finished=end == len(ids))
        assert stopped is (end >= last)
        if stopped:
            break
    assert (joined["text"], joined["output_ids"]) == (before, ids[:last])
    assert stopped_by(joined, stop)


async def test_a_stop_string_may_be_spelled_by_tokens_that_the_text_does_not_show() -> None:
    ids = [*b"a", END, *b"bc"]
    generation = await cut(ids, 2, stop="<END>b", ignore_eos=True)
    assert not await Seam(generation, Bytes()).end_at_cut()
    generation.add(said([*PROMPT, *ids[:2]], ids[2:], LENGTH))
    joined, stopped = await Seam(generation, Bytes()).mend(finished=True)
    assert stopped
    assert (joined["text"], joined["output_ids"]) == ("ab", ids[:3]), "there is nothing in the text to trim"
    generation = await cut([*b"a", END], 2, stop="<END>", ignore_eos=True)
    assert await Seam(generation, Bytes()).end_at_cut()


async def test_what_cannot_become_a_stop_string_is_not_waited_for() -> None:
    generation = await cut(list(b"<STAR"), 5, stop="<STOP>")
    assert not await Seam(generation, Bytes()).end_at_cut()
    assert not generation.forming
    generation = await cut(list(b"<ST"), 3, stop="<STOP>")
    assert not await Seam(generation, Bytes()).end_at_cut()
    assert generation.forming
    generation.add(said([*PROMPT, *b"<ST"], list(b"A"), None))
    _, stopped = await Seam(generation, Bytes()).mend(finished=False)
    assert (stopped, generation.forming) == (False, False)


@pytest.mark.parametrize(("trim", "text"), [(False, "aé"), (True, "aé\x07")])
async def test_the_token_that_ends_it_is_trimmed_as_the_engine_does(trim: bool, text: str) -> None:
    ids = list("aé\x07".encode())
    generation = await cut(ids, len(ids), stop_token_ids=[7], no_stop_trim=trim)
    assert await Seam(generation, Bytes()).end_at_cut()
    assert generation.answer is not None
    assert (generation.answer["text"], generation.answer["output_ids"]) == (text, ids)


async def test_what_was_held_back_is_shown_once_nobody_holds_it_back_any_more() -> None:
    ids = list("aé".encode())
    (generation,) = generations_of(GenerateRequest.read({"input_ids": PROMPT}))
    generation.add({**said(PROMPT, ids, None), "text": "a"})
    generation.next_attempt()
    await Seam(generation, Bytes()).restore_held_back()
    assert generation.answer is not None
    assert generation.answer["text"] == "aé"
