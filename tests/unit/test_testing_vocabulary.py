"""The toy vocabulary has the properties that make text a poor stand-in for tokens."""

from typing import Any

import pytest

from miles_router.testing.worker.model.chat_template import render_chatml
from miles_router.testing.worker.model.vocabulary import SPECIAL_TOKENS, Tokenizer, ToyTokenizer

TEXTS = [
    "",
    "Hello world, the answer is 42.\n",
    "naïve 世界 👨‍👩‍👧 привет한국",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start",
    "a\x00b\r\n\t",
]


@pytest.fixture(scope="module")
def toy() -> ToyTokenizer:
    return ToyTokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_what_was_encoded_gives_the_text_back(toy: ToyTokenizer, text: str) -> None:
    assert toy.decode(toy.encode(text)) == text


def test_it_is_a_tokenizer_to_the_engine(toy: ToyTokenizer) -> None:
    assert isinstance(toy, Tokenizer)


def test_every_id_decodes_and_some_decode_to_nothing(toy: ToyTokenizer) -> None:
    silent = [token for token in range(toy.vocab_size) if toy.token_bytes(token) == b""]
    assert 0 < len(silent) < 20
    assert toy.decode(silent) == ""


def test_ids_outside_of_the_vocabulary_decode_to_nothing(toy: ToyTokenizer) -> None:
    assert toy.decode([-1, toy.vocab_size, 10**9]) == ""


def test_one_text_has_many_spellings(toy: ToyTokenizer) -> None:
    whole, bytewise = toy.encode(" the"), list(b" the")
    assert len(whole) == 1
    assert bytewise != whole
    assert toy.decode(bytewise) == toy.decode(whole) == " the"


def test_the_ids_of_a_text_are_not_the_ids_of_its_halves(toy: ToyTokenizer) -> None:
    assert toy.encode(" th") + toy.encode("e") != toy.encode(" the")


def test_an_unfinished_character_decodes_to_the_replacement_character(toy: ToyTokenizer) -> None:
    piece = next(token for token in range(256, toy.vocab_size) if toy.token_bytes(token) == "世".encode()[:2])
    assert toy.decode([piece]) == "\ufffd"
    assert toy.decode([piece, "世".encode()[2]]) == "世"


def test_special_tokens_are_one_id_each_and_can_be_hidden(toy: ToyTokenizer) -> None:
    for text in SPECIAL_TOKENS:
        (token,) = toy.encode(text)
        assert token == toy.token_id(text)
        assert toy.decode([token]) == text
        assert toy.encode(f"A{text}B") == [65, token, 66]
        assert toy.decode([65, token, 66], skip_special_tokens=True) == "AB"


def test_markup_survives_the_hiding_of_special_tokens(toy: ToyTokenizer) -> None:
    assert toy.decode(toy.encode("<tool_call>"), skip_special_tokens=True) == "<tool_call>"


def test_two_ids_end_a_generation(toy: ToyTokenizer) -> None:
    assert toy.eos_token_ids == {toy.token_id("<|im_end|>"), toy.token_id("<|endoftext|>")}


def test_chat_is_rendered_as_chatml(toy: ToyTokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert toy.render_chat(messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_and_calls_appear_in_the_rendering() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = render_chatml(messages, tools=[{"type": "function", "function": {"name": "add"}}])
    assert '<tools>\n{"type":"function","function":{"name":"add"}}\n</tools>' in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text
