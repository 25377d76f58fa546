"""ASCII texts to ids, several times as fast as a tokenizer encodes them, and with the same ids.

A byte-level tokenizer cuts a text into pieces by a regular expression, and makes ids of each piece by itself. In ASCII
a class of characters is a list of some, so that Python's `re` cuts the same pieces. What the tokenizer's own model
makes of a piece is remembered: the same words come again.
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

#: Normalizers that change no ASCII.
HARMLESS = ("NFC", "NFD", "NFKC", "NFKD")
#: The regular expression of GPT-2, which `ByteLevel` uses by itself (tokenizers, `byte_level.rs`).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: What properties of characters mean in ASCII.
PROPERTIES = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
PROPERTY = re.compile(r"\\p\{(\w+)\}")
CLASS_OR_PROPERTY = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\p\{\w+\}")
#: Pieces whose ids are remembered, and the characters of each.
MAX_PIECES, MAX_PIECE = 1 << 15, 64
#: Characters of each kind that regular expressions tell apart, all of whose triples are tried.
KINDS = " \t\naAs'0."


class AsciiEncoder:
    """Encodes for one `tokenizers.Tokenizer`; made by `ascii_encoder`."""

    def __init__(self, backend: Any, pattern: re.Pattern[str]) -> None:
        self._added = {each.content: _spelled(token) for token, each in backend.get_added_tokens_decoder().items()}
        longest_first = "|".join(map(re.escape, sorted(self._added, key=len, reverse=True)))
        self._parts = re.compile(f"({longest_first or '$.'})").split  # `$.` is nowhere
        self._pieces = pattern.findall
        self._ids = _PieceIds(backend.model)

    def encode(self, text: str) -> Tokens:
        """The ids of an ASCII text, no special tokens added."""
        ids: list[bytes] = []
        for place, part in enumerate(self._parts(text)):
            if place % 2:
                ids.append(self._added[part])
            else:
                ids += map(self._ids.__getitem__, self._pieces(part))
        return np.frombuffer(b"".join(ids), dtype=np.int32)


def _spelled(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


class _PieceIds(dict[str, bytes]):
    """The ids of each piece as an array has them, found out at its first use."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._letters = {byte: letter for letter, byte in byte_of_character().items()}

    def __missing__(self, piece: str) -> bytes:
        ids = _spelled(*(token.id for token in self._model.tokenize(piece.translate(self._letters))))
        if len(piece) <= MAX_PIECE:
            if len(self) >= MAX_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def ascii_encoder(backend: Any) -> AsciiEncoder | None:
    """The encoder for a tokenizer; None where its kind is not known here, or where the two do not agree on a trial."""
    pattern = _pattern(backend)
    if pattern is None or not _finds_added_tokens_as_they_are(backend):
        return None
    encoder = AsciiEncoder(backend, pattern)
    trial = "".join(map("".join, product(KINDS, repeat=3))) + "".join(map(chr, range(128)))
    return encoder if encoder.encode(trial).tolist() == backend.encode(trial, add_special_tokens=False).ids else None


def _pattern(backend: Any) -> re.Pattern[str] | None:
    """What cuts ASCII into the pieces that the tokenizer cuts it into."""
    normalizer, steps = _settings(backend.normalizer), _settings(backend.pre_tokenizer)
    if normalizer and normalizer["type"] not in HARMLESS:
        return None
    *splits, last = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or len(splits) + last["use_regex"] != 1:
        return None
    return _in_ascii(_isolating(splits[0]) if splits else GPT2)


def _settings(part: Any) -> Mapping[str, Any]:
    """A part of a tokenizer as its `tokenizer.json` has it, which is also how it is pickled."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _isolating(split: Mapping[str, Any]) -> str | None:
    """The regular expression of a step that makes a piece of each match."""
    if split.get("type") != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def _in_ascii(pattern: str | None) -> re.Pattern[str] | None:
    """The same for Python's `re`, which knows no properties; None for one with others than those here."""

    def replaced(found: re.Match[str]) -> str:
        inside = PROPERTY.sub(lambda name: PROPERTIES[name[1]], found[0])
        return inside if inside.startswith("[") else f"[{inside}]"

    try:
        compiled = re.compile(CLASS_OR_PROPERTY.sub(replaced, pattern or "("), re.ASCII)
    except (KeyError, re.error):
        return None
    return compiled if not compiled.groups else None


def _finds_added_tokens_as_they_are(backend: Any) -> bool:
    """Whether a text is first cut at the added tokens, all at once, with nothing taken or asked of what stands around
    them."""
    added = [each for each in backend.get_added_tokens_decoder().values() if _is_found_in_ascii(each)]
    plain = not any(each.single_word or each.lstrip or each.rstrip or not each.content for each in added)
    plain = plain and all(each.content.isascii() for each in added)
    return plain and len({each.normalized for each in added}) <= 1 and not backend.encode_special_tokens


def _is_found_in_ascii(added: Any) -> bool:
    """Whether an added token may stand in ASCII. A normalizer may make ASCII of it, as of the sign for kelvin."""
    return (unicodedata.normalize("NFKC", added.content) if added.normalized else added.content).isascii()
