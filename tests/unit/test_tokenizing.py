"""Encoding, spelling and alignment with real tokenizers, ASCII encoded here, and long texts in processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.tokenizing import async_encoder
from middleware_hub.tokenizing.ascii_encoding import AsciiEncoder, ascii_encoder
from middleware_hub.tokenizing.async_encoder import AT_ONCE, PROCESSES, AsyncEncoder, TextTooLong
from middleware_hub.tokenizing.encoding import UNLOCKED, TextEncoder
from miles_router.engines.spelling import NO_CUT
from miles_router.errors import Unavailable
from miles_router.testing.tiny_tokenizer import build
from tests.support.tiers import examples
from tests.support.tokenizers import CHAT_PACKAGES, PACKAGES, tokenizer
from tests.support.waiting import until

LONGEST = 20_000_000
#: Smaller than in production, where the test is of what happens and not of how much.
SMALL, LARGER = 1 << 14, 1 << 15
WORDS = (
    "Hello",
    "  two",
    "naïve",
    "世界",
    "🚀👍🏽",
    "x</s>y",
    "\n\n",
    "<|im_end|>",
    "1234",
    "don't",
    "\t",
    "é" * 9,
    " ",
)
#: Takes minutes.
ENDLESS = "long text " * (LONGEST // 10)


def text_of(length: int) -> str:
    dice = random.Random(length)
    return " ".join(dice.choices(WORDS, k=length))[:length]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_encoder, "IN_A_THREAD", SMALL)
    monkeypatch.setattr(async_encoder, "LARGE", LARGER)


@pytest.fixture
async def encoder() -> AsyncIterator[AsyncEncoder]:
    made = AsyncEncoder(tokenizer("qwen3"), longest=LONGEST)
    async with made.lifespan():
        yield made
    await until(lambda: not processes(), "its processes have ended")


def processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends while it is looked at
            if child.status() != psutil.STATUS_ZOMBIE and "encoder_process" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
async def test_a_text_has_the_same_ids_wherever_it_is_encoded(name: str) -> None:
    backend, encoder = tokenizer(name).backend_tokenizer, AsyncEncoder(tokenizer(name), longest=LONGEST)
    async with encoder.lifespan():
        for length in (AT_ONCE, AT_ONCE + 1, SMALL + 1):
            whole = await encoder.encode_whole(text := text_of(length))
            assert whole.ids.tolist() == backend.encode(text).ids  # by the call that holds the interpreter's lock
            assert same(whole.ends, encoder.encoder.encode_whole(text).ends)
        assert len(processes()) == 1


@pytest.mark.usefixtures("bounds")
async def test_what_is_too_long_is_refused_and_counted(encoder: AsyncEncoder) -> None:
    with pytest.raises(TextTooLong, match=r"20000001 characters or ids is longer than 20000000 \(--max-text-chars\)"):
        await encoder.encode_rest("a" * (LONGEST + 1))
    with pytest.raises(TextTooLong):
        await encoder.spell_whole(range(LONGEST + 1))
    assert encoder.statistics.refused == 2
    assert not processes()


@pytest.mark.usefixtures("bounds")
async def test_work_that_nobody_waits_for_ends_and_what_waited_behind_it_is_never_begun(encoder: AsyncEncoder) -> None:
    tasks = [asyncio.ensure_future(encoder.encode_whole(ENDLESS)) for _ in range(PROCESSES + 2)]
    await until(lambda: len(processes()) == PROCESSES, "as many run as may")
    busy = processes()
    assert encoder.statistics.numbers()["pending"] == PROCESSES + 2
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: not any(each.is_running() for each in busy), "their processes have ended")
    assert encoder.statistics.numbers() == {"pending": 0, "abandoned": PROCESSES + 2, "refused": 0}
    assert len((await encoder.encode_whole(text_of(SMALL + 1))).ids)  # and another one does the next
    assert len(processes()) == 1


@pytest.mark.usefixtures("bounds")
async def test_a_process_is_kept_unless_its_text_was_large(encoder: AsyncEncoder) -> None:
    await encoder.encode_whole(text_of(SMALL + 1))
    (kept,) = processes()
    await encoder.encode_whole(text_of(SMALL + 1))
    assert processes() == [kept]
    await encoder.encode_whole("a" * (LARGER + 1))
    assert not processes()


@pytest.mark.usefixtures("bounds")
async def test_a_process_that_ends_by_itself_fails_its_own_text_alone(encoder: AsyncEncoder) -> None:
    task = asyncio.ensure_future(encoder.encode_whole(ENDLESS))
    await until(processes, "it runs")
    processes()[0].send_signal(signal.SIGKILL)
    with pytest.raises(Unavailable):
        await task
    assert len((await encoder.encode_whole(text_of(SMALL + 1))).ids)


NAMES = sorted(PACKAGES)
CUT = None  # in expectations: NO_CUT


@cache
def _encoder(name: str) -> TextEncoder:
    return TextEncoder(tokenizer(name))


def ids(name: str, *tokens: str) -> list[int]:
    backend = tokenizer(name).backend_tokenizer
    found = [backend.token_to_id(token) for token in tokens]
    assert None not in found, tokens
    return found


def aligned(name: str, tokens: list[int], text: str, **how: Any) -> tuple[str, list[int | None], int, bool]:
    found = _encoder(name).align(tokens, text, **{"skip_special": True, **how})
    ends = [None if end == NO_CUT else int(end) for end in found.ends]
    return found.text, ends, found.shown_chars, found.exact


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["Hello", " Hello", "a\n\nb", "naïve 世界 🚀👍🏽", "  two", "\t", "x</s>y", "é" * 30, " "]
)
def test_a_continuation_decodes_to_itself_behind_any_text(name: str, text: str) -> None:
    backend = tokenizer(name).backend_tokenizer
    before = backend.encode("Once 1").ids
    rest = _encoder(name).encode_rest(text)
    if name == "llama2" and "</s>" in text:
        text = text.replace("</s>", "</s> ")  # its own dummy prefix behind a special token, as in any text
    assert backend.decode([*before, *rest.ids], skip_special_tokens=False).endswith(f"Once 1{text}")
    assert rest.ends[-1] in (len(text), len(text.replace("</s> ", "</s>")))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60))
@given(text=st.text(max_size=30), cut=st.integers(0, 30))
def test_ends_say_where_a_text_can_be_cut(name: str, text: str, cut: int) -> None:
    encoded = _encoder(name).encode_rest(text)
    cuts = [(index + 1, int(end)) for index, end in enumerate(encoded.ends) if end != NO_CUT]
    assert len(encoded.ends) == len(encoded.ids)
    assert [end for _, end in cuts] == sorted(end for _, end in cuts)
    again = _encoder(name).encode_rest(text[: cuts[cut % len(cuts)][1]] if cuts else "")
    assert again.ends.tolist()[-1:] == ([cuts[cut % len(cuts)][1]] if cuts and cuts[cut % len(cuts)][1] else [])


@pytest.mark.parametrize("name", [*NAMES, *sorted(CHAT_PACKAGES)])
@settings(max_examples=examples(60))
@given(places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=30))
def test_ids_have_the_text_that_the_tokenizer_decodes(name: str, places: list[float]) -> None:
    loaded, added = tokenizer(name), sorted(tokenizer(name).backend_tokenizer.get_added_tokens_decoder())
    size = loaded.backend_tokenizer.get_vocab_size(with_added_tokens=True)
    sampled = [added[int(10 * each * len(added))] if each < 0.1 else int(each * size) for each in places]
    assert _encoder(name).text_of(sampled) == loaded.decode(sampled, skip_special_tokens=False)


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


#: Those whose regular expressions have a form in ASCII here.
FAST = ("qwen3", "gptoss")
PIECES = [
    "'ll",
    "'S",
    " the",
    "Hello",
    "42",
    "\r\n",
    "\n\n ",
    " ",
    "==",
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
        of_first_added(single_word=True),
        of_first_added(normalized=True),
        normalizing("Lowercase"),
        lambda parsed: parsed["pre_tokenizer"].update(add_prefix_space=True),
        lambda parsed: parsed.update(pre_tokenizer=None),
        splitting(split(r"\p{Han}|.")),
        splitting(split(r"(a)|[\s\S]")),
        splitting(split(r"\S+|\s+", "MergedWithPrevious")),
        splitting(split(r"\d"), split(r"\S+|\s+")),
        lambda parsed: parsed["model"].update(dropout=0.5),
        lambda parsed: (of_first_added(content="\u212aing", normalized=True)(parsed), normalizing("NFC")(parsed)),
    ],
)  # fmt: skip
def test_what_is_not_known_to_give_the_same_ids_is_not_used(
    change: Callable[[Any], None], tiny: Callable[..., Any]
) -> None:
    assert ascii_encoder(tiny(change)) is None


@pytest.mark.parametrize("text", ["plain", "naïve", "é" * 3000, "a b\n" * (UNLOCKED // 4), "x" * (UNLOCKED - 1)])
def test_a_text_of_any_kind_and_length_has_the_same_ids(text: str) -> None:
    encoder, backend = TextEncoder(tokenizer("qwen3")), tokenizer("qwen3").backend_tokenizer
    stop = backend.token_to_id("<|im_end|>")
    assert encoder.encode_rendered(text).tolist() == by_itself(backend, text)
    assert encoder.encode_behind(text, stop).tolist() == by_itself(backend, f"<|im_end|>{text}")[1:]
    assert encoder.encode_behind(text, None).tolist() == by_itself(backend, text)
