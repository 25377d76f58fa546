"""The tokenizer protocol of the simulated engine, and a built-in toy vocabulary.

The toy vocabulary needs no files. It has the properties that make re-encoding text lossy in real vocabularies: most
texts have several tokenizations, some tokens contain part of a character, special tokens are hidden from the visible
text, and a few ids decode to nothing.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from miles_router.testing.worker.model.chat_template import render_chatml

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|pad|>",
)
# In Qwen's vocabulary these are added tokens that are not special: they survive skip_special_tokens.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCAB_SIZE = 1024
UNUSED_IDS = 8

_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much go good new write our me man too any day same right look think also around another came come "
    "work three must because does part even place well such here take why help put different away again off went old "
    "number great tell men say small every found still between name should home big give air line set own under read "
    "last never us left end along while might next sound below saw something thought both few those always show large "
    "token text model user assistant system answer question step number value return class import print self None True"
)
_FRAGMENTS = (
    "in er on an re he at en or es st nd ti ar te se ng al it as is ha et ou le ve co me de hi ri ro ic ne ea ra ce li "
    "ch ll be ma si om ur ing ion ent ter tion ed ly ment ness able est ist ous ive th qu wh sh ck gh ph tr pr pl cl"
)
_SYMBOLS = (
    '  §    §\n§\n\n§\t§. §.\n§!\n§: §; §? §, §()§[]§{}§{"§"}§": §", "§ "§==§!=§<=§>='
    "§->§=>§//§/*§*/§**§--§...§```§'s§'t§'re§ =§ +§ -§ (§<|§|>§10§20§12§100§000§2024§+=§::§__"
)
_CHARACTERS = "éèüñçßøåëïаеинорстכשلم的一是不了人我在有他这中大来上国世界你好日本語한국어あいうえお€∑→✓😀🎉🚀👍🤖💡"
_CHARACTER_RUNS = ("你好", "世界", "中国", "日本", "한국", "привет", "👍🏽", "👨‍👩‍👧", "é́", "ну")


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer, as the simulated engine needs it."""

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model can sample: `0 .. vocab_size - 1`."""

    @property
    def size(self) -> int:
        """The number of ids that the tokenizer has. A model with a padded vocabulary can sample ids beyond them."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a generation unless `ignore_eos` is set."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Special tokens written out in it become their ids.

        Args:
            add_special_tokens: add the special tokens that the tokenizer puts around every text, such as BOS.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id, special tokens included."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render the chat template, with the generation prompt at the end."""


def _fragments_of_characters() -> list[bytes]:
    """Return byte pieces that begin characters or straddle two, as byte-level BPE has them."""
    encoded = [character.encode() for character in _CHARACTERS if len(character.encode()) > 2]
    heads = [raw[:cut] for raw in encoded for cut in range(2, len(raw))]
    straddling = [left[-1:] + right[:2] for left, right in pairwise(encoded)]
    return heads + straddling


def _toy_pieces() -> list[bytes]:
    """Return the bytes of every ordinary token by id. The first 256 are the single bytes."""
    words = [form for word in _WORDS.split() for form in (word, " " + word, " " + word.capitalize())]
    texts = [*_FRAGMENTS.split(), *_SYMBOLS.split("§"), *_CHARACTERS, *_CHARACTER_RUNS, *words]
    ordinary = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS) - UNUSED_IDS
    pieces = dict.fromkeys(bytes([value]) for value in range(256))
    pieces.update(dict.fromkeys(text.encode() for text in texts if text))
    room = ordinary - 40
    kept = list(pieces)[:room]
    for piece in _fragments_of_characters():
        if len(kept) < ordinary and piece not in pieces:
            pieces[piece] = None
            kept.append(piece)
    return kept


class ToyTokenizer:
    """A byte-level vocabulary of 1,024 ids: bytes, merges, special tokens, and ids that decode to nothing."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        pieces = _toy_pieces()
        self._ids = {piece: token for token, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))
        added = [*MARKUP_TOKENS, *SPECIAL_TOKENS]
        self._added = {text: len(pieces) + offset for offset, text in enumerate(added)}
        self._added_pattern = re.compile("(" + "|".join(map(re.escape, added)) + ")")
        self._all = dict(enumerate([*pieces, *(text.encode() for text in added)]))
        self.size = len(self._all)
        special = {self._added[text] for text in SPECIAL_TOKENS}
        self._visible = {token: piece for token, piece in self._all.items() if token not in special}
        self.eos_token_ids = frozenset({self._added["<|endoftext|>"], self._added["<|im_end|>"]})

    def token_id(self, text: str) -> int:
        """Return the id of an added token such as `"<|im_end|>"`.

        Raises:
            KeyError: the text is not an added token.
        """
        return self._added[text]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self._added_pattern.split(text):
            if part in self._added:
                ids.append(self._added[part])
            else:
                self._encode_ordinary(part.encode("utf-8", "surrogatepass"), ids)
        return ids

    def _encode_ordinary(self, raw: bytes, ids: list[int]) -> None:
        """Append the ids of `raw`, longest match first. As with BPE, the ids of a text are not the ids of its halves,
        concatenated."""
        start, known, longest = 0, self._ids, self._longest
        while start < len(raw):
            for length in range(min(longest, len(raw) - start), 0, -1):
                token = known.get(raw[start : start + length])
                if token is not None:
                    ids.append(token)
                    start += length
                    break

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        piece = (self._visible if skip_special_tokens else self._all).get
        raw = b"".join([piece(token, b"") for token in ids])
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._all.get(token, b"")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return render_chatml(messages, tools=options.get("tools"))
