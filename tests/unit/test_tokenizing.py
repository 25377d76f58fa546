"""Encoding, spelling and alignment, with real tokenizers: byte-level, byte fallback with and without a dummy prefix."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.tokenizing.alignment import Alignment, align
from middleware_hub.tokenizing.encoding import TextEncoder
from miles_router.engines.spelling import NO_CUT, UnknownSpeller, speller_for
from tests.support.tiers import examples
from tests.support.tokenizers import PACKAGES, tokenizer

NAMES = sorted(PACKAGES)
CUT = None  # in expectations: NO_CUT


@cache
def encoder(name: str) -> TextEncoder:
    return TextEncoder(tokenizer(name))


def ids(name: str, *tokens: str) -> list[int]:
    backend = tokenizer(name).backend_tokenizer
    found = [backend.token_to_id(token) for token in tokens]
    assert None not in found, tokens
    return found


def shown(aligned: Alignment) -> tuple[str, list[int | None], int, bool]:
    ends = [None if end == NO_CUT else int(end) for end in aligned.ends]
    return aligned.text, ends, aligned.shown_chars, aligned.exact


def aligned(name: str, tokens: list[int], text: str, **how: Any) -> tuple[str, list[int | None], int, bool]:
    return shown(encoder(name).align(tokens, text, **{"skip_special": True, **how}))


# Whole texts and continuations


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["Hello", " Hello", "a\n\nb", "naïve 世界 🚀👍🏽", "  two", "\t", "x</s>y", "é" * 30, " "]
)
def test_a_continuation_decodes_to_itself_behind_any_text(name: str, text: str) -> None:
    backend = tokenizer(name).backend_tokenizer
    before = backend.encode("Once 1").ids
    rest = encoder(name).encode_rest(text)
    if name == "llama2" and "</s>" in text:
        text = text.replace("</s>", "</s> ")  # its own dummy prefix behind a special token, as in any text
    assert backend.decode([*before, *rest.ids], skip_special_tokens=False).endswith(f"Once 1{text}")
    assert rest.ends[-1] in (len(text), len(text.replace("</s> ", "</s>")))


def test_a_continuation_has_no_dummy_prefix() -> None:
    assert tokenizer("llama2").convert_ids_to_tokens(encoder("llama2").encode_rest("Hi").ids.tolist()) == ["Hi"]
    assert tokenizer("llama2").convert_ids_to_tokens(encoder("llama2").encode_whole("Hi").ids.tolist()) == [
        "<s>",
        "▁Hi",
    ]


@pytest.mark.parametrize("text", ["a b " * 20, "é a b " * 20])
def test_a_tokenizer_that_cuts_and_pads_what_it_is_given_does_neither_here(text: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tokenizer("qwen3").backend_tokenizer.to_str())
    backend.enable_truncation(1600)  # longer than what is tried first
    backend.enable_padding(pad_to_multiple_of=7)
    made = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    for long in (text, text * 90):
        assert made.encode_rendered(long).tolist() == encoder("qwen3").encode_rendered(long).tolist()
        assert made.encode_whole(long).ids.tolist() == encoder("qwen3").encode_whole(long).ids.tolist()


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_no_text_gets_its_beginning_twice(name: str) -> None:
    bos = tokenizer(name).bos_token_id
    assert encoder(name).encode_whole("Hi").ids[0] == bos
    written = encoder(name).encode_whole(f"{tokenizer(name).bos_token}Hi").ids.tolist()
    assert written.count(bos) == 1
    assert bos not in encoder(name).encode_rest("Hi").ids


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60))
@given(text=st.text(max_size=30), cut=st.integers(0, 30))
def test_ends_say_where_a_text_can_be_cut(name: str, text: str, cut: int) -> None:
    encoded = encoder(name).encode_rest(text)
    cuts = [(index + 1, int(end)) for index, end in enumerate(encoded.ends) if end != NO_CUT]
    assert len(encoded.ends) == len(encoded.ids)
    assert [end for _, end in cuts] == sorted(end for _, end in cuts)
    again = encoder(name).encode_rest(text[: cuts[cut % len(cuts)][1]] if cuts else "")
    assert again.ends.tolist()[-1:] == ([cuts[cut % len(cuts)][1]] if cuts and cuts[cut % len(cuts)][1] else [])


# Alignment of what was sampled


def test_ordinary_tokens_end_where_their_text_ends() -> None:
    tokens = ids("qwen3", "Ġthe", "Ġcat")
    assert aligned("qwen3", tokens, " the cat") == (" the cat", [4, 8], 8, True)


def test_a_trimmed_stop_token_is_spelled_behind_what_was_shown() -> None:
    tokens = ids("qwen3", "Ġthe", "<|im_end|>")
    expected = (" the<|im_end|>", [4, 14], 4, True)
    assert aligned("qwen3", tokens, " the") == expected
    assert aligned("qwen3", tokens, " the", skip_special=False) == expected
    assert aligned("qwen3", tokens, " the<|im_end|>", skip_special=False) == (" the<|im_end|>", [4, 14], 14, True)


def test_special_tokens_between_shown_characters_have_no_width() -> None:
    tokens = ids("qwen3", "Ġthe", "<|im_start|>", "Ġcat", "<|im_end|>")
    assert aligned("qwen3", tokens, " the cat") == (" the cat<|im_end|>", [4, 4, 8, 18], 8, True)


def test_a_token_that_a_stop_string_cut_reaches_beyond_what_was_shown() -> None:
    tokens = ids("qwen3", "Ġthe", "Ġcat")
    assert aligned("qwen3", tokens, " the c", stop="a") == (" the cat", [4, 8], 6, True)


def test_nothing_shown_is_all_tail() -> None:
    assert aligned("qwen3", ids("qwen3", "<|im_end|>"), "") == ("<|im_end|>", [10], 0, True)


def test_a_character_of_several_tokens_cannot_be_cut_inside() -> None:
    backend = tokenizer("qwen3").backend_tokenizer
    tokens = backend.encode("🫠").ids
    assert len(tokens) > 1
    assert aligned("qwen3", tokens, "🫠") == ("🫠", [*[CUT] * (len(tokens) - 1), 1], 1, True)
    raw = ids("llama2", *(f"<0x{byte:02X}>" for byte in "🫠".encode()))
    assert aligned("llama2", raw, "🫠") == ("🫠", [CUT, CUT, CUT, 1], 1, True)


def test_an_unfinished_character_is_spelled_as_the_engine_shows_it() -> None:
    first = tokenizer("qwen3").backend_tokenizer.encode("🫠").ids[:1]
    assert aligned("qwen3", first, "\ufffd") == ("\ufffd", [1], 1, True)
    assert aligned("qwen3", [*first, *ids("qwen3", "a")], "\ufffda") == ("\ufffda", [CUT, 2], 2, True)
    assert aligned("qwen3", [*ids("qwen3", "a"), *first], "a") == ("a\ufffd", [1, 2], 1, True)
    assert aligned("llama2", ids("llama2", "<0xE4>", "<0xBD>"), "\ufffd\ufffd") == ("\ufffd" * 2, [CUT, 2], 2, True)


def test_ids_of_a_padded_vocabulary_are_shown_as_id_0() -> None:
    unused = len(tokenizer("qwen3")) + 100  # the embedding is larger than the vocabulary
    assert aligned("qwen3", [*ids("qwen3", "a"), unused], "a!") == ("a!", [1, 2], 2, True)


def test_added_tokens_of_a_sentencepiece_model_show_spaces_too() -> None:
    tokens = ids("gemma3", "▁▁", "a")
    assert aligned("gemma3", tokens, "  a") == ("  a", [2, 3], 3, True)


def test_the_dummy_prefix_of_the_first_token_is_a_space_behind_other_text() -> None:
    assert aligned("llama2", ids("llama2", "▁the", "▁"), " the ") == (" the ", [4, 5], 5, True)


# What nobody can take apart


def test_a_text_that_the_tokens_do_not_spell_makes_one_run() -> None:
    tokens = ids("qwen3", "Ġthe", "Ġcat")
    assert aligned("qwen3", tokens, "他 cat") == ("他 cat", [CUT, 5], 5, False)


def test_the_hidden_stop_token_is_no_part_of_such_a_run() -> None:
    tokens = ids("qwen3", "Ġthe", "<|im_end|>")
    end = tokens[-1]
    assert aligned("qwen3", tokens, "他", stop=end) == ("他<|im_end|>", [1, 11], 1, False)
    assert aligned("qwen3", tokens, "他", stop=end, skip_special=False) == ("他<|im_end|>", [1, 11], 1, False)
    whole = aligned("qwen3", tokens, "他<|im_end|>", stop=end, skip_special=False, no_stop_trim=True)
    assert whole == ("他<|im_end|>", [CUT, 11], 11, False)


def test_a_run_that_a_stop_string_may_have_cut_is_not_reused() -> None:
    assert aligned("qwen3", ids("qwen3", "Ġthe", "Ġcat"), "他", stop="c") == ("他", [CUT, CUT], 1, False)


def test_unknown_decoders_make_runs() -> None:
    backend = tokenizer("qwen3").backend_tokenizer
    speller = UnknownSpeller(backend)
    tokens = ids("qwen3", "Ġthe", "Ġcat", "<|im_end|>")
    found = shown(align(speller, tokens, " the cat", skip_special=True, stop=tokens[-1]))
    assert found == (" the cat<|im_end|>", [CUT, 8, 18], 8, False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3", "ByteLevelSpeller"), ("llama2", "ByteFallbackSpeller"), ("gemma3", "ByteFallbackSpeller")],
)
def test_spellers_are_told_by_the_decoder(name: str, kind: str) -> None:
    assert type(speller_for(tokenizer(name).backend_tokenizer)).__name__ == kind


def test_a_decoder_that_nobody_knows_is_left_alone() -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    assert isinstance(speller_for(backend), UnknownSpeller)
