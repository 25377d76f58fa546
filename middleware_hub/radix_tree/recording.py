"""From a request to ids, and from its answers to the record: the middleware's work, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from middleware_hub.radix_tree.cache import Match, RadixTreeCache, Record
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.replies import Generation, generation
from middleware_hub.radix_tree.shapes import Prompt
from middleware_hub.tokenizing.encoding import TextEncoder
from middleware_hub.tokenizing.spelling import NO_CUT, Ends
from miles_router.middlewares.rows import Handover, RowPrefix
from miles_router.trajectory import Piece, Trajectory

#: Texts longer than this (characters) are encoded, and outputs longer than this (tokens) aligned, in a thread: about
#: what takes longer than a few milliseconds.
OFF_LOOP = 4096
Result = TypeVar("Result")


@dataclass(frozen=True)
class Given:
    """What the engine is given for one prompt: the tokens of `text`, of which `match` was recorded before."""

    text: str
    trajectory: Trajectory
    ends: Ends
    match: Match

    @property
    def ids(self) -> list[int]:
        """The `input_ids`."""
        ids: list[int] = self.trajectory.tokens.tolist()
        return ids

    @property
    def held_experts(self) -> RowPrefix | None:
        """The routed experts held of its first tokens."""
        return None if self.match.entry is None else self.match.entry.held_experts(len(self.match.trajectory))


class Recorder:
    """Turns texts into ids through the cache, and answers into records of it."""

    def __init__(self, cache: RadixTreeCache, encoder: TextEncoder) -> None:
        self.cache = cache
        self._encoder = encoder

    async def give(self, prompt: Prompt) -> Given:
        """The ids for a prompt: those recorded for its text as far as they go, and the encoding of the rest."""
        if prompt.ids is not None:
            return self._give_ids(prompt.ids)
        assert prompt.text is not None
        return await self.give_text(prompt.text)

    async def give_text(self, text: str) -> Given:
        """As `give`, of a text."""
        match = self.cache.match(text)
        rest = text[match.chars :]
        encode = self._encoder.encode_rest if len(match.trajectory) else self._encoder.encode_whole
        encoded = await _off_loop(len(rest), lambda: encode(rest))
        self.cache.statistics.encoded_tokens += len(encoded.ids)
        trajectory = match.trajectory.append(Piece.given(encoded.ids))
        return Given(text, trajectory, _behind(match.ends, encoded.ends, match.chars), match)

    def _give_ids(self, ids: list[int]) -> Given:
        """Ids of the client's own: given as they are, sampled as far as they are those of a recorded trajectory."""
        spelled = self._encoder.spell_given(ids)
        match = self.cache.match(spelled.text)
        known = match.trajectory.tokens
        if not np.array_equal(known, ids[: len(known)]):
            match = Match(Trajectory(), spelled.ends[:0], 0, None)
        rest = ids[len(match.trajectory) :]
        return Given(spelled.text, match.trajectory.append(Piece.given(rest)), spelled.ends, match)

    async def record(
        self, given: Given, answer: Mapping[str, Any], prompt: Prompt, experts: Handover | None = None, place: int = 0
    ) -> Entry | None:
        """Hold what an answer added to what was given for `prompt`, with the routed experts that came as the
        request's answer number `place`. Gives None for an answer without tokens.

        Raises:
            Unusable, InvalidTrajectory: the answer cannot be recorded.
        """
        sampled = generation(answer)
        if not sampled.ids:
            return None
        record = await _off_loop(len(sampled.ids), lambda: self._joined(given, sampled, prompt))
        if experts is not None:
            record = replace(record, experts=experts.take(place, len(record.trajectory), record.rid))
        return self.cache.record(record, hint=given.match)

    def _joined(self, given: Given, sampled: Generation, prompt: Prompt) -> Record:
        aligned = self._encoder.align(
            sampled.ids,
            sampled.text,
            skip_special=prompt.skip_special,
            stop=sampled.stop,
            no_stop_trim=prompt.no_stop_trim,
        )
        self.cache.statistics.unaligned += not aligned.exact
        return Record(
            text=given.text + aligned.text,
            shown=len(given.text) + aligned.shown,
            trajectory=given.trajectory.append(*sampled.pieces()),
            ends=_behind(given.ends, aligned.ends, len(given.text)),
            rid=sampled.rid,
            finish=sampled.finish,
        )


def _behind(first: Ends, second: Ends, chars: int) -> Ends:
    """The ends of tokens that stand behind `chars` characters."""
    moved = np.where(second == NO_CUT, NO_CUT, second + np.uint32(chars)).astype(np.uint32)
    return np.concatenate([first, moved])


async def _off_loop(size: int, work: Callable[[], Result]) -> Result:
    return work() if size <= OFF_LOOP else await asyncio.to_thread(work)
