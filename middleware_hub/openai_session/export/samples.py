"""Make training samples from a session: one for each selected leaf, checked, as JSON or safetensors.

concat      all turns of a leaf's line; the response is everything behind the first prompt
last_step   the prompt of the last answer, and the answer; the response begins with the first turn that is in the loss
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from middleware_hub.openai_session.episodes.contract import Freshness
from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.masks import MASKS, Decode, checked_masks
from middleware_hub.openai_session.export.per_token import checked_arrays, per_token
from middleware_hub.openai_session.export.records import turn_span
from middleware_hub.openai_session.export.selection import (
    Selection,
    side_calls,
    trained_before,
    trained_elsewhere,
    trained_tokens,
)
from middleware_hub.openai_session.sessions.rewards import RewardEntry
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Classification, Turn, line_ends, line_trajectory
from miles_router.errors import BadRequest, ConfigError
from miles_router.middlewares.rows import RowChannel
from miles_router.trajectory import InvalidTrajectory, Sample, TeacherScores, Trajectory
from miles_router.trajectory.pieces import Mask
from miles_router.trajectory.rows import KINDS, RowKind
from miles_router.trajectory.sample import BY_FINISH_REASON, CARRIED, WRITERS, Format, ShapedRows

#: The metadata keys that contain why a sample has no rows of a kind.
NOTES = {kind: f"{kind.name}_missing" for kind in KINDS}
#: The metadata key with the number of sampled tokens without a sampling mask, if others have one.
MASK_MISSING = "sampling_mask_missing"
#: Metadata keys about the session's episode; absent if there is nothing to report.
EPISODE = ("model_id", "contract", "end_reason", "stale", "evaluation")
#: All metadata keys that the router writes.
FACTS = (
    *("session_id", "leaf", "build", "mask", "reason", "side_call", "turns", "untrained_turns", "untraced"),
    "unrecorded_history",
    *EPISODE,
    *(*NOTES.values(), MASK_MISSING),
)
FIELDS = frozenset(
    {"format", "max_seq_len", "branches", "build", "mask", "side_calls", "per_token", "reward", "label", "metadata"}
)
CONCAT, LAST_STEP = BUILDS = ("concat", "last_step")


@dataclass(frozen=True)
class SampleRequest:
    """The body of `POST /sessions/{id}/samples`."""

    format: Format = "json"
    max_seq_len: int | None = None
    branches: object = ""  # empty: the operator's default, or `default_branches`
    carried: Mapping[str, Any] = field(default_factory=dict)  # reward and label, copied to every sample
    metadata: Mapping[str, Any] = field(default_factory=dict)
    build: str = ""  # empty: the operator's default
    mask: tuple[str, ...] | None = None  # None: the operator's default
    side_calls: bool | None = None  # whether side calls become samples; None: the operator's default
    default_branches: str = "all"  # the default of the form
    may_be_empty: bool = False  # the form reports why there is no sample
    leave_out_prompts: bool = False  # skip a leaf whose first prompt alone fills `max_seq_len`
    per_token: tuple[str, ...] = ()  # the names of arrays of rewards

    @classmethod
    def read(cls, body: object) -> SampleRequest:
        """Return the request with this JSON.

        Raises:
            BadRequest: a field is unknown or invalid.
        """
        if not isinstance(body, Mapping):
            raise BadRequest("the request body must be a JSON object")
        if unknown := body.keys() - FIELDS:
            raise BadRequest(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
        form, longest, metadata = body.get("format", "json"), body.get("max_seq_len"), body.get("metadata")
        if form not in tuple(WRITERS):
            raise BadRequest(f"format must be one of {', '.join(WRITERS)}")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise BadRequest("max_seq_len must be a whole number from 1")
        if metadata is not None and not isinstance(metadata, dict):
            raise BadRequest("metadata must be an object")
        build, mask = body.get("build", ""), checked_masks(body["mask"]) if "mask" in body else None
        if build not in ("", *BUILDS):
            raise BadRequest(f"build must be one of {', '.join(BUILDS)}")
        aside = body.get("side_calls")
        if aside is not None and not isinstance(aside, bool):
            raise BadRequest("side_calls must be true or false")
        carried = {name: body[name] for name in CARRIED if name in body}
        arrays = checked_arrays(body.get("per_token", []))
        made = cls(form, longest, body.get("branches", ""), carried, metadata or {}, build, mask, aside)
        return replace(made, per_token=arrays)


@dataclass(frozen=True)
class SampleMaker:
    """A maker of samples of sessions.

    Args:
        decode: decodes token ids to text.
        channels: the rows that the layers of the stack capture.
        build, mask, side_calls: the operator's defaults.
        when_read: called with the samples of a session when a client reads them, each with its leaf; possibly in a
            thread.
        model_id: the name of the recorded model; None if it has none.
    """

    selection: Selection
    decode: Decode
    channels: Mapping[RowKind, RowChannel]
    build: str = CONCAT
    mask: tuple[str, ...] = ()
    side_calls: bool = True
    when_read: Callable[[Session, Iterable[tuple[Turn, Sample]]], None] = lambda session, samples: None
    model_id: str | None = None

    def plan(self, session: Session, request: SampleRequest) -> SamplePlan:
        """Plan the samples of a session in its current state. A leaf gives no sample if nothing was sampled in its line
        (aborted before the first token).

        Raises:
            BadRequest: there is no such branch policy.
            UnusableSample: an operator's policy returned something other than turns of this session, or the session
                has sampled no token and requests passed untraced: the episode is unknown, not empty.
        """
        if session.untraced and not request.may_be_empty and not any(turn.sampled for turn in session.turns):
            raise UnusableSample("an_episode_is_traced", f"the session has no samples{untraced_in_words(session)}")
        request = replace(
            request, build=request.build or self.build, mask=self.mask if request.mask is None else request.mask
        )
        aside = side_calls(session)
        leaves = [leaf for leaf in self._selected(session, request, aside) if _was_answered(leaf)]
        if request.leave_out_prompts and request.max_seq_len is not None:
            leaves = [leaf for leaf in leaves if leaf.line()[0].prompt_tokens < request.max_seq_len]
        facts = {
            "session_id": session.id,
            "turns": len(session.turns),
            "segments": len(session.roots),
            "untraced": list(session.untraced),
        }
        plans = list(zip(leaves, trained_elsewhere(leaves), strict=True))
        facts |= session.about() | ({} if self.model_id is None else {"model_id": self.model_id})
        freshness = session.episode.contract.freshness
        read = partial(self.when_read, session)
        found, rewards = session.history.classified(), session.rewards.by_turn()
        return SamplePlan(self, request, plans, dict(session.metadata), facts, aside, found, freshness, read, rewards)

    def trained_tokens(self, session: Session) -> int | None:
        """Return how many tokens are in the loss of the samples of a default request; None if masks decide.

        Raises:
            UnusableSample: an operator's policy returned something other than turns of this session.
        """
        return None if self.mask else trained_tokens(self._default_leaves(session))

    def loss_mask(self, session: Session, leaf: Turn) -> Callable[[], Mask]:
        """Return a function that computes the loss mask of a leaf's sample for a default request. The mask is all zero
        for a leaf that gives no sample. The function may be called in a thread.

        Raises:
            UnusableSample: an operator's policy returned something other than turns of this session.
        """
        leaves, line = self._default_leaves(session), leaf.line()
        elsewhere = trained_before(leaves, leaf)

        def make() -> Mask:
            trajectory = line_trajectory(line, elsewhere=elsewhere)
            return self.apply_masks(line, trajectory, self.mask) if leaf in leaves else np.zeros(leaf.tokens, np.uint8)

        return make

    def _default_leaves(self, session: Session) -> Sequence[Turn]:
        """Return the leaves that a default request selects."""
        return self._selected(session, SampleRequest(build=self.build), () if self.side_calls else side_calls(session))

    def _selected(self, session: Session, request: SampleRequest, aside: Collection[Turn]) -> Sequence[Turn]:
        default = "last" if request.build == LAST_STEP else request.default_branches
        wanted = self.side_calls if request.side_calls is None else request.side_calls
        return self.selection.leaves(session, request.branches, default=default, without=() if wanted else aside)

    def apply_masks(self, line: Sequence[Turn], trajectory: Trajectory, names: Iterable[str]) -> Mask:
        """Return the trajectory's loss mask with the named masks applied."""
        loss_mask = trajectory.loss_mask
        for name in names:
            loss_mask = loss_mask & MASKS[name](line, trajectory, self.decode)
        return loss_mask


@dataclass(frozen=True)
class SamplePlan:
    """Planned samples. Their turns are immutable, so `make` and `write` may run in a thread.

    Attributes:
        leaves: each leaf, with how many tokens of each turn of its line an earlier sample trains.
        metadata: the session's metadata.
        facts: further facts for the answer.
        side_calls: the session's turns outside its main line.
        classified: the classification of each turn, by number.
        freshness: the weight versions that the contract allows.
        when_read: called with the samples, each with its leaf.
        rewards: the rewards of each turn, by number.
        teacher: the scores of the samples, if the request wants them.
    """

    maker: SampleMaker
    request: SampleRequest
    leaves: Sequence[tuple[Turn, Mapping[Turn, int]]]
    metadata: Mapping[str, Any]
    facts: Mapping[str, Any]
    side_calls: Collection[Turn]
    classified: Sequence[Classification]
    freshness: Freshness
    when_read: Callable[[Iterable[tuple[Turn, Sample]]], None]
    rewards: Mapping[int, Sequence[RewardEntry]]
    teacher: Sequence[TeacherScores] = ()

    def trajectories(self) -> list[Trajectory]:
        """Return the tokens of each sample."""
        return [self._tokens(leaf.line(), elsewhere)[0] for leaf, elsewhere in self.leaves]

    def make(self) -> list[Sample]:
        """Return the samples.

        Raises:
            UnusableSample: a sample would break an invariant; then none is returned.
        """
        planned = zip_longest(self.leaves, self.teacher)
        samples = [self._sample(leaf, elsewhere, scores) for (leaf, elsewhere), scores in planned]
        self.when_read([(leaf, sample) for (leaf, _), sample in zip(self.leaves, samples, strict=True)])
        return samples

    def write(self) -> bytes:
        """Return the body of the answer.

        Raises:
            UnusableSample: a sample would break an invariant.
        """
        return WRITERS[self.request.format](self.make(), {**self.metadata, **self.facts}, self.request.carried)

    def _tokens(self, line: Sequence[Turn], elsewhere: Mapping[Turn, int]) -> tuple[Trajectory, bool]:
        """Return the tokens of a sample, and whether `max_seq_len` cut them."""
        whole, longest = line_trajectory(line, elsewhere=elsewhere), self.request.max_seq_len
        cut = longest is not None and len(whole) > longest
        return whole[:longest] if cut else whole, cut

    def _sample(self, leaf: Turn, elsewhere: Mapping[Turn, int], scores: TeacherScores | None) -> Sample:
        line, request = leaf.line(), self.request
        trajectory, cut = self._tokens(line, elsewhere)
        loss_mask = self.maker.apply_masks(line, trajectory, request.mask or ())
        prompt = self._prompt(line, loss_mask)
        if len(trajectory) <= prompt:
            limit = f" and max_seq_len is {request.max_seq_len}" if cut else ""
            raise UnusableSample(
                "has_a_response", f"turn {leaf.number}: the first prompt alone has {prompt} tokens{limit}"
            )
        channels = () if "evaluation" in self.facts else self.maker.channels.values()
        rows, missing = _rows(leaf, len(trajectory), channels)
        spans = zip(line, line_ends(line), strict=True)
        turns = [(turn, min(end, len(trajectory))) for turn, end in spans if turn.prompt_tokens < len(trajectory)]
        own = self._facts(line, elsewhere, turns)
        if trajectory.unmasked:
            own[MASK_MISSING] = trajectory.unmasked
        if self.freshness.oldest_version is not None:
            own["stale"] = any(self.freshness.is_stale(run.version) for run in trajectory.weight_versions)
        try:
            sample = Sample(
                tokens=trajectory.tokens,
                loss_mask=loss_mask,
                logprobs=trajectory.logprobs,
                weight_versions=tuple(trajectory.weight_versions),
                response_length=len(trajectory) - prompt,
                status="truncated" if cut else BY_FINISH_REASON.get(leaf.finish_reason, "completed"),
                metadata={**self.metadata, **request.metadata, **own, **missing},
                sampling_mask=trajectory.sampling_mask,
                per_token=per_token(request.per_token, turns, len(trajectory), self.rewards),
                teacher=scores,
                **rows,
                **request.carried,
            )
        except InvalidTrajectory as error:
            raise UnusableSample(error.invariant, f"turn {leaf.number}: {error}") from None
        # Only after the checks, because a tokenizer may fail on an id that does not exist.
        return replace(sample, response=self.maker.decode(sample.tokens[prompt:].tolist()))

    def _prompt(self, line: Sequence[Turn], loss_mask: Mask) -> int:
        """Return how many tokens precede the response."""
        if self.request.build == CONCAT:
            return line[0].prompt_tokens
        trained = np.flatnonzero(loss_mask)
        first = int(trained[0]) if len(trained) else line[-1].prompt_tokens
        return max(turn.prompt_tokens for turn in line if turn.prompt_tokens <= first)

    def _facts(
        self, line: Sequence[Turn], elsewhere: Mapping[Turn, int], turns: Sequence[tuple[Turn, int]]
    ) -> dict[str, Any]:
        """Return the metadata about a sample. `turns` are the turns with tokens in it, each with its end."""
        found = [self.classified[turn.number] for turn in line]
        return {
            "session_id": self.facts["session_id"],
            "leaf": line[-1].number,
            "build": self.request.build,
            "mask": list(self.request.mask or ()),
            "reason": next((each.reason for each in found if each.reason is not None), None),
            "side_call": line[-1] in self.side_calls,
            "turns": [self._turn_span(turn, end) for turn, end in turns],
            "untrained_turns": [turn.number for turn, end in turns if 0 < end - turn.prompt_tokens <= elsewhere[turn]],
            "untraced": len(self.facts["untraced"]),
            "unrecorded_history": any(each.unrecorded for each in found),
            **{name: self.facts[name] for name in EPISODE if name in self.facts},
        }

    def _turn_span(self, turn: Turn, end: int) -> Mapping[str, Any]:
        return turn_span(turn, self.classified[turn.number], end, self.rewards.get(turn.number, ()))


def checked_defaults(middleware: str, build: str, mask: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return a middleware's default build and masks, checked.

    Raises:
        ConfigError: there is no such build or mask.
    """
    if build not in BUILDS:
        raise ConfigError(f"{middleware}.default_build: must be one of {', '.join(BUILDS)}, not {build!r}")
    try:
        return build, checked_masks(mask)
    except BadRequest as error:
        raise ConfigError(f"{middleware}.default_mask: {error}") from None


def untraced_in_words(session: Session) -> str:
    """Return an addition to an error message about untraced requests; empty if there were none."""
    if not session.untraced:
        return ""
    last, count = session.untraced[-1], len(session.untraced)
    return f": requests that passed untraced: {count}, the last to {last['path']}: {last['reason']}"


def _was_answered(leaf: Turn) -> bool:
    return any(turn.sampled for turn in leaf.line())


def _rows(leaf: Turn, tokens: int, channels: Iterable[RowChannel]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the rows of the first `tokens` tokens of a line by sample field, and notes on captured rows that are
    missing."""
    rows: dict[str, ShapedRows] = {}
    missing: dict[str, str] = {}
    for channel in channels:
        if channel.captures:
            try:
                rows[channel.kind.name] = _shaped(leaf, tokens, channel)
            except InvalidTrajectory as error:
                missing[NOTES[channel.kind]] = str(error)
    return rows, missing


def _shaped(leaf: Turn, tokens: int, channel: RowChannel) -> ShapedRows:
    kind, held = channel.kind, leaf.held_rows(channel.kind, tokens)
    if held is None or held.count < tokens - 1:
        taken = leaf.rows.get(kind)
        raise kind.invalid("held", (taken and taken.reason) or "they have been evicted")
    if channel.shape is None:
        raise kind.invalid("of_the_model", f"the model's shape is not known: set {channel.shape_option}")
    return channel.array(held.rows, 0, tokens - 1)
