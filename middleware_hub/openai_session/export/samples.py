"""Training samples out of a session: one for each selected leaf, checked, as JSON or safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from middleware_hub.openai_session.errors import InvalidSample
from middleware_hub.openai_session.export.records import span, turn_span
from middleware_hub.openai_session.export.selection import Selection, trained_elsewhere
from middleware_hub.openai_session.sessions.tree import Session, Turn, line_ends, line_trajectory
from miles_router.errors import BadRequest
from miles_router.middlewares.rows import RowChannel
from miles_router.trajectory import InvalidTrajectory, Trajectory, from_arrays
from miles_router.trajectory.wire import pack

FORMATS = ("json", "safetensors")
FIELDS = frozenset({"format", "max_seq_len", "branches", "reward", "label", "metadata"})
STATUS = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}

Decode = Callable[[Sequence[int]], str]
Array = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Wanted:
    """What `POST /sessions/{id}/samples` asks for."""

    format: str = "json"
    max_seq_len: int | None = None
    branches: object = "all"
    carried: Mapping[str, Any] | None = None  # reward and label, given back on every sample
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Sample:
    """One sample: everything but its arrays is in `rest`."""

    trajectory: Trajectory
    rest: Mapping[str, Any]
    experts: Array | None = None  # [tokens - 1, layers, top_k]


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
    if form not in FORMATS:
        raise BadRequest(f"format must be one of {', '.join(FORMATS)}")
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
    experts: RowChannel


def samples(session: Session, want: Wanted, making: Making) -> list[Sample]:
    """The samples of a session. A leaf in whose line nothing was sampled (aborted before its first token) gives none.

    Raises:
        BadRequest: no such branch policy.
        InvalidSample: one of them would break an invariant; none is given.
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
        raise InvalidSample("has_a_response", f"turn {leaf.number}: the first prompt alone has {prompt} tokens")
    _check(trajectory, leaf)
    experts, facts = _experts(leaf, len(trajectory), making.experts)
    rest = {
        "weight_versions": [span(run) for run in trajectory.weight_versions],
        "response": making.decode(trajectory.tokens[prompt:].tolist()),
        "response_length": len(trajectory) - prompt,
        "status": "truncated" if cut else STATUS.get(leaf.finish_reason, "completed"),
        **(want.carried or {}),
        "metadata": {
            **session.metadata,
            **(want.metadata or {}),
            "session_id": session.id,
            "leaf": leaf.number,
            "reason": next((turn.reason for turn in line if turn.reason is not None), None),
            **_turns(line, elsewhere, len(trajectory)),
            "untraced": len(session.untraced),
            **facts,
        },
    }
    return Sample(trajectory, rest, experts)


def _experts(leaf: Turn, tokens: int, experts: RowChannel) -> tuple[Array | None, dict[str, str]]:
    """The rows of `tokens` tokens of a line; or, where they are captured and not all there, a note that says why."""
    if not experts.captures:
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


def _check(trajectory: Trajectory, leaf: Turn) -> None:
    """Every invariant of a trajectory, once more over the flat arrays that go out.

    Raises:
        InvalidSample: naming the first that does not hold.
    """
    runs = [(run.version, run.start, run.end) for run in trajectory.weight_versions]
    for piece in trajectory.pieces:
        if piece.logprobs is not None and len(piece.logprobs) != len(piece):
            lengths = f"{len(piece)} sampled tokens have {len(piece.logprobs)} logprobs"
            raise InvalidSample("aligned", f"turn {leaf.number}: {lengths}")
    try:
        from_arrays(trajectory.tokens, trajectory.logprobs, trajectory.loss_mask, runs)
    except InvalidTrajectory as error:
        raise InvalidSample(error.invariant, f"turn {leaf.number}: {error}") from None


def as_json(session: Session, found: Sequence[Sample]) -> bytes:
    """`{"samples": [...], "metadata"}`."""
    shown = [
        {
            "tokens": sample.trajectory.tokens,
            "loss_mask": sample.trajectory.loss_mask,
            "logprobs": sample.trajectory.logprobs,
            **sample.rest,
            **({} if sample.experts is None else {"routed_experts": _as_base64(sample.experts)}),
        }
        for sample in found
    ]
    whole = {"samples": shown, "metadata": _metadata(session)}
    return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_base64(array: Array) -> dict[str, Any]:
    whole = np.ascontiguousarray(array)
    data = pybase64.b64encode(whole.reshape(-1).view(np.uint8).data).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def as_safetensors(session: Session, found: Sequence[Sample]) -> bytes:
    """One file: `0.tokens`, `0.loss_mask`, `0.logprobs`, `0.routed_experts`, `1.tokens`, ...; the rest as JSON in its
    metadata."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, sample in enumerate(found):
        arrays[f"{number}.tokens"] = sample.trajectory.tokens
        arrays[f"{number}.loss_mask"] = sample.trajectory.loss_mask
        arrays[f"{number}.logprobs"] = np.asarray(sample.trajectory.logprobs, dtype=np.float32)
        if sample.experts is not None:
            arrays[f"{number}.routed_experts"] = sample.experts
    rest = {
        "samples": orjson.dumps([sample.rest for sample in found]).decode(),
        "metadata": orjson.dumps(_metadata(session)).decode(),
    }
    return pack(arrays, rest)


def _metadata(session: Session) -> dict[str, Any]:
    return {
        **session.metadata,
        "session_id": session.id,
        "turns": len(session.turns),
        "segments": len(session.roots),
        "untraced": session.untraced,
    }
