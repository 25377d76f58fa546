"""Which characters each token of a sequence spells.

Nothing here is assumed of a tokenizer: a spelling is used only where it reproduces the text that the engine itself
gave, and a generation it does not reproduce is treated as one indivisible run.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ends = npt.NDArray[np.uint32]
#: In `Ends`: the text cannot be cut behind this token (it stops inside a character, or nobody knows where it stops).
NO_CUT = 0xFFFFFFFF


class Spelled(NamedTuple):
    """`text`, and for each token the number of characters spelled up to and with it, or `NO_CUT`."""

    text: str
    ends: Ends


class Speller(Protocol):
    """Spells ids the way an engine shows them."""

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelled | None:
        """The text of `ids` behind other text; None if this tokenizer's tokens have no spelling of their own."""
        ...

    def special(self, token: int) -> str | None:
        """The content of a special token; None for every other."""
        ...


def speller_for(backend: Any) -> Speller:
    """The speller of a `tokenizers.Tokenizer`, told by its decoder."""
    description = str(backend.decoder)
    if description.startswith("ByteLevel("):
        return ByteLevelSpeller(backend)
    if "ByteFallback()" in description and 'Replace(pattern=String("▁"), content=" ")' in description:
        return ByteFallbackSpeller(backend)
    return UnknownSpeller(backend)


class AddedTokens:
    """The tokens that a tokenizer has beside those of its model."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._special, self._added = added_tokens(backend)
        self._size: int = backend.get_vocab_size(with_added_tokens=True)

    def shown_as(self, ids: Sequence[int]) -> Sequence[int]:
        """Ids behind the tokenizer's last, which a model with a padded vocabulary can sample, are shown as id 0 (SGLang
        0.5.23, `DetokenizerManager._clamp_decode_ids`)."""
        if not len(ids) or max(ids) < self._size:
            return ids
        return [token if token < self._size else 0 for token in ids]

    def special(self, token: int) -> str | None:
        """See `Speller`."""
        return self._added[token] if token in self._special else None


class UnknownSpeller(AddedTokens):
    """For decoders nobody has taken apart: every generation is one run."""

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelled | None:
        return None


class ByteLevelSpeller(AddedTokens):
    """Byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek): each token is a run of bytes, text is their UTF-8."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self._bytes: dict[int, bytes] = {}

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelled | None:
        parts = [b"" if skip_special and i in self._special else self._token(i) for i in self.shown_as(ids)]
        joined = b"".join(parts)
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        try:
            return Spelled(joined.decode("utf-8"), _character_ends(joined, lengths))
        except UnicodeDecodeError:
            return _spell_invalid(parts)

    def _token(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spelled_out(token)
        return known

    def _spelled_out(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token) or ""
        table = byte_of_character()
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


class ByteFallbackSpeller(AddedTokens):
    """SentencePiece BPE (Llama 2, Mistral, Gemma): tokens are text with ▁ for space, and <0xNN> for bytes without one.

    A run of byte tokens is one UTF-8 string if it is valid and one U+FFFD a token if not, so it cannot be cut inside.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self._pieces: dict[int, str | int] = {}

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelled | None:
        parts: list[str] = []
        ends: list[int] = []
        run: list[int] = []
        position = 0
        for token in self.shown_as(ids):
            piece = self._piece(token)
            if isinstance(piece, int):
                run.append(piece)
                continue
            position = _close_run(run, parts, ends, position)
            parts.append("" if skip_special and token in self._special else piece)
            position += len(parts[-1])
            ends.append(position)
        _close_run(run, parts, ends, position)
        return Spelled("".join(parts), np.array(ends, dtype=np.uint32))

    def _piece(self, token: int) -> str | int:
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._spelled_out(token)
        return known

    def _spelled_out(self, token: int) -> str | int:
        text: str = self._added.get(token) or self._backend.id_to_token(token) or ""
        if token not in self._added and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return int(text[3:5], 16)
        return text.replace("▁", " ")


def _close_run(run: list[int], parts: list[str], ends: list[int], position: int) -> int:
    if not run:
        return position
    try:
        text = bytes(run).decode("utf-8")
    except UnicodeDecodeError:
        text = "\N{REPLACEMENT CHARACTER}" * len(run)
    parts.append(text)
    ends += [NO_CUT] * (len(run) - 1)
    ends.append(position + len(text))
    run.clear()
    return position + len(text)


def _character_ends(joined: bytes, lengths: npt.NDArray[np.int64]) -> Ends:
    """Characters up to each token's last byte; `NO_CUT` where that byte is inside a character."""
    data = np.frombuffer(joined, dtype=np.uint8)
    begins = (data & 0xC0) != 0x80
    upto = np.concatenate([[0], np.cumsum(begins)])
    boundary = np.concatenate([begins, [True]])
    stops = np.cumsum(lengths)
    return np.where(boundary[stops], upto[stops], NO_CUT).astype(np.uint32)


def _spell_invalid(parts: Sequence[bytes]) -> Spelled:
    """The same for bytes that are not UTF-8 throughout, where each stray sequence shows as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    ends = np.empty(len(parts), dtype=np.uint32)
    position = 0
    for index, part in enumerate(parts):
        text = decoder.decode(part, final=index == len(parts) - 1)
        texts.append(text)
        position += len(text)
        ends[index] = NO_CUT if decoder.getstate()[0] else position
    return Spelled("".join(texts), ends)


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, reversed (openai/gpt-2, `encoder.py`, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def added_tokens(backend: Any) -> tuple[frozenset[int], dict[int, str]]:
    """Ids of special tokens, and the verbatim spelling of every added token."""
    table = backend.get_added_tokens_decoder()
    special = frozenset(token for token, added in table.items() if added.special)
    return special, {token: added.content for token, added in table.items()}


class Aligned(NamedTuple):
    """A generation's text for the tree: `text` begins with what the client saw (`shown` characters of it) and goes on
    with the spelling of the hidden tail; `ends` as in `Spelled`; `exact` is False for an indivisible run."""

    text: str
    ends: Ends
    shown: int
    exact: bool


def align(
    speller: Speller,
    ids: Sequence[int],
    shown: str,
    *,
    skip_special: bool,
    stop: int | str | None = None,
    no_stop_trim: bool = False,
) -> Aligned:
    """Hold sampled `ids` against the text the client was shown for them.

    The hidden tail (a trimmed stop token or stop string, special tokens at the end, bytes of an unfinished character)
    is spelled verbatim behind the shown text. Special tokens left out between shown characters have no width.
    `stop` is what ended the generation, a token or a string.
    """
    seen = speller.spell(ids, skip_special=skip_special)
    if seen is None or not seen.text.startswith(shown):
        hidden = skip_special, None if no_stop_trim else stop
        return _indivisible(speller, ids, shown, reusable=not isinstance(stop, str), hidden=hidden)
    if not skip_special:
        return Aligned(seen.text, seen.ends, len(shown), exact=True)
    first_hidden = _first_hidden(seen.ends, len(shown))
    verbatim = speller.spell(ids[first_hidden:], skip_special=False)
    assert verbatim is not None
    width = int(seen.ends[first_hidden - 1]) if first_hidden else 0
    tail = np.where(verbatim.ends == NO_CUT, NO_CUT, verbatim.ends + np.uint32(width)).astype(np.uint32)
    return Aligned(
        seen.text[:width] + verbatim.text, np.concatenate([seen.ends[:first_hidden], tail]), len(shown), exact=True
    )


def _first_hidden(ends: Ends, shown: int) -> int:
    """The index behind the token that spells the last shown character."""
    if not shown:
        return 0
    reaching = np.flatnonzero((ends != NO_CUT) & (ends >= shown))
    return int(reaching[0]) + 1 if len(reaching) else len(ends)


def _indivisible(
    speller: Speller, ids: Sequence[int], shown: str, *, reusable: bool, hidden: tuple[bool, int | str | None]
) -> Aligned:
    """A generation that is reused whole, without the stop token behind it, or, where a stop string may have cut its
    last token, not at all. `hidden`: whether special tokens are, and the token that is."""
    ends = np.full(len(ids), NO_CUT, dtype=np.uint32)
    all_special, trimmed = hidden
    keep = len(ids)
    while keep and (ids[keep - 1] == trimmed or (all_special and speller.special(ids[keep - 1]) is not None)):
        keep -= 1
        trimmed = None
    text = shown
    if reusable and keep:
        ends[keep - 1] = len(shown)
        for index in range(keep, len(ids)):
            text += speller.special(ids[index]) or ""
            ends[index] = len(text)
    return Aligned(text, ends, len(shown), exact=False)
