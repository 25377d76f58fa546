"""Text to ids and, for each id, the characters it stands for: exactly what an engine makes of a whole text, and of a
text that continues ids it already has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.tokenizing.alignment import Alignment, align
from middleware_hub.tokenizing.ascii_encoding import ascii_encoder
from miles_router.engines.spelling import NO_CUT, Ends, Spelling, speller_for
from miles_router.errors import ConfigError, RouterError
from miles_router.trajectory.pieces import Tokens

#: Texts in front of which a continuation is encoded where a tokenizer treats the beginning of a text specially. The
#: first that no token spans serves; a line break merges with next to nothing.
ANCHORS = ("\n", "\n\n", ".", "0", "a", "é")


#: Characters from which on a text is encoded without the interpreter's lock, which costs a little.
UNLOCKED = 4096


class Encoding(NamedTuple):
    """The ids of a text, int32, and for each the characters of the text up to and with it, or `NO_CUT`."""

    ids: Tokens
    ends: Ends


class InexactTokenizer(RouterError):
    """This tokenizer cannot encode this continuation without changing the text in front of it."""

    type = "inexact_tokenizer"


class TextEncoder:
    """One model's tokenizer. Its methods may be called in threads.

    Raises:
        ConfigError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"hf_checkpoint: {type(tokenizer).__name__} has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()  # as transformers does at its first call, which is how an engine encodes
        backend.no_padding()
        self._backend = backend
        self._speller = speller_for(backend)
        self._ascii = ascii_encoder(backend)
        self._bos: int | None = tokenizer.bos_token_id
        self._added: dict[int, str] = {
            token: each.content for token, each in backend.get_added_tokens_decoder().items()
        }
        self._needs_anchor = self._spells("a") != "a" or self._spells(" a") != " a"

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """The texts of the tokens that are found in a text before any other, by their ids."""
        return self._added

    def _spells(self, text: str) -> str:
        spelling = self._speller.spell(self._encode(text, special=False).ids, skip_special=False)
        return text if spelling is None else spelling.text

    def encode_whole(self, text: str) -> Encoding:
        """A text from its beginning, as SGLang encodes `text`, except that a text which begins with the beginning-of-
        sequence token does not get a second one."""
        encoding = self._encode(text, special=True)
        first = int(self._bos is not None and encoding.ids[:2] == [self._bos, self._bos])
        return self._encoding(encoding, first, 0, text)

    def encode_rendered(self, text: str) -> Tokens:
        """The ids of a text from its beginning that a chat template has written: no special tokens are added."""
        return self._ids(text)

    def encode_rest(self, text: str) -> Encoding:
        """A text that continues other tokens: no special tokens added, nothing put in front.

        Raises:
            InexactTokenizer: no way was found to encode it so.
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
        raise InexactTokenizer("the tokenizer cannot encode a continuation by itself")

    def encode_behind(self, text: str, token: int | None) -> Tokens:
        """The ids of a text that continues others, the last of which is `token` if it is known.

        Raises:
            InexactTokenizer: no way was found to encode it so.
        """
        if token is not None and token in self._added and text:
            ids = self._ids(self._added[token] + text)
            if ids[0] == token:
                return ids[1:]
        return self.encode_rest(text).ids if self._needs_anchor else self._ids(text)

    def spell_whole(self, ids: Sequence[int]) -> Spelling:
        """The text of ids that begin a text: the engine's own decoding, special tokens shown."""
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=False)  # which lets other threads run
        spelling = self._speller.spell(ids, skip_special=False)
        if spelling is not None and spelling.text == text:
            return spelling
        if spelling is not None and spelling.text == f" {text}":  # decoding drops the space a text was given in front
            ends = np.where(spelling.ends == NO_CUT, NO_CUT, np.maximum(spelling.ends, 1) - 1)
            return Spelling(text, ends.astype(np.uint32))
        ends = np.full(len(ids), NO_CUT, dtype=np.uint32)
        ends[-1:] = len(text)
        return Spelling(text, ends)

    def align(
        self,
        ids: Sequence[int],
        text: str,
        *,
        skip_special: bool,
        stop: int | str | None = None,
        no_stop_trim: bool = False,
    ) -> Alignment:
        """See `alignment.align`."""
        return align(self._speller, ids, text, skip_special=skip_special, stop=stop, no_stop_trim=no_stop_trim)

    def _ids(self, text: str) -> Tokens:
        """The ids of a text, no special tokens added."""
        if self._ascii is not None and len(text) < UNLOCKED and text.isascii():
            return self._ascii.encode(text)
        return np.array(self._encode(text, special=False).ids, dtype=np.int32)

    def _encode(self, text: str, *, special: bool) -> Any:
        """A `tokenizers.Encoding`. `encode` holds the interpreter's lock until it is done, `encode_batch` does not;
        what they give is the same."""
        if len(text) < UNLOCKED:
            return self._backend.encode(text, add_special_tokens=special)
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=special)
        return encoding

    def _encoding(self, encoding: Any, first: int, begin: int, text: str) -> Encoding:
        """The ids from number `first` on of a `tokenizers.Encoding`, which encode `text` from character `begin` on."""
        ids = encoding.ids[first:]
        spelling = self._speller.spell(ids, skip_special=False)
        if spelling is not None and spelling.text == text:
            return Encoding(np.array(ids, dtype=np.int32), spelling.ends)
        offsets = [(start - begin, end - begin) for start, end in encoding.offsets[first:]]
        return Encoding(np.array(ids, dtype=np.int32), _ends_of(offsets, len(text)))


def _ends_of(offsets: Sequence[tuple[int, int]], length: int) -> Ends:
    """The ends that a tokenizer's character offsets allow: a text is cut only where one token ends exactly where the
    next begins. Tokens without characters (those that a template adds) end where the one before does."""
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
