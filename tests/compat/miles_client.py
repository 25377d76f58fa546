"""miles' side of the wire, written from its protocol (radixark/miles at 31f1ca961): what its session client sends, in
its order, and the steps of its decoder, with the official safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field
from safetensors.numpy import load

TENSORS = {
    "tokens": np.int64,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32,
    "rollout_indexer_topk": np.int32,
}
MASK, MASK_TENSORS = "rollout_sampling_mask", {"ids": np.int32, "offsets": np.int64}
LISTS = ("tokens", "loss_mask", "rollout_log_probs")
VALUES = ("response", "response_length", "status", "weight_versions", "prefix_cache_info", "metadata")
STATUSES = ("pending", "completed", "truncated", "aborted", "failed")


class SessionRecord(BaseModel):
    """Its type of one turn."""

    timestamp: float
    request_timestamp: float | None = None
    method: str
    path: str
    request: dict[str, Any]
    response: dict[str, Any]
    status_code: int


class GetSessionResponse(BaseModel):
    """Its type of a session."""

    session_id: str
    records: list[SessionRecord]
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass
class MilesSample:
    """What it has of one sample."""

    response: str
    response_length: int
    status: str
    weight_versions: list[Any]
    prefix_cache_info: dict[str, int]
    metadata: dict[str, Any] = field(default_factory=dict)
    spec_info: dict[str, int] = field(default_factory=dict)
    reward: Any = None
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: npt.NDArray[np.int32] | None = None
    rollout_indexer_topk: npt.NDArray[np.int32] | None = None
    rollout_sampling_mask: dict[str, npt.NDArray[Any]] | None = None

    def check(self) -> None:
        """Its own checks of lengths."""
        assert len(self.tokens) >= self.response_length >= 0
        assert len(self.loss_mask or ()) == self.response_length
        assert len(self.rollout_log_probs or ()) == self.response_length
        if self.rollout_routed_experts is not None:
            assert len(self.rollout_routed_experts) == len(self.tokens) - 1
        if self.rollout_sampling_mask is not None:
            ids, offsets = self.rollout_sampling_mask["ids"], self.rollout_sampling_mask["offsets"]
            assert (len(offsets), offsets[0], offsets[-1]) == (self.response_length + 1, 0, len(ids))
            assert (np.diff(offsets) > 0).all()
            ends = [0]
            for span in (span for call in self.weight_versions for span in call):
                assert span.keys() == {"version", "abs_start", "abs_end"}
                assert ends[-1] <= span["abs_start"] < span["abs_end"] <= len(self.tokens)
                ends.append(span["abs_end"])


@dataclass
class Reply:
    """A decoded reply."""

    samples: list[MilesSample]
    session_metadata: dict[str, Any]
    empty_reason: str | None


def decode(payload: bytes, *, version: int = 1, masks: bool = False) -> Reply:
    """The steps of its decoder: every promised tensor is there in its type, and none is left over. With `masks` those
    of a run that replays sampling masks (radixark/miles at 067dc3204)."""
    tensors = load(payload)
    meta_array = tensors.pop("_samples_meta")
    assert meta_array.ndim == 1
    assert meta_array.dtype == np.uint8
    meta = json.loads(meta_array.tobytes().decode("utf-8"))
    samples = []
    for place, told in enumerate(meta["samples"]):
        nulls = set(told["nulls"])
        assert nulls <= {*TENSORS, *([MASK] if masks else ())}
        sample = MilesSample(**{name: told[name] for name in (*VALUES, *(["spec_info"] if masks else []))})
        assert sample.status in STATUSES
        assert isinstance(sample.metadata, dict)
        if version == 2:
            sample.reward = told["reward"]
        for name, dtype in TENSORS.items():
            if name in nulls:
                continue
            array = tensors.pop(f"{name}.{place}")
            assert array.dtype == dtype, name
            setattr(sample, name, array.tolist() if name in LISTS else array)
        if masks and MASK not in nulls:
            sample.rollout_sampling_mask = {name: tensors.pop(f"{MASK}.{name}.{place}") for name in MASK_TENSORS}
            assert {name: array.dtype for name, array in sample.rollout_sampling_mask.items()} == MASK_TENSORS
        samples.append(sample)
    assert not tensors, sorted(tensors)
    return Reply(samples, meta["session_metadata"], meta["empty_reason"])


class MilesSession:
    """One episode by its client's calls: made, talked to, its samples collected, deleted."""

    def __init__(self, http: aiohttp.ClientSession, url: str, session_id: str, version: int) -> None:
        self._http = http
        self.id = session_id
        self.base_url = f"{url}/sessions/{session_id}"
        self._version = version

    @classmethod
    async def create(cls, http: aiohttp.ClientSession, url: str, *, version: int = 1) -> MilesSession:
        """Its tests compare with 200."""
        async with http.post(f"{url}/sessions", json={}) as reply:
            assert reply.status == 200
            return cls(http, url, (await reply.json())["session_id"], version)

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """What its agents send."""
        body = {"model": "m", "messages": messages, **fields}
        async with self._http.post(f"{self.base_url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer: dict[str, Any] = await reply.json()
            return answer

    async def read(self) -> dict[str, Any]:
        """The records."""
        async with self._http.get(self.base_url) as reply:
            assert reply.status == 200
            found: dict[str, Any] = await reply.json()
            return found

    async def collect(self, max_seq_len: int | None = None, metadata: Mapping[str, Any] | None = None) -> Reply:
        """`metadata` is what the agent's function gives back; only servers of version 2 are sent it."""
        body: dict[str, Any] = {"max_seq_len": max_seq_len}
        if metadata is not None:
            body["metadata"] = dict(metadata)
        try:
            async with self._http.post(f"{self.base_url}/samples", json=body) as reply:
                payload = await reply.read()
                assert 200 <= reply.status < 300, payload
                assert reply.content_type == "application/octet-stream"
        finally:
            async with self._http.delete(self.base_url, headers={}) as reply:
                assert reply.status == 204
        return decode(payload, version=self._version)
