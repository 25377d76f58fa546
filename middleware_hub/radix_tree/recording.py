"""Convert texts to ids through the cache, and record answers in it: the middleware's work, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.cache import NO_MATCH, PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import Entry, TextRecord
from middleware_hub.radix_tree.statistics import CacheStatistics
from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from miles_router.engines.answers import GenerateAnswer
from miles_router.engines.generate import Prompt
from miles_router.engines.recomputing import AskedSampling
from miles_router.engines.spelling import Ends, moved
from miles_router.middlewares.rows import NO_ROWS, RowPrefix, RowsByKind
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.rows import RowKind


@dataclass(frozen=True)
class TokenizedText:
    """A prompt's text and the tokens that the engine is given for it; `match` is the recorded prefix in them."""

    text: str
    trajectory: Trajectory
    ends: Ends
    match: PrefixMatch

    def held_rows(self, kind: RowKind) -> RowPrefix | None:
        """Return the rows in memory of the reused prefix."""
        return None if self.match.entry is None else self.match.entry.held_rows(kind, len(self.match.trajectory))

    @property
    def continued_entry(self) -> Entry | None:
        """The entry that owns the last reused token, or None if the reused prefix has no sampled token."""
        entry, known = self.match.entry, self.match.trajectory
        if entry is None or all(piece.logprobs is None for piece in known.pieces):
            return None
        return entry.entry_at(len(known))


class TextRecorder:
    """The cache as a tokenizer of prompts and a record of answers."""

    def __init__(self, cache: RadixTreeCache, archive: TextArchive, encoder: AsyncEncoder) -> None:
        self.cache = cache
        self.archive = archive
        self._encoder = encoder

    @property
    def statistics(self) -> CacheStatistics:
        return self.cache.statistics

    async def tokenize(self, prompt: Prompt) -> TokenizedText:
        """Return the tokens of a prompt: recorded ids as far as they go.

        Raises:
            InvalidTrajectory: the client sent ids that cannot be token ids.
            TextTooLong: the prompt is too long.
            StateError: the store cannot be read.
        """
        if prompt.ids is not None:
            return await self._tokenize_ids(prompt.ids)
        assert prompt.text is not None
        return await self.tokenize_text(prompt.text)

    async def text_of(self, prompt: Prompt) -> str:
        """Return a prompt as text. Raises the same errors as `tokenize`."""
        if prompt.text is not None:
            self._encoder.check(len(prompt.text))
            return prompt.text
        assert prompt.ids is not None
        self._encoder.check(len(prompt.ids))
        Piece.given(prompt.ids)
        return (await self._encoder.spell_whole(prompt.ids)).text

    async def tokenize_text(self, text: str) -> TokenizedText:
        """Return the recorded tokens of a text as far as they go, and the encoding of the rest.

        Raises:
            TextTooLong: the text is too long, recorded or not.
            StateError: the store cannot be read.
        """
        self._encoder.check(len(text))
        await self.archive.load(text)
        match = self.cache.match(text)
        rest = text[match.chars :]
        encode = self._encoder.encode_rest if len(match.trajectory) else self._encoder.encode_whole
        encoding = await encode(rest)
        self.statistics.encoded_tokens += len(encoding.ids)
        ends = np.concatenate([match.ends, moved(encoding.ends, match.chars)])
        return TokenizedText(text, match.trajectory.append(Piece.given(encoding.ids)), ends, match)

    async def _tokenize_ids(self, ids: Sequence[int]) -> TokenizedText:
        """Keep the client's ids. Where they equal a recorded prefix, take its pieces, which know the sampled tokens."""
        self._encoder.check(len(ids))  # before any work is done for them
        given = Piece.given(ids)
        spelling = await self._encoder.spell_whole(ids)
        await self.archive.load(spelling.text)
        match = self.cache.match(spelling.text)
        known = match.trajectory.tokens
        if not np.array_equal(known, given.tokens[: len(known)]):
            match = NO_MATCH
        rest = given.cut(len(match.trajectory), len(given))
        return TokenizedText(spelling.text, match.trajectory.append(rest), spelling.ends, match)

    async def record(
        self,
        prompt: TokenizedText,
        params: Mapping[str, Any],
        answer: GenerateAnswer,
        take_rows: Callable[[int, str], RowsByKind] = lambda tokens, rid: NO_ROWS,
        *,
        cache: int | None = None,
        cache_versions: Sequence[str | None] = (),
        asked: AskedSampling | None = None,
        worker: str | None = None,
    ) -> Entry | None:
        """Record an answer behind its prompt. `archive.save` makes the entry durable.

        Args:
            params: the prompt's sampling parameters.
            take_rows: returns the rows of a generation, given its number of tokens (prompt included) and its id.
            cache: the number of the prefix cache that the engine used.
            cache_versions: the weight versions that may have filled what the engine found there.
            asked: how the client asked for sampling.
            worker: the worker that answered.

        Returns:
            The new entry, or None if the answer has no tokens or does not fit into the cache.

        Raises:
            InvalidTrajectory: the answer's ids or logprobs are impossible values.
        """
        if not answer.ids:
            return None
        sampled = _sampled(answer)  # check first: a tokenizer cannot spell invalid ids
        alignment = await self._encoder.align(
            answer.ids,
            answer.text,
            skip_special=bool(params.get("skip_special_tokens", True)),
            stop=answer.matched,
            no_stop_trim=bool(params.get("no_stop_trim", False)),
        )
        self.statistics.unaligned += not alignment.exact
        trajectory = prompt.trajectory.append(*sampled)
        chars = len(prompt.text)
        before = prompt.continued_entry
        record = TextRecord(
            text=prompt.text + alignment.text,
            shown_chars=chars + alignment.shown_chars,
            trajectory=trajectory,
            ends=np.concatenate([prompt.ends, moved(alignment.ends, chars)]),
            rid=answer.rid,
            finish=answer.finish,
            rows=take_rows(len(trajectory), answer.rid),
            cache=cache,
            cache_versions=tuple(dict.fromkeys([*(before.cache_versions if before else ()), *cache_versions])),
            asked=asked,
            worker=worker,
        )
        entry = self.cache.record(record, prompt.match)
        if entry is not None:
            self.archive.add(entry, before, prompt.text)
        return entry


def _sampled(answer: GenerateAnswer) -> list[Piece]:
    """Return the sampled tokens, one piece for each weight version."""
    runs: Sequence[tuple[str | None, int, int]] = answer.versions or [(None, 0, len(answer.ids))]
    pieces = [Piece.sampled(answer.ids[a:b], answer.logprobs[a:b], version) for version, a, b in runs]
    if (mask := answer.sampling_mask) is None:
        return pieces
    return [each.masked(mask.cut(a, b)) for each, (_, a, b) in zip(pieces, runs, strict=True)]
