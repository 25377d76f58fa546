"""Dressage's side of the wire, written from its protocol (Accio-Lab/Dressage at de8e8694): what its `ProxyClient` and
the proxy within its sandboxes send, and what its reader of segments wants (`rollout/artifacts/samples.py`)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

NO_VERSIONS = ("", "-1", "unknown", "none")


@dataclass
class DressageSample:
    """What its trainer has of one segment."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    response: str
    truncated: bool
    versions: list[str]
    label: Any
    experts: npt.NDArray[np.int32] | None = None


def read_segments(payload: Mapping[str, Any], *, layers: int | None = None, top_k: int | None = None) -> list[Any]:
    """The steps of its reader: its samples in the order of their index, which is there once."""
    segments = sorted(payload["data"], key=lambda segment: int(segment["segment_index"]))
    assert [segment["segment_index"] for segment in segments] == list(range(len(segments)))
    assert len({segment["uid"] for segment in segments}) == len(segments)
    return [_read(segment, layers, top_k) for segment in segments]


def _read(segment: Mapping[str, Any], layers: int | None, top_k: int | None) -> DressageSample:
    tokens, mask, logprobs = segment["tokens"], segment["full_loss_mask"], segment["full_logprobs"]
    versions = [str(version) for version in segment["full_versions"]]
    assert len(tokens) == len(mask) == len(logprobs) == len(versions) > 0
    assert set(mask) <= {0, 1}
    assert sum(mask) == segment["aligned_response_length"]
    start = mask.index(1) if 1 in mask else len(tokens)
    said = [message["content"] for message in segment["messages"] if message["role"] == "assistant"]
    experts = None
    if layers is not None and top_k is not None:
        parts = []
        for part in segment["routed_experts_chunks"]:
            assert part["dtype"] in ("uint8", "uint16", "int32")
            rows = np.frombuffer(base64.b64decode(part["data"]), part["dtype"]).astype(np.int32)
            parts.append(rows.reshape(-1, layers, top_k))
            assert len(parts[-1]) == part["row_count"]
        experts = np.concatenate(parts)
        assert len(experts) == len(tokens) - 1
    return DressageSample(
        tokens=tokens,
        response_length=len(tokens) - start,
        loss_mask=mask[start:],
        rollout_log_probs=logprobs[start:],
        response=str(said[-1]) if said and said[-1] is not None else "",
        truncated=segment["finish_reason"] == "length",
        versions=[version for version, own in zip(versions, mask, strict=True) if own and version not in NO_VERSIONS],
        label=segment["label"],
        experts=experts,
    )


def context_overflow_of(status: int, body: bytes) -> Mapping[str, Any] | None:
    """What the proxy in its sandboxes finds in an error (`rollout_llm_proxy.py`, `adapters/base.py`)."""
    payload = json.loads(body) if status == 413 and body else None
    if not isinstance(payload, dict) or (payload.get("code") or payload.get("error")) != "context_overflow":
        return None
    details: Mapping[str, Any] = payload["details"]
    return {name: int(details[name]) for name in ("context_window", "input_tokens")}


class DressageClient:
    """Its `ProxyClient`: another status than 2xx is raised."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        async with self._http.post(f"{self._url}{path}", json=body, headers=headers, raise_for_status=True) as reply:
            return await reply.json()

    async def chat(
        self, body: Mapping[str, Any], *, session_id: str, instance_id: str, turn_id: str | None = None
    ) -> Any:
        """What a white-box agent asks."""
        headers = {"X-Session-Id": session_id, "X-Instance-Id": instance_id}
        if turn_id is not None:
            headers["X-Turn-Id"] = turn_id
        return await self._post("/v1/chat/completions", body, headers)

    async def chat_in_sandbox(
        self, body: Mapping[str, Any], *, session_id: str, instance_id: str, turn_id: str
    ) -> bytes:
        """What the proxy within a sandbox makes of a request of an agent that knows nothing of all this: the ids of its
        session and turn, the same for every request within one turn."""
        headers = {
            "X-SMG-Routing-Key": session_id,
            "X-Session-Id": session_id,
            "X-Instance-Id": instance_id,
            "X-Turn-Id": turn_id,
            "X-Dressage-Partial-Rollout": "1",
            "Accept-Encoding": "identity",
        }
        given = {**body, "stream_options": {"include_usage": True}} if body.get("stream") else body
        url = f"{self._url}/v1/chat/completions"
        async with self._http.post(url, json=given, headers=headers, raise_for_status=True) as reply:
            return await reply.read()

    async def finalize(self, session_id: str, *, instance_id: str, label: Any = None) -> Any:
        given = {"label": label} if label is not None else {}
        return await self._post("/session/finalize", {"session_id": session_id, "instance_id": instance_id, **given})

    async def discard(self, session_id: str) -> Any:
        return await self._post("/session/discard", {"session_id": session_id})

    async def read(self, session_id: str, *, instance_id: str, **fields: Any) -> Any:
        body = {"drain": True, "trajectory_id": session_id, "instance_id": instance_id, **fields}
        return await self._post("/trajectory/read", body)

    async def pause(self) -> Any:
        """What its trainer asks before it updates the weights of the engines."""
        return await self._post("/v1/rollout/pause", {"reason": "weight_update", "timeout_seconds": 300.0})

    async def resume(self) -> Any:
        return await self._post("/v1/rollout/resume", {"reason": "weight_update"})
