"""Encode text to ids, with the characters that each id stands for. The ids are exactly the ids that an engine makes of
a whole text, or of a text that continues known ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.tokenizing.alignment import Alignment, align
from middleware_hub.tokenizing.ascii_encoding import ascii_encoder
from miles_router.engines.spelling import NO_CUT, ByteLevelSpeller, Ends, Spelling, speller_for
from miles_router.errors import ConfigError, InternalError
from miles_router.trajectory.pieces import Tokens

#: Texts that are put in front of a continuation where a tokenizer treats the start of a text specially. The first
#: anchor is used whose end no token crosses; a line break merges with almost nothing.
ANCHORS = ("\n", "\n\n", ".", "0", "a", "é")


#: Length in characters from which a text is encoded without the interpreter's lock; releasing it has a small cost.
UNLOCKED = 4096


class Encoding(NamedTuple):
    """The ids of a text (int32) and the end of each. An end is the number of characters up to and including the token,
    or `NO_CUT`."""

    ids: Tokens
    ends: Ends


class InexactTokenizer(InternalError):
    """This tokenizer cannot encode the continuation without changing the text in front of it."""


class TextEncoder:
    """An encoder for one model's tokenizer. Its methods may be called from threads.

    Raises:
        ConfigError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"hf_checkpoint: {type(tokenizer).__name__} has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()  # transformers does this at its first call, so engines encode without it
        backend.no_padding()
        self._backend = backend
        self._speller = speller_for(backend)
        self._ascii = ascii_encoder(backend)
        self._bos: int | None = tokenizer.bos_token_id
        self._added: dict[int, str] = {
            token: each.content for token, each in backend.get_added_tokens_decoder().items()
        }
        self._needs_anchor = self._round_trip("a") != "a" or self._round_trip(" a") != " a"

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """The contents of added tokens by id. The tokenizer matches these before any other token."""
        return self._added

    def _round_trip(self, text: str) -> str:
        spelling = self._speller.spell(self._encode(text, special=False).ids, skip_special=False)
        return text if spelling is None else spelling.text

    def encode_whole(self, text: str) -> Encoding:
        """Encode a text from its beginning, as SGLang encodes `text`. Unlike there, a text that begins with the
        beginning-of-sequence token does not get a second one."""
        encoding = self._encode(text, special=True)
        first = int(self._bos is not None and encoding.ids[:2] == [self._bos, self._bos])
        return self._encoding(encoding, first, 0, text)

    def encode_rendered(self, text: str) -> Tokens:
        """Return the ids of a text that a chat template wrote; no special tokens are added."""
        return self._ids(text)

    def encode_rest(self, text: str) -> Encoding:
        """Encode a text that continues other tokens, without adding special tokens.

        Raises:
            InexactTokenizer: the tokenizer changes the start of the text, and no anchor prevents that.
        """
        if not text:
            return Encoding(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint32))
        if not self._needs_anchor:
            return self._encoding(self._encode(text, special=False), 0, 0, text)
        for anchor in ANCHORS:
            encoding = self._encode(anchor + text, special=False)
            offsets = encoding.offsets
            first = sum(end <= len(anchor) for _, end in offsets)
            if first < len(offsets) and offsets[first][0] == len(anchor):
                return self._encoding(encoding, first, len(anchor), text)
        raise InexactTokenizer("the tokenizer cannot encode a continuation without changing its first characters")

    def encode_behind(self, text: str, token: int | None) -> Tokens:
        """Return the ids of a text that follows other tokens. `token` is the last of these, or None if unknown.

        Raises:
            InexactTokenizer: the tokenizer changes the start of the text, and no anchor prevents that.
        """
        if token is not None and token in self._added and text:
            ids = self._ids(self._added[token] + text)
            if ids[0] == token:
                return ids[1:]
        return self.encode_rest(text).ids if self._needs_anchor else self._ids(text)

    def spell_whole(self, ids: Sequence[int]) -> Spelling:
        """Return the text of ids from the beginning of a text, decoded as the engine does, with special tokens
        visible."""
        # Unlike `decode`, a batch releases the interpreter's lock.
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=False)
        spelling = self._speller.spell(ids, skip_special=False)
        if spelling is not None and spelling.text == text:
            return spelling
        if spelling is not None and spelling.text == f" {text}":  # decoding drops the space that encoding prepends
            ends = np.where(spelling.ends == NO_CUT, NO_CUT, np.maximum(spelling.ends, 1) - 1)
            return Spelling(text, ends.astype(np.uint32))
        ends = np.full(len(ids), NO_CUT, dtype=np.uint32)
        ends[-1:] = len(text)
        return Spelling(text, ends)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids as the tokenizer decodes them, with special tokens."""
        if isinstance(self._speller, ByteLevelSpeller):  # five times as fast as the tokenizer
            return self._speller.text_of(ids)
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def align(
        self,
        ids: Sequence[int],
        text: str,
        *,
        skip_special: bool,
        stop: int | str | None = None,
        no_stop_trim: bool = False,
    ) -> Alignment:
        return align(self._speller, ids, text, skip_special=skip_special, stop=stop, no_stop_trim=no_stop_trim)

    def _ids(self, text: str) -> Tokens:
        if self._ascii is not None and len(text) < UNLOCKED and text.isascii():
            return self._ascii.encode(text)
        return np.array(self._encode(text, special=False).ids, dtype=np.int32)

    def _encode(self, text: str, *, special: bool) -> Any:
        """Return a `tokenizers.Encoding`. Unlike `encode`, `encode_batch` releases the interpreter's lock; the result
        is the same."""
        if len(text) < UNLOCKED:
            return self._backend.encode(text, add_special_tokens=special)
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=special)
        return encoding

    def _encoding(self, encoding: Any, first: int, begin: int, text: str) -> Encoding:
        """Return the ids from index `first` on. They encode `text`, which begins at character `begin` of the encoded
        text."""
        ids = encoding.ids[first:]
        spelling = self._speller.spell(ids, skip_special=False)
        if spelling is not None and spelling.text == text:
            return Encoding(np.array(ids, dtype=np.int32), spelling.ends)
        offsets = [(start - begin, end - begin) for start, end in encoding.offsets[first:]]
        return Encoding(np.array(ids, dtype=np.int32), _ends_of(offsets, len(text)))


def _ends_of(offsets: Sequence[tuple[int, int]], length: int) -> Ends:
    """Return the ends that a tokenizer's character offsets allow. A text may be cut only where one token ends exactly
    where the next begins. Tokens without characters (which a template adds) end where the token before them ends."""
    ends = np.full(len(offsets), NO_CUT, dtype=np.uint32)
    following = length
    for index in range(len(offsets) - 1, -1, -1):
        start, end = offsets[index]
        if start == end:
            ends[index] = following
            continue
        if end == following:
            ends[index] = end
        following = start
    return ends
