"""Read the samples files of miles (radixark/miles at 31f1ca961, `rollout/session/samples/codec.py`).

The format is one safetensors file. Sample i has the tensors `tokens.i`, and over its response `loss_mask.i` and
`rollout_log_probs.i`; optionally `rollout_routed_experts.i`. Everything else is JSON in the tensor `_samples_meta`: the
list `samples`, each with the names of its missing tensors in `nulls`, and `empty_reason`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from middleware_hub.view.sheets import TURNS, TokenSheet, entropy_of, fitting_turns, sampled_positions
from miles_router.trajectory import InvalidTrajectory, Malformed
from miles_router.trajectory.trajectory import checked_arrays

META = "_samples_meta"
#: Key of a sample's metadata that holds the metadata written by the router.
ROUTER = "router"
MASK, LOGPROBS, EXPERTS = "loss_mask", "rollout_log_probs", "rollout_routed_experts"
Arrays = Mapping[str, npt.NDArray[Any]]


def read(arrays: Arrays) -> tuple[list[dict[str, Any]], str | None]:
    """Return the JSON description of each sample, and the file's reason for having no samples, if it has one.

    Raises:
        Malformed: the file does not have this format.
    """
    try:
        meta = orjson.loads(arrays[META].tobytes())
        samples, reason = meta["samples"], meta.get("empty_reason")
    except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise Malformed(f"no samples in {META}: {error!r}") from None
    if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
        raise Malformed(f"the samples in {META} are not a list of objects")
    return samples, None if reason is None else str(reason)


def sheets_of(arrays: Arrays, samples: list[dict[str, Any]]) -> Iterator[TokenSheet]:
    """Yield the samples, one at a time.

    Raises:
        Malformed: a tensor is missing that `nulls` does not name, or a value has the wrong type.
        InvalidTrajectory: the arrays contradict each other.
    """
    for place, about in enumerate(samples):
        try:
            nulls = about["nulls"]
            names = [name for name in ("tokens", MASK, LOGPROBS, EXPERTS) if name not in nulls]
            given = {name: arrays[f"{name}.{place}"] for name in names}
            yield _sheet(given, about)
        except (KeyError, TypeError, AttributeError) as error:
            raise Malformed(f"sample {place}: a field is missing or of the wrong kind: {error!r}") from None


def _sheet(given: Arrays, about: Mapping[str, Any]) -> TokenSheet:
    tokens = given.get("tokens", np.zeros(0, dtype=np.int64))
    length, response = len(tokens), about["response_length"]
    if type(response) is not int or not 0 <= response <= length:
        raise InvalidTrajectory("response_fits", f"{length} tokens cannot have a response of {response!r}")
    mask, logprobs = (_over_all(given.get(name), response, length) for name in (MASK, LOGPROBS))
    nothing: npt.NDArray[Any] = np.zeros(length)
    checked = checked_arrays(tokens, nothing if logprobs is None else logprobs, nothing if mask is None else mask)
    experts = given.get(EXPERTS)
    if experts is not None and (experts.ndim != 3 or len(experts) != max(length - 1, 0)):
        raise InvalidTrajectory("routed_experts_fit", f"{length} tokens cannot have rows {list(experts.shape)}")
    own = {**about["metadata"]}
    of_router = own.pop(ROUTER, None)
    if isinstance(of_router, dict):
        own |= of_router
    leaf = own.get("leaf")
    turns, notes = fitting_turns(own.pop(TURNS) if isinstance(own.get(TURNS), list) else None, length)
    path = [turn["turn"] for turn in turns] or (leaf.get("path_node_ids", ()) if isinstance(leaf, dict) else ())
    return TokenSheet(
        tokens=checked.tokens,
        loss_mask=None if mask is None else checked.loss_mask,
        sampled=None if mask is None else sampled_positions(checked.loss_mask, logprobs, (), turns),
        logprobs=logprobs,
        expert_entropy=entropy_of(experts),
        version_names=[str(name) for each in about["weight_versions"] for name in _names(each)],
        turns=turns,
        path=[number for number in path if type(number) is int],
        status=str(about["status"]),
        reward=about.get("reward"),
        response_length=response,
        metadata=own,
        notes=notes,
    )


def _names(versions: Any) -> list[Any]:
    """Return the names in an element of `weight_versions`: a name, or in files of newer versions the spans of one."""
    return [span["version"] for span in versions] if isinstance(versions, list) else [versions]


def _over_all(array: npt.NDArray[Any] | None, response: int, length: int) -> npt.NDArray[Any] | None:
    """Pad an array over the response with zeros for the prompt, so that it covers all tokens."""
    if array is None:
        return None
    if array.shape != (response,):
        raise InvalidTrajectory("aligned", f"a response of {response} tokens cannot have {list(array.shape)} values")
    return np.concatenate([np.zeros(length - response, dtype=array.dtype), array])
