"""`Sample`, the validated input of a trainer, and its two formats on the wire.

JSON          {"samples": [{"tokens", "loss_mask", "logprobs", everything else, rows by kind}, ...], "metadata"}
safetensors   tensors 0.tokens, 0.loss_mask, 0.logprobs, 0.routed_experts, 1.tokens, ...; in the file's metadata, as
              JSON, `samples` with everything else of each, and `metadata`

Per-token rows use the name of their kind: `routed_experts`, `indexer_topk`. A sampling mask is `sampling_mask`, with
`offsets` and `ids` (`0.sampling_mask.offsets`, `0.sampling_mask.ids`), and `sampling_logprobs`. Per-token values are
under `per_token` by name (`0.per_token.reward`; the sample's JSON lists the names). `trajectory.teacher` names the
fields of a teacher's scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from miles_router.dialects import trainer_fields
from miles_router.trajectory.finite import find_non_finite, non_finite_literal
from miles_router.trajectory.json_parts import list_parts, object_parts
from miles_router.trajectory.pieces import InvalidTrajectory, Logprobs, Malformed, Mask, Tokens, VersionRun, frozen
from miles_router.trajectory.rows import KINDS, RowKind
from miles_router.trajectory.safetensors import pack, unpack
from miles_router.trajectory.sampling_mask import SamplingMask, mask_of_tensors, mask_parts, mask_tensors
from miles_router.trajectory.teacher import TEACHER, TeacherScores, arrays_of, facts_of, read_scores
from miles_router.trajectory.trajectory import checked_arrays

#: `completed`: the engine stopped by itself; `truncated`: a limit was reached; `aborted`: the generation was aborted.
Status = Literal["completed", "truncated", "aborted"]
STATUSES: tuple[Status, ...] = get_args(Status)
BY_FINISH_REASON: Mapping[str | None, Status] = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "truncated",
    "abort": "aborted",
}

#: The format: JSON, or all samples in one safetensors file, which is several times smaller and faster to read.
Format = Literal["safetensors", "json"]
#: Integers [rows, layers, top_k].
ShapedRows = npt.NDArray[np.integer[Any]]
Reward = float | Mapping[str, Any] | None
#: One number for each token.
TokenValues = npt.NDArray[np.float64]

ARRAYS = ("tokens", "loss_mask", "logprobs")
#: Fields that a client set on the sample.
CARRIED = ("reward", "label")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """The exact tokens of one rollout with everything aligned to them.

    Arrays are read-only; `.copy()` returns a writable one. `dataclasses.replace` returns a changed sample, for example
    with another reward, and validates it again.

    Attributes:
        tokens: int32 [n], what the engine was given and what it sampled.
        loss_mask: uint8 [n], 1 = sampled by the engine and trained in this sample.
        logprobs: float32 [n], 0.0 where not sampled.
        weight_versions: `(version, start, end)` runs over sampled positions, in order.
        response: the text behind the prompt.
        response_length: the number of last tokens that are the response; no token in front of them is in the loss.
        status: `completed`, `truncated` or `aborted`.
        reward, label: as the client set them.
        metadata: of a session's sample `session_id`, `turns` with their positions, `reason`; and what the client set.
        routed_experts, indexer_topk: integers [n - 1, layers, top_k], if the router records them.
        sampling_mask: for each of the n tokens, the ids that could have been sampled, and the logprob of the sampled
            one among them, if the engine was asked; `metadata.sampling_mask_missing` counts tokens without.
        per_token: float64 [n] by name: rewards and the like that were set for turns and spans, 0.0 where none was.
        teacher: another model's logprobs of the sampled tokens, if they were requested.

    Raises:
        InvalidTrajectory: naming the first broken invariant: those of `checked_arrays`, `complete`, `finite`,
            `status_is_known`, `response_fits`, `loss_is_in_the_response`, `routed_experts_fit`, `indexer_topk_fit`,
            `sampling_mask_fits`, `per_token_fits`, `teacher_fits`.
    """

    tokens: Tokens
    loss_mask: Mask
    logprobs: Logprobs
    weight_versions: tuple[VersionRun, ...] = ()
    response: str = ""
    response_length: int
    status: Status
    reward: Reward = None
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: ShapedRows | None = None
    indexer_topk: ShapedRows | None = None
    sampling_mask: SamplingMask | None = None
    per_token: Mapping[str, TokenValues] = field(default_factory=dict)
    teacher: TeacherScores | None = None

    def __post_init__(self) -> None:
        arrays = checked_arrays(self.tokens, self.logprobs, self.loss_mask, self.weight_versions)
        for name, value in arrays._asdict().items():
            object.__setattr__(self, name, value)
        if not isinstance(self.metadata, Mapping):
            raise InvalidTrajectory("complete", f"metadata must be an object, not {type(self.metadata).__name__}")
        carried = {name: getattr(self, name) for name in (*CARRIED, "metadata")}
        if (found := find_non_finite(carried)) is not None:
            raise InvalidTrajectory("finite", f"{found}; JSON has no such number")
        if self.status not in STATUSES:
            raise InvalidTrajectory(
                "status_is_known", f"the status {self.status!r} is not one of {', '.join(STATUSES)}"
            )
        self._check_response()
        for name, rows in self.rows.items():
            object.__setattr__(self, name, _checked_rows(name, np.asarray(rows), len(self)))
        if self.sampling_mask is not None:
            self.sampling_mask.check(self.tokens)
        if not isinstance(self.per_token, Mapping):
            raise InvalidTrajectory("complete", f"per_token must be an object, not {type(self.per_token).__name__}")
        values = {name: _checked_values(name, array, len(self)) for name, array in self.per_token.items()}
        object.__setattr__(self, "per_token", values)
        if self.teacher is not None:
            self.teacher.check(len(self))

    def _check_response(self) -> None:
        length = self.response_length
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(self):
            raise InvalidTrajectory("response_fits", f"{len(self)} tokens cannot have a response of {length!r}")
        if self.loss_mask[: self.prompt_length].any():
            raise InvalidTrajectory(
                "loss_is_in_the_response", f"the loss mask has tokens in front of the response (the last {length})"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        trained = int(self.loss_mask.sum())
        return f"<Sample of {len(self)} tokens, {trained} in the loss, {self.status}, reward {self.reward!r}>"

    @property
    def rows(self) -> dict[str, ShapedRows]:
        """The sample's rows, by the name of their kind."""
        every = {kind.name: getattr(self, kind.name) for kind in KINDS}
        return {name: rows for name, rows in every.items() if rows is not None}

    @property
    def prompt_length(self) -> int:
        return len(self) - self.response_length

    @property
    def sampling_logprobs(self) -> Logprobs | None:
        """Float32 [n]: the logprobs of the sampling mask."""
        return None if self.sampling_mask is None else self.sampling_mask.logprobs

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """Return the sample in an object of the router's JSON, or of `to_dict`.

        Raises:
            InvalidTrajectory: `complete`: a field is missing or has the wrong type; else as the class.
        """
        rows = {kind.name: _decoded_rows(kind, data[kind.name]) for kind in KINDS if data.get(kind.name) is not None}
        mask = None
        if (given := data.get("sampling_mask")) is not None:
            mask = SamplingMask.from_arrays(given, data.get("sampling_logprobs"))
        beside = {"sampling_mask": mask, "per_token": data.get("per_token") or {}, TEACHER: read_scores(data, data)}
        return _from_parts({**{name: data.get(name, ()) for name in ARRAYS}, **rows, **beside}, data)

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON-compatible values in the router's format, which `from_json` reads."""
        made = {**{name: array.tolist() for name, array in _flat_arrays(self).items()}, **_facts(self, CARRIED)}
        made |= {name: orjson.loads(b"".join(row_parts(rows))) for name, rows in self.rows.items()}
        if self.sampling_mask is not None:
            made["sampling_mask"] = {name: array.tolist() for name, array in self.sampling_mask.arrays().items()}
            made["sampling_logprobs"] = self.sampling_mask.logprobs.tolist()
        if self.per_token:
            made["per_token"] = {name: values.tolist() for name, values in self.per_token.items()}
        return made

    def trainer_fields(self, *, arrays: bool = False) -> dict[str, Any]:
        """Return the fields that update the sample of a training framework, in the framework's names and alignment.

        `Sample.from_dict({**given.to_dict(), **sample.trainer_fields()})`; see `miles_router.dialects`. With `arrays`,
        arrays are not converted to lists.
        """
        return trainer_fields(self, arrays=arrays)


def write_json(samples: Iterable[Sample], metadata: Mapping[str, Any], carried: Collection[str] = CARRIED) -> bytes:
    """Return samples as JSON. `metadata` applies to all of them; `carried` names which of reward and label to write."""
    written = (json_parts(sample, carried) for sample in samples)
    return b"".join((b'{"samples":', *list_parts(written), b',"metadata":', orjson.dumps(metadata), b"}"))


def json_parts(sample: Sample, carried: Collection[str] = CARRIED) -> Iterator[bytes]:
    """Yield one sample as JSON, in parts."""
    yield from object_parts(_flat_arrays(sample), _facts(sample, carried))
    for name, rows in sample.rows.items():
        yield b',"%b":' % name.encode("ascii")
        yield from row_parts(rows)
    yield from mask_parts(sample.sampling_mask)
    if sample.per_token:
        yield b',"per_token":'
        yield from object_parts(sample.per_token, {})
        yield b"}"
    yield b"}"


def write_safetensors(
    samples: Sequence[Sample], metadata: Mapping[str, Any], carried: Collection[str] = CARRIED
) -> bytes:
    """Return samples as one safetensors file. Arguments as for `write_json`.

    Raises:
        ValueError: rows have a type that `safetensors.pack` does not write.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for place, sample in enumerate(samples):
        values = {f"per_token.{name}": array for name, array in sample.per_token.items()}
        every = {**_flat_arrays(sample), **sample.rows, **values}
        arrays.update({f"{place}.{name}": array for name, array in every.items()})
        arrays.update(mask_tensors(sample.sampling_mask, f"{place}."))
    facts = orjson.dumps([{**_facts(sample, carried), **_value_names(sample)} for sample in samples])
    return pack(arrays, {"samples": facts.decode(), "metadata": orjson.dumps(metadata).decode()})


def read_json(data: bytes) -> list[Sample]:
    """Parse the output of `write_json`.

    Raises:
        Malformed: the bytes have another format.
        InvalidTrajectory: a sample breaks an invariant.
    """
    try:
        given = orjson.loads(data)["samples"]
    except orjson.JSONDecodeError as error:
        raise Malformed(f"no samples in JSON: {_json_error(data, error)}") from None
    except (KeyError, TypeError) as error:
        raise Malformed(f"no samples in JSON: {error!r}") from None
    return [Sample.from_json(each) for each in _objects(given)]


def read_safetensors(data: bytes) -> list[Sample]:
    """Parse the output of `write_safetensors`. Rows are views of `data`. Raises as `read_json`."""
    return list(samples_of(*unpack(data)))


def samples_of(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> Iterator[Sample]:
    """Return an iterator over the samples in the arrays and metadata of a safetensors file. Missing arrays are detected
    before the first sample is yielded. Raises as `read_json`."""
    try:
        given = _objects(orjson.loads(metadata["samples"]))
        parts = [_arrays_of(arrays, place, facts) for place, facts in enumerate(given)]
    except orjson.JSONDecodeError as error:
        raise Malformed(f"no samples in safetensors: {_json_error(metadata['samples'].encode(), error)}") from None
    except (KeyError, TypeError) as error:
        raise Malformed(f"no samples in safetensors: {error!r}") from None
    return (_from_parts(part, facts) for part, facts in zip(parts, given, strict=True))


WRITERS: Mapping[Format, Callable[..., bytes]] = {"json": write_json, "safetensors": write_safetensors}
READERS: Mapping[Format, Callable[[bytes], list[Sample]]] = {"json": read_json, "safetensors": read_safetensors}


def _json_error(data: bytes, error: orjson.JSONDecodeError) -> str:
    return non_finite_literal(data, error.pos, error.msg) or repr(error)


def _flat_arrays(sample: Sample) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that are not rows, for both formats."""
    return {**{name: getattr(sample, name) for name in ARRAYS}, **arrays_of(sample.teacher)}


def _facts(sample: Sample, carried: Collection[str]) -> dict[str, Any]:
    """Return everything but the arrays, for both formats."""
    return {
        "weight_versions": [run._asdict() for run in sample.weight_versions],
        "response": sample.response,
        "response_length": sample.response_length,
        "status": sample.status,
        **{name: getattr(sample, name) for name in CARRIED if name in carried},
        "metadata": dict(sample.metadata),
        **facts_of(sample.teacher),
    }


def _value_names(sample: Sample) -> dict[str, list[str]]:
    return {"per_token": [*sample.per_token]} if sample.per_token else {}


def _arrays_of(arrays: Mapping[str, npt.NDArray[Any]], place: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of one sample in a file, its sampling mask and a teacher's scores. Raises KeyError if an array
    is missing."""
    values = {name: arrays[f"{place}.per_token.{name}"] for name in facts.get("per_token", ())}
    rows = {kind.name: arrays[name] for kind in KINDS if (name := f"{place}.{kind.name}") in arrays}
    beside = {"sampling_mask": mask_of_tensors(arrays, f"{place}."), "per_token": values}
    scores = read_scores(arrays, facts, f"{place}.")
    return {**{name: arrays[f"{place}.{name}"] for name in ARRAYS}, **rows, **beside, TEACHER: scores}


def _from_parts(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Sample:
    """Return a sample from its arrays (or lists of numbers), rows, a teacher's scores, and other fields. Raises as
    `Sample.from_json`."""
    try:
        return Sample(
            **arrays,
            weight_versions=tuple(
                VersionRun(run["version"], run["start"], run["end"]) for run in facts["weight_versions"]
            ),
            response=facts["response"],
            response_length=facts["response_length"],
            status=facts["status"],
            reward=facts.get("reward"),
            label=facts.get("label"),
            metadata=facts.get("metadata") or {},
        )
    except (KeyError, TypeError) as error:
        raise InvalidTrajectory("complete", f"a field is missing or has the wrong type: {error!r}") from None


def _objects(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise Malformed("samples must be a list of objects")
    return given


def _checked_rows(name: str, rows: npt.NDArray[Any], tokens: int) -> ShapedRows:
    needed = max(tokens - 1, 0)
    if rows.ndim != 3 or rows.shape[0] != needed or not np.issubdtype(rows.dtype, np.integer):
        message = f"expected integers [{needed}, layers, top_k], got {rows.dtype} {list(rows.shape)}"
        raise InvalidTrajectory(f"{name}_fit", message)
    return frozen(rows)


def _checked_values(name: str, values: Any, tokens: int) -> TokenValues:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidTrajectory("per_token_fits", f"{name} is not an array of numbers: {error}") from None
    if array.shape != (tokens,):
        raise InvalidTrajectory("per_token_fits", f"{name} has the shape {list(array.shape)}, not [{tokens}]")
    if not np.isfinite(array).all():
        raise InvalidTrajectory("finite", f"per_token.{name} has a number that is not finite; JSON has no such number")
    return frozen(array)


def row_parts(rows: ShapedRows, **beside: Any) -> Iterator[bytes]:
    """Yield `{"dtype", "shape", "data": base64}` in parts, little-endian and row-major, with the fields of `beside`."""
    whole = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
    yield orjson.dumps({"dtype": rows.dtype.name, "shape": list(rows.shape), **beside})[:-1]
    yield b',"data":"'
    yield pybase64.b64encode(whole.reshape(-1).view(np.uint8).data)  # releases the GIL
    yield b'"}'


def _decoded_rows(kind: RowKind, data: Any) -> ShapedRows:
    """Parse the output of `row_parts`.

    Raises:
        InvalidTrajectory: it has another format, or the bytes do not fill the shape.
    """
    try:
        raw = pybase64.b64decode(data["data"], validate=True)
        dtype = np.dtype(data["dtype"]).newbyteorder("<")
        rows: ShapedRows = np.frombuffer(raw, dtype=dtype).reshape(data["shape"])
        return rows
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidTrajectory(f"{kind.name}_fit", repr(error)) from None
