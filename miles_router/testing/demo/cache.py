"""The demo's second half: compare the tokens retrieved by each rollout's text with what the workers answered."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from miles_router.testing import tiny_tokenizer

MIDDLEWARE = "middleware_hub.radix_tree_middleware.RadixTreeMiddleware"


@dataclass(frozen=True)
class Turn:
    """One generation from the worker's answer: a prompt of `given` tokens, and the sampled `ids` with `logprobs`."""

    given: int
    ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Turn":
        meta = answer["meta_info"]
        return cls(meta["prompt_tokens"], answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]])


@dataclass
class Rollout:
    """A finished rollout: its text, its last generation's id, its turns."""

    text: str = ""
    rid: str = ""
    turns: list[Turn] = field(default_factory=list)


@dataclass
class Exactness:
    """Counts of rollouts and tokens: all that were compared, and all that were right."""

    rollouts: int = 0
    exact: int = 0
    tokens: int = 0
    right: int = 0

    def take(self, rollout: Rollout, retrieved: Mapping[str, Any]) -> None:
        """Compare and count one retrieved rollout."""
        right = right_positions(rollout.turns, retrieved)
        self.rollouts += 1
        self.tokens += len(right)
        self.right += sum(right)
        self.exact += all(right)


def right_positions(turns: Sequence[Turn], retrieved: Mapping[str, Any]) -> list[bool]:
    """Return for each retrieved position whether it agrees with the workers' answers.

    All tokens of the last turn must be marked as sampled; tokens of earlier turns may be unmarked, as prompt. A token
    that is marked must have the id and logprob that the worker sampled.
    """
    ids, mask = retrieved["tokens"], retrieved["loss_mask"]
    logprobs = np.array(retrieved["rollout_logp"], dtype=np.float32)
    last = turns[-1]
    whole = len(ids) == len(mask) == len(logprobs) == last.given + len(last.ids)
    right = [whole and not sampled for sampled in mask]
    for turn in turns:
        for offset, (token, logprob) in enumerate(
            zip(turn.ids, np.array(turn.logprobs, dtype=np.float32), strict=True)
        ):
            place = turn.given + offset
            if place < len(ids) and mask[place]:
                right[place] = whole and ids[place] == token and bool(logprobs[place] == logprob)
            elif place < len(ids) and turn is last:
                right[place] = False
    return right


def checkpoint(given: str | None, scratch: Path) -> str | None:
    """Return the directory of the tokenizer that router and workers share: the given one, or a new tiny one. Return
    None if the packages for building one are not installed."""
    if given is not None:
        return given
    if find_spec("tokenizers") is None or find_spec("transformers") is None:
        return None
    directory = scratch / "model"
    tiny_tokenizer.build(directory)
    return str(directory)


def router_options(directory: str | None) -> list[str]:
    """Return the router's flags that enable the text cache; none without a tokenizer."""
    return [] if directory is None else ["--middleware-paths", MIDDLEWARE, "--hf-checkpoint", directory]


def cache_lines(exactness: Exactness | None, info: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report's last block."""
    if exactness is None:
        yield "cache      off: it needs a tokenizer, pip install 'miles-router[tito]'"
        return
    counted = info["statistics"]["radix_tree"]
    share = exactness.right / exactness.tokens if exactness.tokens else 0.0
    yield f"retrieved  {exactness.rollouts} rollouts by their text, {exactness.tokens:,} tokens"
    yield f"exact      {_percent(share)} of the tokens, {exactness.exact} of {exactness.rollouts} rollouts"
    yield f"reused     {counted['reused_tokens']:,} tokens of earlier turns and siblings' prompts, not encoded again"


def _percent(share: float) -> str:
    """Format a share as a percentage; `100 %` only if it is exactly 1."""
    return "100 %" if share == 1 else f"{min(share, 0.9999):.2%}".replace("%", " %")
