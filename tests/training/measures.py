"""What a run measures about its samples, and the thresholds that it must meet. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from miles_router.client import Sample

Floats = npt.NDArray[np.float32]

#: Nats between the logprobs of trainer and engine, of one token sampled by the weights that both have.
EXACT = 1e-3
#: How many times larger the mean distance of tokens must be whose stamp names the weights before, in the first steps.
STAMPS_APART = 100.0
STAMPED_STEPS = 4
#: The share of samples that two weight versions sampled, over all steps behind the first.
SPANNING = 1 / 3
#: How much the reward must rise: on held-out questions, and of the last steps against the first.
RISE = 0.3
LAST_STEPS = 4


class Encodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""


@dataclass
class Step:
    """What one step came to.

    Attributes:
        reward: the mean over its samples.
        samples, whole: how many were asked for, and how many came with ids, mask and logprobs of one length.
        spanning: samples with tokens of two weight versions.
        current: largest and mean distance (nats) of tokens that the trainer's weights sampled; None: there are none.
        older: the same of tokens that the weights before sampled.
        changed: the share of samples that are other tokens when their text is encoded again.
        taught: whether rewards within a group differed, so that the step changed the weights.
        clipped: the share of tokens whose ratio was clipped.
        sampling_s, training_s, update_s: seconds.
    """

    number: int
    reward: float
    samples: int
    whole: int
    spanning: int
    tokens: int
    current: tuple[float, float] | None
    older: tuple[float, float] | None
    changed: float
    taught: bool
    clipped: float = 0.0
    sampling_s: float = 0.0
    training_s: float = 0.0
    update_s: float = 0.0


@dataclass
class Run:
    """A run's steps, and the mean reward on held-out questions before and after."""

    before: float
    after: float
    steps: list[Step] = field(default_factory=list)


def versions_of(sample: Sample) -> npt.NDArray[np.object_]:
    """Return the weight version of each token in the loss, in order."""
    versions = np.empty(len(sample), dtype=np.object_)
    for version, start, end in sample.weight_versions:
        versions[start:end] = version
    trained: npt.NDArray[np.object_] = versions[sample.loss_mask.astype(bool)]
    return trained


def is_whole(sample: Sample) -> bool:
    """Return whether a sample has tokens to train on. That each has its logprob and version, `Sample` has checked."""
    return bool(sample.loss_mask.any())


def distance(ours: Floats, theirs: Floats) -> tuple[float, float] | None:
    """Return the largest and the mean difference of logprobs (nats); None where there are none."""
    if not len(ours):
        return None
    apart = np.abs(ours - theirs)
    return float(apart.max()), float(apart.mean())


def changes(tokenizer: Encodes, sample: Sample) -> bool:
    """Return whether encoding a sample's text again gives other tokens than were sampled."""
    tokens = sample.tokens.tolist()
    return bool(tokenizer.encode(tokenizer.decode(tokens)) != tokens)


def distances(steps: Sequence[Step]) -> str:
    """Return in words how far trainer and engine are apart: on tokens of the weights that both have, the largest of
    all steps; on tokens stamped with the weights before, the mean of each of the first steps."""
    current = max((step.current[0] for step in steps if step.current), default=0.0)
    older = [f"{step.older[1]:.2g}" for step in steps[1 : STAMPED_STEPS + 1] if step.older]
    return f"{current:.1g} nats at most by the same weights; in the mean by those before: {', '.join(older) or '-'}"


def exactness_problems(steps: Sequence[Step], *, keeps_cache: bool) -> list[str]:
    """Return what is not exact, a sentence each.

    Args:
        keeps_cache: the engine kept keys and values of older weights over the updates (`in_place`), so that logprobs
            of tokens behind them are of neither weights and have no threshold.
    """
    problems = [
        f"step {step.number}: {step.samples - step.whole} of {step.samples} samples are not whole"
        for step in steps
        if step.whole != step.samples
    ]
    if not keeps_cache:
        problems += [
            f"step {step.number}: trainer and engine differ by {step.current[0]:.2g} nats, more than {EXACT:g}"
            for step in steps
            if step.current is not None and step.current[0] > EXACT
        ]
        for before, step in pairwise(steps[: STAMPED_STEPS + 1]):
            if not (before.taught and step.current and step.older):
                continue  # without a lesson, the weights of both stamps are the same
            if step.older[1] < STAMPS_APART * step.current[1]:
                problems.append(f"step {step.number}: tokens stamped with older weights are as close as current ones")
    later = steps[1:]
    spanning, samples = sum(step.spanning for step in later), sum(step.samples for step in later)
    if spanning < SPANNING * samples:
        problems.append(f"{spanning} of {samples} samples span two weight versions, fewer than a third")
    return problems


def learning_problems(run: Run) -> list[str]:
    """Return what the model has not learned, a sentence each."""
    problems = []
    if run.after - run.before < RISE:
        problems.append(f"held-out reward went from {run.before:.2f} to {run.after:.2f}, less than {RISE:g} higher")
    last = float(np.mean([step.reward for step in run.steps[-LAST_STEPS:]]))
    if last - run.steps[0].reward < RISE:
        problems.append(f"reward went from {run.steps[0].reward:.2f} to {last:.2f}, less than {RISE:g} higher")
    return problems


def advantages(rewards: Sequence[float]) -> Floats:
    """Return GRPO's advantages of a group: its rewards, centred and scaled; zeros where all are equal."""
    earned = np.asarray(rewards, dtype=np.float32)
    spread = float(earned.std())
    return np.zeros_like(earned) if spread == 0 else (earned - earned.mean()) / np.float32(spread + 1e-4)


def read_step(said: Mapping[str, Any]) -> Step:
    """Return the step that a trainer's line describes."""
    pairs = {name: said[name] and tuple(said[name]) for name in ("current", "older")}
    return Step(**{**said, **pairs})
