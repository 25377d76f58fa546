"""ASCII is encoded as the tokenizer encodes it, or not here."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.tokenizing import ascii_encoding
from middleware_hub.tokenizing.ascii_encoding import AsciiEncoder, ascii_encoder
from middleware_hub.tokenizing.encoding import UNLOCKED, TextEncoder
from miles_router.testing.tiny_tokenizer import build
from tests.support.tiers import examples
from tests.support.tokenizers import CHAT_PACKAGES, PACKAGES, tokenizer

#: Those whose regular expressions have a form in ASCII here.
FAST = ("qwen3", "gptoss")
PIECES = [
    "'ll",
    "'S",
    " the",
    "Hello",
    "HTTPServer",
    "42",
    "1234567",
    "\r\n",
    "\n\n ",
    "\t",
    "  ",
    " ",
    "==",
    "/*",
    ".",
]
texts = st.text(st.characters(max_codepoint=127), max_size=40) | st.lists(
    st.sampled_from([*PIECES, "<|im_end|>", "<|im_start|>", "<|im_", "<|end|>", "<|start|>"]), max_size=20
).map("".join)


@cache
def fast(name: str) -> AsciiEncoder:
    found = ascii_encoder(tokenizer(name).backend_tokenizer)
    assert found is not None
    return found


def by_itself(backend: Any, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=examples(300))
@given(text=texts)
def test_ascii_has_the_ids_that_the_tokenizer_gives_it(name: str, text: str) -> None:
    assert fast(name).encode(text).tolist() == by_itself(tokenizer(name).backend_tokenizer, text)


@pytest.mark.parametrize("name", FAST)
def test_source_and_prose_have_the_ids_that_the_tokenizer_gives_them(name: str) -> None:
    for path in (Path(__file__), Path(__file__).parents[2] / "pyproject.toml", Path(json.__file__)):
        text = path.read_text(encoding="utf-8")
        text = "".join(filter(str.isascii, text))
        assert fast(name).encode(text).tolist() == by_itself(tokenizer(name).backend_tokenizer, text)


@pytest.mark.parametrize("name", sorted({*PACKAGES, *CHAT_PACKAGES} - {*FAST}))
def test_a_tokenizer_of_another_kind_encodes_by_itself(name: str) -> None:
    assert ascii_encoder(tokenizer(name).backend_tokenizer) is None


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Any]:
    """A tokenizer with GPT-2's regular expression, and what a test changes of its `tokenizer.json`."""
    from tokenizers import Tokenizer

    build(tmp_path)
    parsed = json.loads((tmp_path / "tokenizer.json").read_text())

    def made(change: Callable[[Any], None] = lambda parsed: None) -> Any:
        change(parsed)
        return Tokenizer.from_str(json.dumps(parsed))

    return made


def test_the_regular_expression_that_a_pre_tokenizer_has_by_itself_is_known(tiny: Callable[..., Any]) -> None:
    backend = tiny()
    encoder = ascii_encoder(backend)
    assert encoder is not None
    text = "It's 42 OK?\n\n  we'LL see" + string.printable
    assert encoder.encode(text).tolist() == by_itself(backend, text)


def of_first_added(**fields: Any) -> Callable[[Any], None]:
    return lambda parsed: parsed["added_tokens"][0].update(fields)


def normalizing(kind: str) -> Callable[[Any], None]:
    return lambda parsed: parsed.update(normalizer={"type": kind})


def splitting(*splits: Any) -> Callable[[Any], None]:
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return lambda parsed: parsed.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, last]})


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


@pytest.mark.parametrize(
    "change",
    [
        of_first_added(lstrip=True),
        of_first_added(rstrip=True),
        of_first_added(single_word=True),
        of_first_added(normalized=True),
        normalizing("Lowercase"),
        lambda parsed: parsed["pre_tokenizer"].update(add_prefix_space=True),
        lambda parsed: parsed["pre_tokenizer"].update(use_regex=False),
        lambda parsed: parsed.update(pre_tokenizer=None),
        splitting(split(r"\p{Han}|.")),
        splitting(split(r"(a)|[\s\S]")),
        splitting(split(r"\S+|\s+", "MergedWithPrevious")),
        splitting(split(r"\s+")),  # leaves gaps, which are pieces too
        splitting(split(r"\d"), split(r"\S+|\s+")),
        lambda parsed: parsed["model"].update(dropout=0.5),
        lambda parsed: (of_first_added(content="\u212aing", normalized=True)(parsed), normalizing("NFC")(parsed)),
    ],
)  # fmt: skip
def test_what_is_not_known_to_give_the_same_ids_is_not_used(
    change: Callable[[Any], None], tiny: Callable[..., Any]
) -> None:
    assert ascii_encoder(tiny(change)) is None


def test_no_more_pieces_are_remembered_than_there_is_room_for(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascii_encoding, "MAX_PIECES", 50)
    backend = tiny()
    encoder = AsciiEncoder(backend, re.compile(r"\w+|\W+", re.ASCII))
    text = " ".join(f"{word:x}" for word in range(500)) + "x" * 1000
    encoder.encode(text)
    kept = encoder._ids
    assert 0 < len(kept) <= 50
    assert max(map(len, kept)) <= ascii_encoding.MAX_PIECE


@pytest.mark.parametrize("text", ["plain", "naïve", "é" * 3000, "a b\n" * (UNLOCKED // 4), "x" * (UNLOCKED - 1)])
def test_a_text_of_any_kind_and_length_has_the_same_ids(text: str) -> None:
    encoder, backend = TextEncoder(tokenizer("qwen3")), tokenizer("qwen3").backend_tokenizer
    stop = backend.token_to_id("<|im_end|>")
    assert encoder.encode_rendered(text).tolist() == by_itself(backend, text)
    assert encoder.encode_behind(text, stop).tolist() == by_itself(backend, f"<|im_end|>{text}")[1:]
    assert encoder.encode_behind(text, None).tolist() == by_itself(backend, text)
