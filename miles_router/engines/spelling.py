"""Spellers that map each token of a sequence to the characters it spells.

A spelling is used only if it reproduces the engine's own text exactly, whatever the tokenizer. A generation that no
spelling reproduces is one indivisible run.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Ends = npt.NDArray[np.uint32]
#: In `Ends`: the text cannot be cut behind this token, since it ends inside a character or at an unknown position.
NO_CUT = 0xFFFFFFFF
P = TypeVar("P")


class Spelling(NamedTuple):
    """A text, and for each token the number of characters up to its end, or `NO_CUT`."""

    text: str
    ends: Ends


def moved(ends: Ends, chars: int) -> Ends:
    """Return the ends shifted by `chars` characters."""
    return np.where(ends == NO_CUT, NO_CUT, ends + np.uint32(chars)).astype(np.uint32)


class Speller(Protocol):
    """A decoder that spells ids the way an engine shows them."""

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelling | None:
        """Return the text of `ids` behind other text; None if this tokenizer's tokens have no text of their own."""
        ...

    def special(self, token: int) -> str | None:
        """Return the content of a special token; None for any other token."""
        ...

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that one token spells behind other text; None if unknown."""
        ...


def speller_for(backend: Any) -> Speller:
    """Return the speller for a `tokenizers.Tokenizer`, chosen by its decoder."""
    description = str(backend.decoder)
    if description.startswith("ByteLevel("):
        return ByteLevelSpeller(backend)
    if "ByteFallback()" in description and 'Replace(pattern=String("▁"), content=" ")' in description:
        return ByteFallbackSpeller(backend)
    return UnknownSpeller(backend)


class AddedTokens:
    """The added tokens of a tokenizer, which are not part of its model's vocabulary."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        table = backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, added in table.items() if added.special)
        self._added: dict[int, str] = {token: added.content for token, added in table.items()}
        self._size: int = backend.get_vocab_size(with_added_tokens=True)

    def clamped(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids with 0 in place of ids beyond the vocabulary, which a model with a padded vocabulary can
        sample. SGLang shows them like this too (0.5.23, `DetokenizerManager._clamp_decode_ids`)."""
        if not len(ids) or max(ids) < self._size:
            return ids
        return [token if token < self._size else 0 for token in ids]

    def special(self, token: int) -> str | None:
        return self._added[token] if token in self._special else None


class UnknownSpeller(AddedTokens):
    """A speller for every other decoder: it spells nothing, so each generation is one run."""

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelling | None:
        return None

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of an added token; None for any other token."""
        return self._added[token].encode() if token in self._added else None


class Pieces(dict[int, P]):
    """A cache of what each token spells, computed at its first use."""

    def __init__(self, spelled: Callable[[int], P]) -> None:
        self._compute = spelled

    def __missing__(self, token: int) -> P:
        piece = self[token] = self._compute(token)
        return piece


class ByteLevelSpeller(AddedTokens):
    """A speller for byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek): each token is a run of bytes of the UTF-8 text."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self._verbatim = Pieces(self._bytes)
        self._without_special = Pieces(lambda token: b"" if token in self._special else self._verbatim[token])

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelling | None:
        pieces = self._without_special if skip_special else self._verbatim
        parts = list(map(pieces.__getitem__, self.clamped(ids)))
        joined = b"".join(parts)
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        try:
            return Spelling(joined.decode("utf-8"), _character_ends(joined, lengths))
        except UnicodeDecodeError:
            return _spell_invalid(parts)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` behind other text, with special tokens; each invalid sequence becomes U+FFFD."""
        return b"".join(map(self._verbatim.__getitem__, self.clamped(ids))).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        return self._verbatim[token]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token) or ""
        table = byte_of_character()
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


class ByteFallbackSpeller(AddedTokens):
    """A speller for SentencePiece BPE (Llama 2, Mistral, Gemma): tokens are text with ▁ for space, or <0xNN> for a
    byte.

    A run of byte tokens is one UTF-8 string if it is valid, else one U+FFFD per token. So it cannot be cut inside.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self._pieces = Pieces(self._piece_of)

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelling | None:
        parts: list[str] = []
        ends: list[int] = []
        run: list[int] = []
        position = 0
        for token in self.clamped(ids):
            piece = self._pieces[token]
            if isinstance(piece, int):
                run.append(piece)
                continue
            position = _close_run(run, parts, ends, position)
            parts.append("" if skip_special and token in self._special else piece)
            position += len(parts[-1])
            ends.append(position)
        _close_run(run, parts, ends, position)
        return Spelling("".join(parts), np.array(ends, dtype=np.uint32))

    def bytes_of(self, token: int) -> bytes:
        piece = self._pieces[token]
        return bytes((piece,)) if isinstance(piece, int) else piece.encode()

    def _piece_of(self, token: int) -> str | int:
        """Return the token's text, or its byte as an int."""
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
    """Return the number of characters up to each token's last byte; `NO_CUT` if that byte is inside a character."""
    stops = np.cumsum(lengths)
    if joined.isascii():
        return stops.astype(np.uint32)
    data = np.frombuffer(joined, dtype=np.uint8)
    begins = (data & 0xC0) != 0x80
    upto = np.concatenate([[0], np.cumsum(begins)])
    boundary = np.concatenate([begins, [True]])
    return np.where(boundary[stops], upto[stops], NO_CUT).astype(np.uint32)


def _spell_invalid(parts: Sequence[bytes]) -> Spelling:
    """Spell bytes that are not valid UTF-8, where each invalid sequence becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    ends = np.empty(len(parts), dtype=np.uint32)
    position = 0
    for index, part in enumerate(parts):
        text = decoder.decode(part, final=index == len(parts) - 1)
        texts.append(text)
        position += len(text)
        ends[index] = NO_CUT if decoder.getstate()[0] else position
    return Spelling("".join(texts), ends)


@cache
def byte_of_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's byte-to-unicode table (openai/gpt-2, `encoder.py`,
    `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
