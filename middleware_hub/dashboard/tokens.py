"""Encode a slice of an episode's tokens as JSON, or as a safetensors file for the token view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from middleware_hub.view.command import token_bytes
from middleware_hub.view.entropy import expert_entropy
from middleware_hub.view.page import BytesOf, spelled, vocabulary_arrays
from middleware_hub.view.sheets import TokenSheet, sampled_positions
from miles_router.errors import ConfigError
from miles_router.middlewares import Router
from miles_router.middlewares.episodes import EpisodeLine
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.json_parts import object_parts
from miles_router.trajectory.safetensors import pack

BINARY = "application/octet-stream"
#: Positions in one answer, at most.
MOST_TOKENS = 1 << 17
#: Returns a turn without the fields that must not be shown.
Hide = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Slice(NamedTuple):
    """Positions `[start, stop)`."""

    start: int
    stop: int


class Vocabulary:
    """The bytes of the router's tokens. Call it in a thread: the first use loads the tokenizer, which is slow."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @cached_property
    def bytes_of(self) -> BytesOf | None:
        """A function from token id to bytes; None if there is no tokenizer, or one whose tokens have no own bytes."""
        try:
            return token_bytes(self._router.tokenizer)
        except ConfigError:
            return None

    def of(self, tokens: npt.NDArray[np.int32]) -> dict[int, bytes] | None:
        """Return the bytes of these tokens by id, or None if they are unknown."""
        return None if self.bytes_of is None else spelled(np.unique(tokens).tolist(), self.bytes_of)


def written_slice(
    episode: str, line: EpisodeLine, part: Slice, vocabulary: Vocabulary | None, hide: Hide | None, *, binary: bool
) -> bytes:
    """Return the body of the answer. It is slow: call it in a thread.

    Args:
        vocabulary: None if texts are not shown (`dashboard_text` off).
        hide: removes the texts from a turn; given in the same case.
    """
    sheet = _sheet(line, part, hide)
    arrays = sheet.arrays()
    known = vocabulary.of(sheet.tokens) if vocabulary is not None else None
    facts = {
        "id": episode,
        "leaf": line.leaf,
        **part._asdict(),
        "length": len(line.trajectory),
        "text": vocabulary is not None,
        **sheet.facts(),
    }
    if vocabulary is None:
        del arrays["tokens"]
        facts["about"] = None
    if binary:
        spelling = {} if known is None else vocabulary_arrays(known)
        return pack({**arrays, **spelling}, {"facts": orjson.dumps(facts).decode()})
    missing = {name: None for name in ("tokens", "expert_entropy") if name not in arrays}
    hexadecimal = None if known is None else {str(token): each.hex() for token, each in known.items()}
    return b"".join((*object_parts(arrays, {**missing, "spelling": hexadecimal, **facts}), b"}"))


def _sheet(line: EpisodeLine, part: Slice, hide: Hide | None) -> TokenSheet:
    """Return the slice as a `TokenSheet`. Positions of runs and turns count from the start of the whole line."""
    trajectory, mask = line.trajectory, line.loss_mask()
    runs, within = trajectory.weight_versions, slice(*part)
    logprobs = trajectory.logprobs
    return TokenSheet(
        tokens=trajectory[within].tokens,
        loss_mask=mask[within],
        sampled=sampled_positions(mask, logprobs, runs, line.turns)[within],
        logprobs=logprobs[within],
        expert_entropy=_entropy(line, part),
        versions=runs,
        turns=[dict(turn) if hide is None else dict(hide(turn)) for turn in line.turns],
        path=[turn["turn"] for turn in line.turns],
        status=line.status,
        response_length=line.response_length,
        metadata=line.about,
    )


def _entropy(line: EpisodeLine, part: Slice) -> npt.NDArray[np.float32] | None:
    try:
        rows = line.experts(part.start, max(part.start, min(part.stop, len(line.trajectory) - 1)))
    except InvalidTrajectory:  # some rows are missing, or were evicted
        return None
    return None if rows is None else expert_entropy(rows)
