"""Text to ids and, for each id, the characters it stands for: exactly what an engine would make of a whole text, and of
a text that continues ids it already has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.tokenizing.spelling import NO_CUT, Aligned, Ends, Spelled, align, speller_for
from miles_router.errors import ConfigError, RouterError

#: Texts in front of which a continuation is encoded where a tokenizer treats the beginning of a text specially. The
#: first that no token spans serves; a line break merges with next to nothing.
ANCHORS = ("\n", "\n\n", ".", "0", "a", "é")


class Encoded(NamedTuple):
    """`ids` of a text and, for each, the characters of it up to and with that id (`NO_CUT` where it cannot be cut)."""

    ids: list[int]
    ends: Ends


class InexactTokenizer(RouterError):
    """This tokenizer cannot encode this continuation without changing the text in front of it."""

    type = "inexact_tokenizer"


class TextEncoder:
    """One model's tokenizer, as the cache needs it. Encoding is thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"hf_checkpoint: {type(tokenizer).__name__} has no fast tokenizer (tokenizer.json)")
        self._backend = backend
        self._speller = speller_for(backend)
        self._bos: int | None = tokenizer.bos_token_id
        self._needs_anchor = self._spells("a") != "a" or self._spells(" a") != " a"

    def _spells(self, text: str) -> str:
        spelled = self._speller.spell(self._backend.encode(text, add_special_tokens=False).ids, skip_special=False)
        return text if spelled is None else spelled.text

    def encode_whole(self, text: str) -> Encoded:
        """A text from its beginning, as SGLang encodes `text`, except that a text which begins with the beginning-of-
        sequence token does not get a second one."""
        encoding = self._backend.encode(text)
        ids, offsets = encoding.ids, encoding.offsets
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            ids, offsets = ids[1:], offsets[1:]
        return Encoded(ids, self._ends(ids, offsets, text))

    def encode_rest(self, text: str) -> Encoded:
        """A text that continues other tokens: no special tokens added, nothing put in front.

        Raises:
            InexactTokenizer: no way was found to encode it so.
        """
        if not text:
            return Encoded([], np.zeros(0, dtype=np.uint32))
        if not self._needs_anchor:
            encoding = self._backend.encode(text, add_special_tokens=False)
            return Encoded(encoding.ids, self._ends(encoding.ids, encoding.offsets, text))
        for anchor in ANCHORS:
            encoding = self._backend.encode(anchor + text, add_special_tokens=False)
            first = sum(end <= len(anchor) for _, end in encoding.offsets)
            offsets = [(start - len(anchor), end - len(anchor)) for start, end in encoding.offsets[first:]]
            if offsets and offsets[0][0] == 0:
                ids = encoding.ids[first:]
                return Encoded(ids, self._ends(ids, offsets, text))
        raise InexactTokenizer("the tokenizer cannot encode a continuation by itself")

    def spell_given(self, ids: Sequence[int]) -> Spelled:
        """The text of ids that a client sent: the engine's own decoding, special tokens shown."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        spelled = self._speller.spell(ids, skip_special=False)
        if spelled is not None and spelled.text == text:
            return spelled
        if spelled is not None and spelled.text == f" {text}":  # decoding drops the space a text was given in front
            ends = np.where(spelled.ends == NO_CUT, NO_CUT, np.maximum(spelled.ends, 1) - 1)
            return Spelled(text, ends.astype(np.uint32))
        ends = np.full(len(ids), NO_CUT, dtype=np.uint32)
        ends[-1:] = len(text)
        return Spelled(text, ends)

    def align(
        self,
        ids: Sequence[int],
        shown: str,
        *,
        skip_special: bool,
        stop: int | str | None = None,
        no_stop_trim: bool = False,
    ) -> Aligned:
        """See `spelling.align`."""
        return align(self._speller, ids, shown, skip_special=skip_special, stop=stop, no_stop_trim=no_stop_trim)

    def _ends(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> Ends:
        spelled = self._speller.spell(ids, skip_special=False)
        if spelled is not None and spelled.text == text:
            return spelled.ends
        return ends_from_offsets(offsets, len(text))


def ends_from_offsets(offsets: Sequence[tuple[int, int]], length: int) -> Ends:
    """Cuts from a tokenizer's own character offsets: only where one token ends exactly where the next begins. Tokens
    without characters (those a template adds) have the place of the one before."""
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
