"""Training samples out of a session: one for each selected leaf, checked, as JSON or safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.records import turn_span
from middleware_hub.openai_session.export.selection import Selection, trained_elsewhere
from middleware_hub.openai_session.sessions.tree import Session, Turn, line_ends, line_trajectory
from miles_router.errors import BadRequest
from miles_router.middlewares.experts import Experts
from miles_router.trajectory import InvalidTrajectory, Sample
from miles_router.trajectory.sample import BY_FINISH_REASON, WRITERS, Format

FIELDS = frozenset({"format", "max_seq_len", "branches", "reward", "label", "metadata"})

Decode = Callable[[Sequence[int]], str]
Array = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Wanted:
    """What `POST /sessions/{id}/samples` asks for."""

    format: Format = "json"
    max_seq_len: int | None = None
    branches: object = "all"
    carried: Mapping[str, Any] = field(default_factory=dict)  # reward and label, given back on every sample
    metadata: Mapping[str, Any] | None = None


def wanted(parsed: object) -> Wanted:
    """The request, checked.

    Raises:
        BadRequest: it is not understood.
    """
    if not isinstance(parsed, Mapping):
        raise BadRequest("the request body must be a JSON object")
    if unknown := parsed.keys() - FIELDS:
        raise BadRequest(f"unknown field {min(unknown)!r}; known are {', '.join(sorted(FIELDS))}")
    form, longest = parsed.get("format", "json"), parsed.get("max_seq_len")
    if form not in tuple(WRITERS):
        raise BadRequest(f"format must be one of {', '.join(WRITERS)}")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise BadRequest("max_seq_len must be a whole number from 1")
    metadata = parsed.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise BadRequest("metadata must be an object")
    carried = {name: parsed[name] for name in ("reward", "label") if name in parsed}
    return Wanted(form, longest, parsed.get("branches", "all"), carried, metadata)


@dataclass(frozen=True)
class Making:
    """What making samples needs beside a session."""

    selection: Selection
    decode: Decode
    experts: Experts


def samples(session: Session, want: Wanted, making: Making) -> list[Sample]:
    """The samples of a session. A leaf in whose line nothing was sampled (aborted before its first token) gives none.

    Raises:
        BadRequest: no such branch policy.
        UnusableSample: one of them would break an invariant; none is given.
    """
    leaves = [leaf for leaf in making.selection.leaves(session, want.branches) if _was_answered(leaf)]
    plans = trained_elsewhere(leaves)
    return [_sample(session, leaf, plan, want, making) for leaf, plan in zip(leaves, plans, strict=True)]


def _was_answered(leaf: Turn) -> bool:
    return any(turn.sampled for turn in leaf.line())


def _sample(session: Session, leaf: Turn, elsewhere: Mapping[Turn, int], want: Wanted, making: Making) -> Sample:
    line = leaf.line()
    whole = line_trajectory(line, elsewhere=elsewhere)
    prompt = line[0].prompt_tokens
    cut = want.max_seq_len is not None and len(whole) > want.max_seq_len
    trajectory = whole[: want.max_seq_len] if cut else whole
    if len(trajectory) <= prompt:
        raise UnusableSample("has_a_response", f"turn {leaf.number}: the first prompt alone has {prompt} tokens")
    experts, facts = _experts(leaf, len(trajectory), making.experts)
    metadata = {
        **session.metadata,
        **(want.metadata or {}),
        "session_id": session.id,
        "leaf": leaf.number,
        "reason": next((turn.reason for turn in line if turn.reason is not None), None),
        **_turns(line, elsewhere, len(trajectory)),
        "untraced": len(session.untraced),
        **facts,
    }
    try:
        sample = Sample(
            tokens=trajectory.tokens,
            loss_mask=trajectory.loss_mask,
            logprobs=trajectory.logprobs,
            weight_versions=tuple(trajectory.weight_versions),
            response_length=len(trajectory) - prompt,
            status="truncated" if cut else BY_FINISH_REASON.get(leaf.finish_reason, "completed"),
            metadata=metadata,
            routed_experts=experts,
            **want.carried,
        )
    except InvalidTrajectory as error:
        raise UnusableSample(error.invariant, f"turn {leaf.number}: {error}") from None
    # Last: only ids that are some can be decoded.
    return replace(sample, response=making.decode(sample.tokens[prompt:].tolist()))


def _experts(leaf: Turn, tokens: int, experts: Experts) -> tuple[Array | None, dict[str, str]]:
    """The rows of `tokens` tokens of a line; or, where they are captured and not all there, a note that says why."""
    if not experts.captured:
        return None, {}
    held = leaf.held_experts(tokens)
    try:
        if held is None or held.count < tokens - 1:
            raise InvalidTrajectory("experts_held", (leaf.experts and leaf.experts.reason) or "they have been evicted")
        if experts.shape is None:
            raise InvalidTrajectory("experts_of_the_model", "the model's shape is not known: set moe_shape")
        return experts.array(held.rows, 0, tokens - 1), {}
    except InvalidTrajectory as error:
        return None, {"routed_experts_missing": str(error)}


def _turns(line: Sequence[Turn], elsewhere: Mapping[Turn, int], length: int) -> dict[str, Any]:
    """What `length` tokens of a line have of its turns: their positions, and those that another sample trains."""
    spans = zip(line, line_ends(line), strict=True)
    had = [(turn, min(end, length)) for turn, end in spans if turn.prompt_tokens < length]
    return {
        "turns": [turn_span(turn, end) for turn, end in had],
        "untrained_turns": [turn.number for turn, end in had if 0 < end - turn.prompt_tokens <= elsewhere[turn]],
    }


def written(session: Session, found: Sequence[Sample], want: Wanted) -> bytes:
    """The samples of a session in the form that was asked for. Does no I/O and may run in a thread."""
    return WRITERS[want.format](found, _metadata(session), want.carried)


def _metadata(session: Session) -> dict[str, Any]:
    return {
        **session.metadata,
        "session_id": session.id,
        "turns": len(session.turns),
        "segments": len(session.roots),
        "untraced": session.untraced,
    }
