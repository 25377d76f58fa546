"""miles' form of samples (radixark/miles at 31f1ca961, `rollout/session/samples/codec.py`), and how a request asks for
it.

The answer is one safetensors file. Tensors of sample i: `tokens.i` int64 [n], and over its response `loss_mask.i` uint8
and `rollout_log_probs.i` float64; where the router records them, `rollout_routed_experts.i` and
`rollout_indexer_topk.i`, int32 [n - 1, layers, top_k].

31f1ca961 reads no sampling masks, and raises on tensors that it does not read. So a sample of a session that asked for
masks has the form of radixark/miles at 067dc3204: over its response `rollout_sampling_mask.ids.i` int32 and
`rollout_sampling_mask.offsets.i` int64, in `rollout_log_probs.i` the logprobs among these ids, in `weight_versions` a
list of spans for each run of one version, and `spec_info`, with nothing in it.

Everything else is compact JSON in the tensor `_samples_meta`, uint8. `samples` has an object for each sample, which
lists its missing tensors in `nulls`. `session_metadata` follows, and `empty_reason`: why there is no sample.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from middleware_hub.openai_session.continuing.comparison import Comparison
from middleware_hub.openai_session.export.routes import SAFETENSORS, SessionRoutes
from middleware_hub.openai_session.export.samples import FACTS, MASK_MISSING, SamplePlan, SampleRequest
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn, read_key
from miles_router.engines import paths
from miles_router.trajectory import Sample
from miles_router.trajectory.safetensors import TensorFile

NAME = "miles"
#: A file of more bytes is streamed from threads.
AT_ONCE = 1 << 20
#: The arguments of a comparison with the chat template: messages, tools, settings, and recorded tokens.
ComparisonInput = tuple[Sequence[Any], Any, Mapping[str, Any], list[int]]
#: Fields that its client sends; only servers of its version 2 send `metadata`.
CLIENT_FIELDS = frozenset({"max_seq_len", "metadata"})
META = "_samples_meta"
#: The argument of a run that wants the messages of its samples.
DUMPS_MESSAGES = "save_debug_trajectory_data"
#: Metadata keys of the router's facts about a sample, and about its session. They differ because the driver of its
#: first version updates the one metadata with the other.
SAMPLE, SESSION = "router", "router_session"
TENSORS: Mapping[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32,
    "rollout_indexer_topk": np.int32,
}
#: The field of a sampling mask, and its tensors.
MASK = "rollout_sampling_mask"
MASK_TENSORS: Mapping[str, type[np.generic]] = {f"{MASK}.ids": np.int32, f"{MASK}.offsets": np.int64}
#: JSON fields of a sample, in the framework's order. The reader of its first version ignores `reward`.
VALUES = (
    *("response", "response_length", "status", "weight_versions", "spec_info", "prefix_cache_info", "metadata"),
    "reward",
)


class MilesForm:
    """The form of samples that miles reads. `args` are the run's."""

    def __init__(self, sessions: SessionRoutes, comparison: Comparison, args: Namespace) -> None:
        self._sessions = sessions
        self._comparison = comparison
        self._with_messages = getattr(args, DUMPS_MESSAGES, None) is not None

    def is_requested(self, body: Mapping[str, Any], accept: str) -> bool:
        """Return whether a request asks for this form: by `format`, by `Accept`, or by the exact fields of the
        client."""
        if "format" in body:
            return bool(body["format"] == NAME)
        if "application/json" in accept:
            return False
        return SAFETENSORS in accept or ("max_seq_len" in body and body.keys() <= CLIENT_FIELDS)

    async def answer(self, request: Request, session: Session, body: Mapping[str, Any]) -> Response:
        """Return the response with the file. A leaf whose first prompt alone fills `max_seq_len` is left out. Raises as
        `SampleRequest.read` and `SamplePlan.make`."""
        wanted = SampleRequest.read({name: value for name, value in body.items() if name != "format"})
        # The first version reads one sample, and continues the branch with the latest request.
        policy = "drop-superseded" if "metadata" in body else "last"
        carried = {"reward": wanted.metadata.get("reward"), **wanted.carried}
        wanted = replace(wanted, carried=carried, default_branches=policy, may_be_empty=True, leave_out_prompts=True)
        plan = self._sessions.maker.plan(session, wanted)
        leaves = [leaf for leaf, _ in plan.leaves]
        about = {**session.metadata, SESSION: _about(session, leaves)}
        if "metadata" in body:
            about["agent"] = wanted.metadata
        reason = None if leaves else _empty_reason(session, wanted)
        inputs = [_comparison_input(leaf) for leaf in leaves]  # before another task changes the session
        write = partial(self._write, plan, inputs, about, reason)
        return _response(await self._sessions.run_in_thread(request, write))

    def _write(
        self, plan: SamplePlan, inputs: Sequence[ComparisonInput | None], about: Mapping[str, Any], reason: str | None
    ) -> TensorFile:
        own, beside = {**plan.metadata, **plan.request.metadata}, dict[str, Any]()
        entries = []
        for sample, (leaf, _), comparison_input in zip(plan.make(), plan.leaves, inputs, strict=True):
            mismatch = None if comparison_input is None else self._comparison.mismatches(*comparison_input)
            mismatches = {} if mismatch is None else {"tito_session_mismatch": mismatch}
            beside |= mismatches
            messages = {"messages": _messages(leaf)} if self._with_messages else {}
            entries.append(fields_of(sample, {**own, **_metadata(sample, leaf), **mismatches, **messages}))
        return samples_file(entries, {**about, **beside}, reason)


def samples_file(
    entries: Sequence[Mapping[str, Any]], session_metadata: Mapping[str, Any], empty_reason: str | None
) -> TensorFile:
    """Return the file of samples. An entry contains the fields of `TENSORS`, `MASK_TENSORS` and `VALUES` that a sample
    has; `MASK`, which is None, if it lacks a mask that was asked for."""
    arrays, types, objects = {}, {}, []
    for place, entry in enumerate(entries):
        for name, dtype in (*TENSORS.items(), *MASK_TENSORS.items()):
            if entry.get(name) is not None:
                arrays[f"{name}.{place}"], types[f"{name}.{place}"] = entry[name], dtype
        nulls = [name for name in TENSORS if entry.get(name) is None] + [MASK] * (MASK in entry)
        objects.append({**{name: entry[name] for name in VALUES if name in entry}, "nulls": nulls})
    meta = orjson.dumps({"samples": objects, "session_metadata": session_metadata, "empty_reason": empty_reason})
    return TensorFile({**arrays, META: np.frombuffer(meta, np.uint8)}, types=types)


def fields_of(sample: Sample, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one sample."""
    return {
        "reward": sample.reward,
        **sample.trainer_fields(arrays=True),
        "prefix_cache_info": _prefix_cache_info(sample),
        "metadata": metadata,
        **_mask(sample),
    }


def _mask(sample: Sample) -> dict[str, Any]:
    """Return the fields that a sample of a session with sampling masks has in another form, and those of its mask."""
    if sample.sampling_mask is None and MASK_MISSING not in sample.metadata:
        return {}
    spans = [{"version": run.version, "abs_start": run.start, "abs_end": run.end} for run in sample.weight_versions]
    newer = {"weight_versions": [[span] for span in spans], "spec_info": {}}
    if sample.sampling_mask is None:
        return {**newer, MASK: None}
    mask = sample.sampling_mask.cut(sample.prompt_length, len(sample))
    return {**newer, f"{MASK}.ids": mask.ids, f"{MASK}.offsets": mask.offsets, "rollout_log_probs": mask.logprobs}


def _prefix_cache_info(sample: Sample) -> dict[str, int]:
    """Return how many prompt tokens were cached in the engine. Turns without a reported number are not counted."""
    turns = [turn for turn in sample.metadata["turns"] if turn["cached_tokens"] is not None]
    return {
        "cached_tokens": sum(turn["cached_tokens"] for turn in turns),
        "total_prompt_tokens": sum(turn["start"] for turn in turns),
    }


def _metadata(sample: Sample, leaf: Turn) -> dict[str, Any]:
    """Return the metadata of a sample that its trainer reads, and the router's facts under `SAMPLE`."""
    line = leaf.line()
    turns = sample.metadata["turns"]
    before = [None, *(turn["answered_at"] for turn in turns)]
    return {
        "leaf": {
            "node_id": leaf.number,
            "parent": None if leaf.parent is None else leaf.parent.number,
            "path_node_ids": [turn.number for turn in line],
            "response_id": leaf.facts.get("rid"),
        },
        "lifecycle": [
            {
                "t0": turn["asked_at"],
                "t1": turn["answered_at"],
                "turn": number,
                "req_ts": turn["asked_at"],
                **({} if previous is None else {"prev_t1": previous}),
            }
            for number, (turn, previous) in enumerate(zip(turns, before, strict=False), 1)
        ],
        SAMPLE: {name: sample.metadata[name] for name in FACTS if name in sample.metadata} | _per_token(sample),
    }


def _per_token(sample: Sample) -> dict[str, Any]:
    values = {name: array.tolist() for name, array in sample.per_token.items()}
    return {"per_token": values} if values else {}


def _about(session: Session, leaves: Sequence[Turn]) -> dict[str, Any]:
    """Return the router's facts about the session."""
    return {
        "session_id": session.id,
        "turns": len(session.turns),
        "segments": len(session.roots),
        "untraced": list(session.untraced),
        "branches_left_out": len(session.leaves()) - len(leaves),
    }


def _empty_reason(session: Session, request: SampleRequest) -> str:
    if not session.turns:
        return "untraced" if session.untraced else "no_records"
    truncated = request.max_seq_len is not None and any(turn.sampled for turn in session.turns)
    return "all_truncated" if truncated else "nothing_sampled"


def _comparison_input(leaf: Turn) -> ComparisonInput | None:
    """Return the arguments for a comparison of a leaf's line; None for a line without a chat template."""
    if leaf.path == paths.COMPLETIONS:
        return None
    tools, settings = read_key(leaf.context)
    return _messages(leaf), tools, settings, leaf.trajectory().tokens.tolist()


def _messages(leaf: Turn) -> list[Message]:
    return [message for turn in leaf.line() for message in (*turn.appended, turn.answer)]


def _response(file: TensorFile) -> Response:
    """Return the response. A large file is streamed from threads, so rows never exist at full width in memory."""
    if file.nbytes <= AT_ONCE:
        return Response(b"".join(file.chunks()), media_type=SAFETENSORS)
    headers = {"content-length": str(file.nbytes)}
    return StreamingResponse(map(bytes, file.chunks()), headers=headers, media_type=SAFETENSORS)
