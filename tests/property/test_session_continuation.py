"""Whatever is said, sampled and appended: what was sampled stays, and around it stands what the template writes.

The worker's part is played by ids at random, most of which no tokenizer would make of their own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.openai_session.continuing.continuation import Continuation, HeldEnd, build
from middleware_hub.openai_session.sessions.turn import Context
from tests.support.chat import CHATML, TOOLS, Message, family_tokenizer, with_template
from tests.support.chat import whole as whole_of
from tests.support.tiers import examples, nightly
from tests.support.tokenizers import tokenizer
from tests.support.waiting import at_once

#: SentencePiece tokenizers put a space in front of a text; an end of turn of their own is needed here.
LLAMA = """
{%- for m in messages -%}
{{- '<s>' + m.role + '\\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}{{- '\\ncall ' + (call.function.arguments | tojson) -}}{%- endfor -%}
{{- '</s>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<s>assistant\\n' }}{%- endif -%}
"""
GEMMA = LLAMA.replace("<s>", "<start_of_turn>").replace("</s>", "<end_of_turn>")
MODELS: Mapping[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "qwen3, its own": (lambda: tokenizer("qwen3"), ("<|im_end|>",)),
    "qwen3, ChatML": (lambda: with_template(CHATML), ("<|im_end|>", "<|endoftext|>")),
    "GLM": (lambda: family_tokenizer("glm47"), ("<|user|>", "<|observation|>")),
    "llama2": (lambda: with_template(LLAMA, "llama2"), ("</s>",)),
    "gemma3": (lambda: with_template(GEMMA, "gemma3"), ("<end_of_turn>", "<eos>")),
}
#: A vocabulary that takes seconds to load. "llama2" is of its kind.
LARGE = ("gemma3",)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ("  padded ", "\n", "x\n\n", "<|im_end|>", "</s>", "<|user|>", "</think>a", "<tool_response>", "{}", "")
    ),
)


@cache
def model(name: str) -> tuple[Any, Continuation, tuple[int, ...]]:
    made, stops = MODELS[name][0](), MODELS[name][1]
    return made, build(made, None), tuple(made.convert_tokens_to_ids(list(stops)))


@dataclass
class Held:
    """A session's tokens, and which of them were sampled."""

    ids: list[int]
    sampled: list[tuple[int, list[int]]] = field(default_factory=list)

    def sample(self, ids: list[int]) -> None:
        self.sampled.append((len(self.ids), ids))
        self.ids += ids

    def extend(self, drop: int, ids: list[int]) -> None:
        if drop:
            place, last = self.sampled[-1]
            self.sampled[-1] = place, last[:-drop]
            del self.ids[-drop:]
        self.ids += ids


@st.composite
def sampled_ids(draw: st.DrawFn, size: int, stop: int | None) -> list[int]:
    ids = draw(st.lists(st.integers(300, size - 1), max_size=6))
    return ids if stop is None else [*ids, stop]


@st.composite
def appended_to(draw: st.DrawFn, calls: list[str]) -> list[Message]:
    """Results of all calls, and perhaps more; or what comes when there are none."""
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": each, "name": "search", "content": draw(TEXTS)} for each in calls
    ]
    roles = [*draw(st.lists(st.sampled_from(("user", "system", "assistant")), max_size=2)), "user"]
    if not calls or draw(st.booleans()):
        messages += [{"role": role, "content": draw(TEXTS)} for role in roles]
    return messages


def spelled(made: Any, ids: list[int]) -> str:
    """Text of ids in the middle of others."""
    decoded: str = made.backend_tokenizer.decode(ids, skip_special_tokens=False)
    return decoded


def check_given(made: Any, continuation: Continuation, turn: HeldEnd, appended: list[Message]) -> tuple[int, list[int]]:
    """What is given, held against the whole rendering of a history that the short conversation does not have."""
    extension = at_once(continuation.after(turn, appended, Context(TOOLS, {})))
    drop, ids = extension.drop, extension.ids.tolist()
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"q": "é"}'}}
        for call_id, name in turn.tool_calls
    ]
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    message: Message = {"role": "assistant", "content": "" if calls else "Hm", "tool_calls": calls or None}
    whole = whole_of(continuation.renderer, [*history, message, *appended], Context(TOOLS, {}))
    consumed = 1 if turn.ended and not drop else 0
    assert whole[len(whole) - len(ids) :] == ids
    if consumed:
        assert whole[len(whole) - len(ids) - 1] == turn.last_id
    return drop, ids


@pytest.mark.parametrize("name", [name for name in MODELS if nightly() or name not in LARGE])
@settings(max_examples=examples(60))
@given(data=st.data())
def test_sampled_ids_stay_and_the_rest_is_as_the_template_writes_it(name: str, data: st.DataObject) -> None:
    made, continuation, stops = model(name)
    size = made.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    held = Held(made.encode("prompt", add_special_tokens=False))
    for turn in range(data.draw(st.integers(1, 4), label="turns")):
        stop = data.draw(st.sampled_from((*stops, None)), label="stop")
        calls = [f"c{turn}_{place}" for place in range(data.draw(st.integers(0, 2), label="calls"))]
        sampled = data.draw(sampled_ids(size, stop), label="sampled")
        held.sample(sampled)
        end = HeldEnd(sampled[-1] if sampled else None, stop is not None, tuple((each, "search") for each in calls))
        appended = data.draw(appended_to(calls), label="appended")
        drop, ids = check_given(made, continuation, end, appended)
        assert drop <= 1
        held.extend(drop, ids)
    for place, ids in held.sampled:
        assert held.ids[place : place + len(ids)] == ids
    assert spelled(made, held.ids)
