"""Incremental detokenization as in SGLang: incomplete characters are held back."""

from collections.abc import Sequence
from typing import Any

from miles_router.testing.worker.model.vocabulary import Tokenizer

# SGLang decodes new ids after so many prompt ids, so that a character that began in the prompt is completed.
PROMPT_TAIL = 5
REPLACEMENT = "\ufffd"


def printable_prefix(text: str) -> str:
    """Return the part of an unfinished text that SGLang already sends: complete words, or up to a CJK character."""
    if text.endswith("\n"):
        return text
    if text and _is_cjk(text[-1]):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    code = ord(character)
    return (
        0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x2FA1F or 0xF900 <= code <= 0xFAFF
    )


class IncrementalDetokenizer:
    """The detokenizer of one generation. `text` is the text sent to the client so far."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt[-PROMPT_TAIL:])
        self._context_start = 0
        self._read_start = len(self._ids)
        self._committed = ""
        # How much of the text was sent: beyond the committed part when an unfinished end was sent in part.
        self._sent = 0
        self.text = ""

    def push(self, new_ids: Sequence[int]) -> None:
        """Add the ids sampled since the last call, and extend `text`."""
        self._ids.extend(new_ids)
        new_text = self._new_text(self._ids[self._context_start :])
        pending = self._sent - len(self._committed)
        if new_text and not new_text.endswith(REPLACEMENT):
            self._committed += new_text
            self._context_start, self._read_start = self._read_start, len(self._ids)
            self._sent = len(self._committed)
        else:
            new_text = printable_prefix(new_text)
            self._sent = len(self._committed) + len(new_text)
        self.text += new_text[pending:]

    def finish(self, new_ids: Sequence[int], matched: Any, *, no_stop_trim: bool) -> None:
        """Decode the last ids. A `matched` stop string is cut from the text, a `matched` stop id is not decoded.

        Args:
            no_stop_trim: keep the stop string or stop id in the text.
        """
        self._ids.extend(new_ids)
        readable = self._ids[self._context_start :]
        if isinstance(matched, int) and not no_stop_trim:
            readable = readable[:-1]
        text = self._committed + self._new_text(readable)
        if isinstance(matched, str) and (at := text.find(matched)) >= 0:
            text = text[: at + len(matched)] if no_stop_trim else text[:at]
        self.text += text[self._sent :]

    def _new_text(self, readable: Sequence[int]) -> str:
        context = self._decode(self._ids[self._context_start : self._read_start])
        return self._decode(readable)[len(context) :]

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode ids. Ids that the tokenizer does not have are replaced by id 0."""
        if not ids:
            return ""
        size = self._tokenizer.size
        if max(ids) >= size:
            ids = [token if token < size else 0 for token in ids]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
