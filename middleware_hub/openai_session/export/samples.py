"""Training samples out of a session: one for each selected leaf, checked, as JSON or safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.records import turn_span
from middleware_hub.openai_session.export.selection import Selection, trained_elsewhere
from middleware_hub.openai_session.sessions.tree import Session, Turn, line_ends, line_trajectory
from miles_router.errors import BadRequest
from miles_router.middlewares import RowChannel
from miles_router.trajectory import InvalidTrajectory, Sample
from miles_router.trajectory.sample import BY_FINISH_REASON, CARRIED, WRITERS, Format, RoutedExperts

#: What we say of a sample in its metadata.
FACTS = ("session_id", "leaf", "reason", "turns", "untrained_turns", "untraced", "routed_experts_missing")
FIELDS = frozenset({"format", "max_seq_len", "branches", "reward", "label", "metadata"})


@dataclass(frozen=True)
class SampleRequest:
    """What `POST /sessions/{id}/samples` asks for."""

    format: Format = "json"
    max_seq_len: int | None = None
    branches: object = ""  # none named: the operator's, or those of the form
    carried: Mapping[str, Any] = field(default_factory=dict)  # reward and label, given back on every sample
    metadata: Mapping[str, Any] = field(default_factory=dict)
    default_branches: str = "all"  # of the form
    leave_out_prompts: bool = False  # a branch without room for more than its first prompt gives no sample

    @classmethod
    def read(cls, body: object) -> SampleRequest:
        """The request with this JSON.

        Raises:
            BadRequest: a field is unknown or of the wrong type.
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
        carried = {name: body[name] for name in CARRIED if name in body}
        return cls(form, longest, body.get("branches", ""), carried, metadata or {})


@dataclass(frozen=True)
class SampleMaker:
    """Makes samples of sessions.

    Args:
        decode: token ids to text.
        experts: the routed experts of the stack, where they are captured.
    """

    selection: Selection
    decode: Callable[[Sequence[int]], str]
    experts: RowChannel

    def make(self, session: Session, request: SampleRequest) -> list[Sample]:
        """The samples of a session. A leaf in whose line nothing was sampled (aborted before its first token) gives
        none.

        Raises:
            BadRequest: no such branch policy.
            UnusableSample: one of them would break an invariant; none is given.
        """
        selected = self.selection.leaves(session, request.branches, default=request.default_branches)
        leaves = [leaf for leaf in selected if _was_answered(leaf)]
        if request.leave_out_prompts and request.max_seq_len is not None:
            leaves = [leaf for leaf in leaves if leaf.line()[0].prompt_tokens < request.max_seq_len]
        plans = trained_elsewhere(leaves)
        return [self._sample(session, leaf, plan, request) for leaf, plan in zip(leaves, plans, strict=True)]

    def _sample(self, session: Session, leaf: Turn, elsewhere: Mapping[Turn, int], request: SampleRequest) -> Sample:
        line = leaf.line()
        whole = line_trajectory(line, elsewhere=elsewhere)
        prompt = line[0].prompt_tokens
        cut = request.max_seq_len is not None and len(whole) > request.max_seq_len
        trajectory = whole[: request.max_seq_len] if cut else whole
        if len(trajectory) <= prompt:
            raise UnusableSample("has_a_response", f"turn {leaf.number}: the first prompt alone has {prompt} tokens")
        rows, missing = _expert_rows(leaf, len(trajectory), self.experts)
        facts = _facts(session, line, elsewhere, len(trajectory))
        try:
            sample = Sample(
                tokens=trajectory.tokens,
                loss_mask=trajectory.loss_mask,
                logprobs=trajectory.logprobs,
                weight_versions=tuple(trajectory.weight_versions),
                response_length=len(trajectory) - prompt,
                status="truncated" if cut else BY_FINISH_REASON.get(leaf.finish_reason, "completed"),
                metadata={**session.metadata, **request.metadata, **facts, **missing},
                routed_experts=rows,
                **request.carried,
            )
        except InvalidTrajectory as error:
            raise UnusableSample(error.invariant, f"turn {leaf.number}: {error}") from None
        # After the checks: a tokenizer may fail over an id that does not exist.
        return replace(sample, response=self.decode(sample.tokens[prompt:].tolist()))


def write_samples(session: Session, samples: Sequence[Sample], request: SampleRequest) -> bytes:
    """The answer with the samples of a session. It does no I/O and may run in a thread."""
    metadata = {
        **session.metadata,
        "session_id": session.id,
        "turns": len(session.turns),
        "segments": len(session.roots),
        "untraced": session.untraced,
    }
    return WRITERS[request.format](samples, metadata, request.carried)


def _was_answered(leaf: Turn) -> bool:
    return any(turn.sampled for turn in leaf.line())


def _expert_rows(leaf: Turn, tokens: int, experts: RowChannel) -> tuple[RoutedExperts | None, dict[str, str]]:
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


def _facts(session: Session, line: Sequence[Turn], elsewhere: Mapping[Turn, int], length: int) -> dict[str, Any]:
    """What the metadata of a sample, the first `length` tokens of a line, says of its turns: where they are, and which
    of them another sample trains."""
    spans = zip(line, line_ends(line), strict=True)
    turns = [(turn, min(end, length)) for turn, end in spans if turn.prompt_tokens < length]
    return {
        "session_id": session.id,
        "leaf": line[-1].number,
        "reason": next((turn.reason for turn in line if turn.reason is not None), None),
        "turns": [turn_span(turn, end) for turn, end in turns],
        "untrained_turns": [turn.number for turn, end in turns if 0 < end - turn.prompt_tokens <= elsewhere[turn]],
        "untraced": len(session.untraced),
    }
