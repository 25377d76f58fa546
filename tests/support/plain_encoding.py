"""What a tokenizer makes of texts and continuations, by the simplest means: for oracles."""

from __future__ import annotations

import json
from functools import cache
from typing import Any


class PlainEncoding:
    """`encode` and `decode` of a transformers tokenizer, and the same with its dummy prefix taken out of its file."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._continuing = _without_dummy_prefix(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._special = [each.content for each in added.values()]
        self._skipped = {number for number, each in added.items() if each.special}
        self._bos: int | None = tokenizer.bos_token_id

    def whole(self, text: str) -> list[list[int]]:
        ids: list[int] = self._backend.encode(text).ids
        return [ids[1:] if self._bos is not None and ids[:2] == [self._bos, self._bos] else ids]

    def rest(self, text: str) -> list[list[int]]:
        """The ids that a text has behind others. Behind a special token inside of it a tokenizer with a dummy prefix
        puts that there too, as in any text."""
        first = min((at for token in self._special if (at := text.find(token)) >= 0), default=len(text))
        begun = self._continuing.encode(text[:first], add_special_tokens=False).ids if first else []
        return [begun + (self._backend.encode(text[first:], add_special_tokens=False).ids if text[first:] else [])]

    def reversible(self, text: str) -> bool:
        """Whether a text comes back from its encoding."""
        return any(self.decode_whole(ids) == text for ids in self.whole(text))

    def decode_whole(self, ids: list[int]) -> str:
        """The text of ids that begin a text; a beginning-of-sequence token is none of it."""
        shown = ids[1:] if self._bos is not None and ids[:1] == [self._bos] else ids
        return str(self._backend.decode(self._shown_as(shown), skip_special_tokens=False))

    def is_special(self, token: int) -> bool:
        """Whether it is left out where special tokens are skipped."""
        return token in self._skipped

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return str(self._continuing.decode(self._shown_as(ids), skip_special_tokens=skip_special))

    def _shown_as(self, ids: list[int]) -> list[int]:
        """SGLang shows ids behind the tokenizer's last (of a padded vocabulary) as id 0."""
        return [token if token < self._backend.get_vocab_size() else 0 for token in ids]


@cache
def plain_encoding(tokenizer: Any) -> PlainEncoding:
    """The one for a tokenizer; making it takes a second."""
    return PlainEncoding(tokenizer)


def _without_dummy_prefix(backend: Any) -> Any:
    """The same tokenizer for text in the middle of a text: no space put in front, none taken away."""
    from tokenizers import Tokenizer

    description = json.loads(backend.to_str())
    pre = description["pre_tokenizer"]
    if pre is not None and pre["type"] == "Metaspace":
        pre["prepend_scheme"] = "never"
    decoder = description["decoder"]
    if decoder["type"] == "Sequence":
        decoder["decoders"] = [each for each in decoder["decoders"] if each["type"] != "Strip"]
    return Tokenizer.from_str(json.dumps(description))
