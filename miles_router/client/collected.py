"""The answer of `POST /sessions/{id}/samples` in its two forms."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from miles_router.client.errors import InvalidReply
from miles_router.client.sample import Sample
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.wire import unpack

#: Samples as JSON, or all of them in one safetensors file, which is several times smaller and faster to read.
Format = Literal["safetensors", "json"]
ARRAYS = ("tokens", "loss_mask", "logprobs")
EXPERTS = "routed_experts"


def samples_from_json(data: bytes) -> list[Sample]:
    """`{"samples": [...], "metadata"}`.

    Raises:
        InvalidReply: it has another form.
        InvalidSample: one of them breaks an invariant.
    """
    try:
        given = orjson.loads(data)["samples"]
        return [Sample.from_json(each) for each in given]
    except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise InvalidReply(f"no samples in JSON: {error!r}") from None


def samples_from_safetensors(data: bytes) -> list[Sample]:
    """Tensors `0.tokens`, `0.loss_mask`, `0.logprobs`, `0.routed_experts`, ..., and everything else as a JSON list
    under `samples` in the file's metadata. Their routed experts are views of `data`.

    Raises:
        InvalidReply: it has another form.
        InvalidSample: one of them breaks an invariant.
    """
    try:
        arrays, metadata = unpack(data)
        given: list[dict[str, Any]] = orjson.loads(metadata["samples"])
        return [
            Sample.from_parts(
                {name: arrays[f"{place}.{name}"] for name in ARRAYS}, facts, arrays.get(f"{place}.{EXPERTS}")
            )
            for place, facts in enumerate(given)
        ]
    except (InvalidTrajectory, KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise InvalidReply(f"no samples in safetensors: {error!r}") from None


READERS = {"json": samples_from_json, "safetensors": samples_from_safetensors}
