"""Write samples in Dressage's form (`proxy/trajectory_store.py`, `TrajectorySegment`). There is one segment for each
line of turns, with the fields of its reader and the fields of the router's own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from middleware_hub.openai_session.export.samples import SamplePlan
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn, read_key
from miles_router.trajectory.json_parts import object_parts
from miles_router.trajectory.sample import Sample, json_parts, row_parts

#: The version of tokens that were not sampled.
NO_VERSION = "-1"
#: The only view of segments: a line of turns.
VIEW = "lineage"


def segments_of(plans: Sequence[tuple[Session, SamplePlan]]) -> list[bytes]:
    """Return the samples of finalized sessions in the dialect's form, each as JSON."""
    segments: list[bytes] = []
    for session, plan in plans:
        samples = plan.make()  # make all samples before writing the first
        carried = plan.request.carried
        for index, (sample, (leaf, _)) in enumerate(zip(samples, plan.leaves, strict=True)):
            about = {**_about(session, plan, leaf, sample), "segment_index": index, "segment_count": len(samples)}
            about |= {} if "label" in carried else {"label": None}
            segments.append(b"".join(_segment_parts(sample, about, carried)))
    return segments


def _segment_parts(sample: Sample, about: Mapping[str, Any], carried: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield one segment: the fields of its reader, then the fields of the router's samples. Experts occur once, in its
    form."""
    yield orjson.dumps(about)[:-1]
    arrays = object_parts({"full_loss_mask": sample.loss_mask, "full_logprobs": sample.logprobs}, {})
    yield b"," + next(arrays)[1:]
    yield from arrays
    yield b',"full_versions":['
    yield _full_versions(sample)
    yield b"]"
    if sample.routed_experts is not None:
        yield b',"routed_experts_chunks":['
        yield from row_parts(sample.routed_experts, row_count=len(sample.routed_experts))
        yield b"]"
    ours = json_parts(replace(sample, routed_experts=None), carried)
    yield b"," + next(ours)[1:]
    yield from ours


def _about(session: Session, plan: SamplePlan, leaf: Turn, sample: Sample) -> dict[str, Any]:
    """Return the reader's fields of a segment other than arrays. A segment that was cut has the finish reason `length`:
    the form has no other field for that."""
    line = leaf.line()
    reasons = [plan.classified[turn.number].reason for turn in line]
    turn_ids = list(dict.fromkeys(str(turn.facts.get("turn_id") or turn.number) for turn in line))
    return {
        "trajectory_id": session.id,
        "instance_id": plan.metadata.get("instance_id"),
        "session_id": session.id,
        "uid": f"{session.id}:{leaf.number}",
        "turn_id": turn_ids[-1],
        "messages": [message for turn in line for message in (*turn.appended, turn.answer)],
        "tools": read_key(leaf.context)[0],
        "aligned_response_length": int(sample.loss_mask.sum()),
        "finish_reason": leaf.finish_reason if sample.status == "completed" else "length",
        "timestamp": leaf.facts.get("answered_at"),
        "extra_info": {
            "segment_view": VIEW,
            "num_steps": len(line),
            "num_turns": len(turn_ids),
            "turn_ids": turn_ids,
            "segment_reasons": [reason for reason in reasons if reason is not None],
        },
    }


def _full_versions(sample: Sample) -> bytes:
    """Return the version of each token, as a JSON list without its brackets."""
    parts, end = [], 0
    for run in sample.weight_versions:
        for version, start, stop in ((NO_VERSION, end, run.start), (run.version, run.start, run.end)):
            parts.append((orjson.dumps(version) + b",") * (stop - start))
        end = run.end
    parts.append((orjson.dumps(NO_VERSION) + b",") * (len(sample) - end))
    return b"".join(parts)[:-1]
