"""Encode ASCII texts several times as fast as the tokenizer, with the same ids.

A byte-level tokenizer splits a text by a regular expression and encodes each piece separately. In ASCII, each Unicode
property is a short list of characters, so Python's `re` can split the text into the same pieces. The tokenizer's own
model encodes each piece; the result is cached, because words repeat.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from miles_router.engines.spelling import byte_of_character
from miles_router.trajectory.pieces import Tokens

#: Normalizers that do not change ASCII text.
HARMLESS = ("NFC", "NFD", "NFKC", "NFKD")
#: The regular expression of GPT-2, the default of `ByteLevel` (tokenizers, `byte_level.rs`).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: The ASCII characters of each Unicode property.
PROPERTIES = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
PROPERTY = re.compile(r"\\p\{(\w+)\}")
CLASS_OR_PROPERTY = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\p\{\w+\}")
#: The number of pieces in the cache, and the longest piece in characters.
MAX_PIECES, MAX_PIECE = 1 << 15, 64
#: One character of each class that the expressions distinguish; the trial text has all triples of them.
KINDS = " \t\naAs'0."


class AsciiEncoder:
    """An encoder of ASCII texts for one `tokenizers.Tokenizer`. `ascii_encoder` creates it."""

    def __init__(self, backend: Any, pattern: re.Pattern[str]) -> None:
        self._added = {each.content: _packed(token) for token, each in backend.get_added_tokens_decoder().items()}
        longest_first = "|".join(map(re.escape, sorted(self._added, key=len, reverse=True)))
        self._parts = re.compile(f"({longest_first or '$.'})").split  # `$.` never matches
        self._pieces = pattern.findall
        self._ids = _PieceIds(backend.model)

    def encode(self, text: str) -> Tokens:
        """Return the ids of an ASCII text, without special tokens added."""
        ids: list[bytes] = []
        for place, part in enumerate(self._parts(text)):
            if place % 2:
                ids.append(self._added[part])
            else:
                ids += map(self._ids.__getitem__, self._pieces(part))
        return np.frombuffer(b"".join(ids), dtype=np.int32)


def _packed(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


class _PieceIds(dict[str, bytes]):
    """A cache from each piece to its ids as int32 bytes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._letters = {byte: letter for letter, byte in byte_of_character().items()}

    def __missing__(self, piece: str) -> bytes:
        ids = _packed(*(token.id for token in self._model.tokenize(piece.translate(self._letters))))
        if len(piece) <= MAX_PIECE:
            if len(self) >= MAX_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def ascii_encoder(backend: Any) -> AsciiEncoder | None:
    """Return an encoder for a tokenizer, or None if it is unsupported or encodes a trial text differently."""
    pattern = _pattern(backend)
    if pattern is None or not _splits_at_added_tokens_first(backend):
        return None
    encoder = AsciiEncoder(backend, pattern)
    trial = "".join(map("".join, product(KINDS, repeat=3))) + "".join(map(chr, range(128)))
    return encoder if encoder.encode(trial).tolist() == backend.encode(trial, add_special_tokens=False).ids else None


def _pattern(backend: Any) -> re.Pattern[str] | None:
    """Return the expression that splits ASCII text as the tokenizer does; None for an unsupported tokenizer."""
    normalizer, steps = _settings(backend.normalizer), _settings(backend.pre_tokenizer)
    if normalizer and normalizer["type"] not in HARMLESS:
        return None
    *splits, last = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or len(splits) + last["use_regex"] != 1:
        return None
    return _python_pattern(_split_pattern(splits[0]) if splits else GPT2)


def _settings(part: Any) -> Mapping[str, Any]:
    """Return the configuration of a tokenizer part, in the form of `tokenizer.json`; pickling uses the same form."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _split_pattern(split: Mapping[str, Any]) -> str | None:
    """Return the regular expression of a `Split` step that makes each match a piece, or None for another step."""
    if split.get("type") != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def _python_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Translate an expression for Python's `re`, which lacks Unicode properties; None if that is impossible."""

    def replaced(found: re.Match[str]) -> str:
        inside = PROPERTY.sub(lambda name: PROPERTIES[name[1]], found[0])
        return inside if inside.startswith("[") else f"[{inside}]"

    try:
        compiled = re.compile(CLASS_OR_PROPERTY.sub(replaced, pattern or "("), re.ASCII)
    except (KeyError, re.error):
        return None
    return compiled if not compiled.groups else None


def _splits_at_added_tokens_first(backend: Any) -> bool:
    """Return whether the tokenizer splits a text at its added tokens first, in one pass and regardless of their
    context."""
    added = [each for each in backend.get_added_tokens_decoder().values() if _can_match_ascii(each)]
    plain = not any(each.single_word or each.lstrip or each.rstrip or not each.content for each in added)
    plain = plain and all(each.content.isascii() for each in added)
    return plain and len({each.normalized for each in added}) <= 1 and not backend.encode_special_tokens


def _can_match_ascii(added: Any) -> bool:
    """Return whether an added token can match in ASCII text. Normalization may turn its content into ASCII: the Kelvin
    sign becomes `K`."""
    return (unicodedata.normalize("NFKC", added.content) if added.normalized else added.content).isascii()
