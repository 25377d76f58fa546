"""Align sampled ids with the text that an engine returned for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from miles_router.engines.spelling import NO_CUT, Ends, Speller, moved


class Alignment(NamedTuple):
    """The text of sampled tokens, and where each token ends in it.

    Attributes:
        text: the text that the client received, followed by the spelling of the hidden tail.
        ends: the end of each token, as in `Spelling`.
        shown_chars: the length of the part of `text` that the client received.
        exact: False for an indivisible run.
    """

    text: str
    ends: Ends
    shown_chars: int
    exact: bool


def align(
    speller: Speller,
    ids: Sequence[int],
    text: str,
    *,
    skip_special: bool,
    stop: int | str | None = None,
    no_stop_trim: bool = False,
) -> Alignment:
    """Align sampled `ids` with the `text` that the client received for them.

    The hidden tail is spelled verbatim behind the text. It holds a trimmed stop token or stop string, special tokens at
    the end, and bytes of an unfinished character. Special tokens that are omitted between visible characters have no
    width. Where ids and text do not match, the result is an indivisible run (`exact` is False).

    Args:
        skip_special: the text omits special tokens.
        stop: the token or string that ended the generation.
        no_stop_trim: the text includes the stop token or string.
    """
    spelling = speller.spell(ids, skip_special=skip_special)
    if spelling is None or not spelling.text.startswith(text):
        if isinstance(stop, str):  # trimming a stop string may have split the last visible token
            return _indivisible(speller, ids, text, 0)
        trimmed = None if no_stop_trim else stop
        return _indivisible(
            speller, ids, text, _count_visible(speller, ids, skip_special=skip_special, trimmed=trimmed)
        )
    if not skip_special:
        return Alignment(spelling.text, spelling.ends, len(text), exact=True)
    first_hidden = _first_hidden(spelling.ends, len(text))
    tail = speller.spell(ids[first_hidden:], skip_special=False)
    assert tail is not None
    width = int(spelling.ends[first_hidden - 1]) if first_hidden else 0
    ends = np.concatenate([spelling.ends[:first_hidden], moved(tail.ends, width)])
    return Alignment(spelling.text[:width] + tail.text, ends, len(text), exact=True)


def _first_hidden(ends: Ends, shown_chars: int) -> int:
    """Return the index behind the token that spells the last visible character."""
    if not shown_chars:
        return 0
    reaching = np.flatnonzero((ends != NO_CUT) & (ends >= shown_chars))
    return int(reaching[0]) + 1 if len(reaching) else len(ends)


def _count_visible(speller: Speller, ids: Sequence[int], *, skip_special: bool, trimmed: int | None) -> int:
    """Return how many tokens precede the trimmed stop token and omitted special tokens at the end."""
    count = len(ids)
    while count and (ids[count - 1] == trimmed or (skip_special and speller.special(ids[count - 1]) is not None)):
        count -= 1
        trimmed = None
    return count


def _indivisible(speller: Speller, ids: Sequence[int], text: str, visible: int) -> Alignment:
    """Return an alignment whose first `visible` tokens are reused together or not at all. With `visible` 0, no token is
    reused."""
    shown_chars = len(text)
    ends = np.full(len(ids), NO_CUT, dtype=np.uint32)
    if visible:
        ends[visible - 1] = shown_chars
        for index in range(visible, len(ids)):
            text += speller.special(ids[index]) or ""
            ends[index] = len(text)
    return Alignment(text, ends, shown_chars, exact=False)
