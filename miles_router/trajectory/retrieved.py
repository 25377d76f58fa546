"""`Retrieved`, the exact tokens of a text, and its two formats in answers of `/retrieve_from_text`.

JSON          {"tokens", "loss_mask", "weight_versions", everything else, "rollout_logp", "sampling_mask",
              "sampling_logprobs"}
safetensors   tensors tokens, logprobs, loss_mask, sampling_mask.offsets, sampling_mask.ids, sampling_logprobs;
              everything else as JSON under `facts` in the file's metadata. For several texts each tensor's name begins
              with the text's index (0.tokens), and `facts` is a list

`trajectory.teacher` names the fields of a teacher's scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt
import orjson

from miles_router.trajectory.json_parts import array_parts, object_parts
from miles_router.trajectory.pieces import Logprobs, Malformed, Mask, Tokens, VersionRun
from miles_router.trajectory.safetensors import pack, unpack
from miles_router.trajectory.sampling_mask import SamplingMask, mask_of_tensors, mask_parts, mask_tensors
from miles_router.trajectory.teacher import TeacherScores, arrays_of, facts_of, read_scores
from miles_router.trajectory.trajectory import Trajectory, from_arrays

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The exact tokens of a text.

    Attributes:
        trajectory: `tokens` int32 [n], `loss_mask` uint8 [n], `logprobs` float32 [n], `weight_versions` runs.
        text: the text.
        matched_tokens: the number of recorded tokens: n for a rollout, 0 for an unknown text.
        candidates: the ids of the generations with this text: several if their tokens differ, else at most one.
        rid, finish_reason, finished: of the generation; None if the text does not belong to a rollout.
        cache_versions: the weight versions whose KV cache the engine may have reused from its prefix cache.
        sampling_mask_missing: the number of sampled tokens without a sampling mask, if others have one.
        teacher: another model's logprobs of the sampled tokens, if they were requested.
    """

    trajectory: Trajectory
    text: str
    matched_tokens: int
    candidates: tuple[str, ...] = ()
    rid: str | None = None
    finish_reason: str | None = None
    finished: bool | None = None
    cache_versions: tuple[str | None, ...] = ()
    sampling_mask_missing: int = 0
    teacher: TeacherScores | None = None

    def __len__(self) -> int:
        return len(self.trajectory)

    @property
    def ambiguous(self) -> bool:
        """Whether trajectories with other ids have the same text."""
        return len(self.candidates) > 1

    @property
    def tokens(self) -> Tokens:
        """Token ids, int32 [n]."""
        return self.trajectory.tokens

    @property
    def loss_mask(self) -> Mask:
        """Uint8 [n]; 1 = sampled by the engine."""
        return self.trajectory.loss_mask

    @property
    def logprobs(self) -> Logprobs:
        """Float32 [n]; 0.0 where not sampled."""
        return self.trajectory.logprobs

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """For each token, the ids that could have been sampled; None if a sampled one was recorded without them."""
        return self.trajectory.sampling_mask

    @property
    def sampling_logprobs(self) -> Logprobs | None:
        """Float32 [n]: the logprobs of the sampling mask."""
        return None if (mask := self.sampling_mask) is None else mask.logprobs

    @property
    def weight_versions(self) -> list[VersionRun]:
        """`(version, start, end)` runs over the sampled positions."""
        return self.trajectory.weight_versions

    def json_parts(self, *, with_logprobs: bool = True) -> Iterator[bytes]:
        """Yield the JSON answer in parts."""
        arrays: dict[str, npt.NDArray[Any]] = {"tokens": self.tokens, "loss_mask": self.loss_mask}
        yield from object_parts(
            {**arrays, **arrays_of(self.teacher)}, {"weight_versions": self._runs(), **self._facts()}
        )
        if with_logprobs:
            yield b',"rollout_logp":'
            yield from array_parts(self.logprobs)
        yield from mask_parts(self.sampling_mask)
        yield b"}"

    def _runs(self) -> list[dict[str, Any]]:
        return [run._asdict() for run in self.weight_versions]

    def _facts(self) -> dict[str, Any]:
        return {
            "response": self.text,
            "token_length": len(self),
            "loss_mask_length": len(self),
            "matched_tokens": self.matched_tokens,
            "ambiguous": self.ambiguous,
            "candidates": list(self.candidates),
            "rid": self.rid,
            "finish_reason": self.finish_reason,
            "finished": self.finished,
            "cache_versions": list(self.cache_versions),
            **({"sampling_mask_missing": missing} if (missing := self.sampling_mask_missing) else {}),
            **facts_of(self.teacher),
        }


def write_safetensors(found: Sequence[Retrieved], *, many: bool) -> bytes:
    """Return the answer as a safetensors file: the answer for one text, or with `many` for a list of texts."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for place, each in enumerate(found):
        prefix = f"{place}." if many else ""
        arrays[f"{prefix}tokens"] = each.tokens
        arrays[f"{prefix}logprobs"] = each.logprobs
        arrays[f"{prefix}loss_mask"] = each.loss_mask
        arrays |= mask_tensors(each.sampling_mask, prefix)
        arrays.update({f"{prefix}{name}": array for name, array in arrays_of(each.teacher).items()})
    facts = [{**each._facts(), "weight_versions": each._runs()} for each in found]
    return pack(arrays, {"facts": orjson.dumps(facts if many else facts[0]).decode()})


def read_safetensors(data: bytes) -> Retrieved:
    """Parse the answer for one text.

    Raises:
        Malformed: the bytes have another format.
        InvalidTrajectory: the arrays cannot come from a rollout.
    """
    return _read(data, lambda arrays, facts: _read_one(arrays, facts, ""))


def read_safetensors_list(data: bytes) -> list[Retrieved]:
    """Parse the answer for a list of texts. Raises as `read_safetensors`."""
    return _read(data, lambda arrays, facts: [_read_one(arrays, each, f"{place}.") for place, each in enumerate(facts)])


def _read(data: bytes, read: Callable[[Mapping[str, Any], Any], Found]) -> Found:
    arrays, metadata = unpack(data)
    try:
        return read(arrays, orjson.loads(metadata["facts"]))
    except (KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise Malformed(f"not an answer of /retrieve_from_text: {error!r}") from None


def _read_one(arrays: Mapping[str, Any], facts: Mapping[str, Any], prefix: str) -> Retrieved:
    tokens, logprobs, loss_mask = (arrays[f"{prefix}{name}"] for name in ("tokens", "logprobs", "loss_mask"))
    runs = [(run["version"], run["start"], run["end"]) for run in facts["weight_versions"]]
    return Retrieved(
        trajectory=from_arrays(tokens, logprobs, loss_mask, runs, mask_of_tensors(arrays, prefix)),
        text=facts["response"],
        matched_tokens=facts["matched_tokens"],
        candidates=tuple(facts["candidates"]),
        rid=facts["rid"],
        finish_reason=facts["finish_reason"],
        finished=facts["finished"],
        cache_versions=tuple(facts.get("cache_versions", ())),
        sampling_mask_missing=facts.get("sampling_mask_missing", 0),
        teacher=read_scores(arrays, facts, prefix),
    )
