"""`Sample`: what a trainer consumes, checked when it is made, and its two forms on the wire.

JSON          {"samples": [{"tokens", "loss_mask", "logprobs", everything else, rows by kind}, ...], "metadata"}
safetensors   tensors 0.tokens, 0.loss_mask, 0.logprobs, 0.routed_experts, 1.tokens, ...; in the file's metadata, as
              JSON, `samples` with everything else of each, and `metadata`

Rows aligned with tokens are there by their kind's name: `routed_experts`, `indexer_topk`.
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
from miles_router.trajectory.trajectory import checked_arrays

#: `completed`: the engine stopped by itself; `truncated`: something ran out; `aborted`: somebody cut it.
Status = Literal["completed", "truncated", "aborted"]
STATUSES: tuple[Status, ...] = get_args(Status)
BY_FINISH_REASON: Mapping[str | None, Status] = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "truncated",
    "abort": "aborted",
}

#: JSON, or all samples in one safetensors file, which is several times smaller and faster to read.
Format = Literal["safetensors", "json"]
#: Integers [rows, layers, top_k].
ShapedRows = npt.NDArray[np.integer[Any]]
Reward = float | Mapping[str, Any] | None

ARRAYS = ("tokens", "loss_mask", "logprobs")
#: Fields that a sample has because somebody gave them.
CARRIED = ("reward", "label")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """The exact tokens of one rollout with everything aligned to them.

    Arrays are read-only; `.copy()` gives one to write. `dataclasses.replace` gives a sample with another reward, say,
    and checks it again.

    Attributes:
        tokens: int32 [n], what the engine was given and what it sampled.
        loss_mask: uint8 [n], 1 = sampled by the engine and trained in this sample.
        logprobs: float32 [n], 0.0 where not sampled.
        weight_versions: `(version, start, end)` runs over sampled positions, in order.
        response: the text behind the prompt.
        response_length: how many of the last tokens are the response; nothing in front of them is in the loss.
        status: `completed`, `truncated` or `aborted`.
        reward, label: as they were given.
        metadata: of a session's sample `session_id`, `turns` with their positions, `reason`; and what was given.
        routed_experts, indexer_topk: integers [n - 1, layers, top_k], where the router records them.

    Raises:
        InvalidTrajectory: naming the first broken invariant: those of `checked_arrays`, `complete`,
            `finite`, `status_is_known`, `response_fits`, `loss_is_in_the_response`, `routed_experts_fit`,
            `indexer_topk_fit`.
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

    def __post_init__(self) -> None:
        arrays = checked_arrays(self.tokens, self.logprobs, self.loss_mask, self.weight_versions)
        for name, value in arrays._asdict().items():
            object.__setattr__(self, name, value)
        if not isinstance(self.metadata, Mapping):
            raise InvalidTrajectory("complete", f"metadata is an object, not {type(self.metadata).__name__}")
        carried = {name: getattr(self, name) for name in (*CARRIED, "metadata")}
        if (found := find_non_finite(carried)) is not None:
            raise InvalidTrajectory("finite", f"{found}; JSON has no such number")
        if self.status not in STATUSES:
            raise InvalidTrajectory("status_is_known", f"{self.status!r} is none of {', '.join(STATUSES)}")
        self._check_response()
        for name, rows in self.rows.items():
            object.__setattr__(self, name, _fitting_rows(name, np.asarray(rows), len(self)))

    def _check_response(self) -> None:
        length = self.response_length
        if not isinstance(length, int) or not 0 <= length <= len(self):
            raise InvalidTrajectory("response_fits", f"{len(self)} tokens cannot have a response of {length!r}")
        if self.loss_mask[: self.prompt_length].any():
            raise InvalidTrajectory("loss_is_in_the_response", f"the loss has tokens in front of the last {length}")

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        trained = int(self.loss_mask.sum())
        return f"<Sample of {len(self)} tokens, {trained} in the loss, {self.status}, reward {self.reward!r}>"

    @property
    def rows(self) -> dict[str, ShapedRows]:
        """The rows that it has, by the name of their kind."""
        every = {kind.name: getattr(self, kind.name) for kind in KINDS}
        return {name: rows for name, rows in every.items() if rows is not None}

    @property
    def prompt_length(self) -> int:
        """How many tokens stand in front of the response."""
        return len(self) - self.response_length

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """A sample as the router's JSON has it, and as `to_dict` gives it.

        Raises:
            InvalidTrajectory: `complete`: a field is missing or of the wrong kind; else as the class says.
        """
        rows = {kind.name: _decoded_rows(kind, data[kind.name]) for kind in KINDS if data.get(kind.name) is not None}
        return _from_parts({**{name: data.get(name, ()) for name in ARRAYS}, **rows}, data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON takes, in the router's own form: `from_json` reads it back."""
        made = {**{name: getattr(self, name).tolist() for name in ARRAYS}, **_facts(self, CARRIED)}
        return {**made, **{name: orjson.loads(b"".join(row_parts(rows))) for name, rows in self.rows.items()}}

    def trainer_fields(self, *, arrays: bool = False) -> dict[str, Any]:
        """What the sample of a training framework is updated with, in the framework's names and alignment:
        `Sample.from_dict({**given.to_dict(), **sample.trainer_fields()})`. See `miles_router.dialects`.
        With `arrays`, arrays stay what they are."""
        return trainer_fields(self, arrays=arrays)


def write_json(samples: Iterable[Sample], metadata: Mapping[str, Any], carried: Collection[str] = CARRIED) -> bytes:
    """Samples as JSON. `metadata` is about all of them; `carried` names which of reward and label they have."""
    written = (json_parts(sample, carried) for sample in samples)
    return b"".join((b'{"samples":', *list_parts(written), b',"metadata":', orjson.dumps(metadata), b"}"))


def json_parts(sample: Sample, carried: Collection[str] = CARRIED) -> Iterator[bytes]:
    """One sample as JSON, in parts."""
    yield from object_parts({name: getattr(sample, name) for name in ARRAYS}, _facts(sample, carried))
    for name, rows in sample.rows.items():
        yield b',"%b":' % name.encode("ascii")
        yield from row_parts(rows)
    yield b"}"


def write_safetensors(
    samples: Sequence[Sample], metadata: Mapping[str, Any], carried: Collection[str] = CARRIED
) -> bytes:
    """Samples as one safetensors file. Arguments as of `write_json`.

    Raises:
        ValueError: rows are of a type that `safetensors.pack` does not write.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for place, sample in enumerate(samples):
        every = {**{name: getattr(sample, name) for name in ARRAYS}, **sample.rows}
        arrays.update({f"{place}.{name}": array for name, array in every.items()})
    facts = orjson.dumps([_facts(sample, carried) for sample in samples])
    return pack(arrays, {"samples": facts.decode(), "metadata": orjson.dumps(metadata).decode()})


def read_json(data: bytes) -> list[Sample]:
    """The samples that `write_json` has written.

    Raises:
        Malformed: it has another form.
        InvalidTrajectory: one of them breaks an invariant.
    """
    try:
        given = orjson.loads(data)["samples"]
    except orjson.JSONDecodeError as error:
        raise Malformed(f"no samples in JSON: {_why(data, error)}") from None
    except (KeyError, TypeError) as error:
        raise Malformed(f"no samples in JSON: {error!r}") from None
    return [Sample.from_json(each) for each in _objects(given)]


def read_safetensors(data: bytes) -> list[Sample]:
    """The samples that `write_safetensors` has written. Their rows are views of `data`. Raises as `read_json`."""
    return list(samples_of(*unpack(data)))


def samples_of(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> Iterator[Sample]:
    """The samples in the arrays and the metadata of a safetensors file, one at a time; that all are there is known
    before the first is made. Raises as `read_json`."""
    try:
        given = _objects(orjson.loads(metadata["samples"]))
        parts = [_arrays_of(arrays, place) for place in range(len(given))]
    except orjson.JSONDecodeError as error:
        raise Malformed(f"no samples in safetensors: {_why(metadata['samples'].encode(), error)}") from None
    except KeyError as error:
        raise Malformed(f"no samples in safetensors: {error!r}") from None
    return (_from_parts(part, facts) for part, facts in zip(parts, given, strict=True))


WRITERS: Mapping[Format, Callable[..., bytes]] = {"json": write_json, "safetensors": write_safetensors}
READERS: Mapping[Format, Callable[[bytes], list[Sample]]] = {"json": read_json, "safetensors": read_safetensors}


def _why(data: bytes, error: orjson.JSONDecodeError) -> str:
    return non_finite_literal(data, error.pos, error.msg) or repr(error)


def _facts(sample: Sample, carried: Collection[str]) -> dict[str, Any]:
    """Everything but the arrays, as both forms have it."""
    return {
        "weight_versions": [run._asdict() for run in sample.weight_versions],
        "response": sample.response,
        "response_length": sample.response_length,
        "status": sample.status,
        **{name: getattr(sample, name) for name in CARRIED if name in carried},
        "metadata": dict(sample.metadata),
    }


def _arrays_of(arrays: Mapping[str, npt.NDArray[Any]], place: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one sample in a file; KeyError where one is missing that every sample has."""
    rows = {kind.name: arrays[name] for kind in KINDS if (name := f"{place}.{kind.name}") in arrays}
    return {**{name: arrays[f"{place}.{name}"] for name in ARRAYS}, **rows}


def _from_parts(arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Sample:
    """A sample from its arrays and rows, or lists of numbers for the arrays, and everything else. Raises as
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
        raise InvalidTrajectory("complete", f"a field is missing or of the wrong kind: {error!r}") from None


def _objects(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise Malformed("samples are a list of objects")
    return given


def _fitting_rows(name: str, rows: npt.NDArray[Any], tokens: int) -> ShapedRows:
    needed = max(tokens - 1, 0)
    if rows.ndim != 3 or rows.shape[0] != needed or not np.issubdtype(rows.dtype, np.integer):
        message = f"{needed} rows of integers by layer and rank are needed, not {rows.dtype} {list(rows.shape)}"
        raise InvalidTrajectory(f"{name}_fit", message)
    return frozen(rows)


def row_parts(rows: ShapedRows, **beside: Any) -> Iterator[bytes]:
    """`{"dtype", "shape", "data": base64}`, little-endian and row-major, in parts; with fields `beside` them."""
    whole = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
    yield orjson.dumps({"dtype": rows.dtype.name, "shape": list(rows.shape), **beside})[:-1]
    yield b',"data":"'
    yield pybase64.b64encode(whole.reshape(-1).view(np.uint8).data)  # which lets other threads run
    yield b'"}'


def _decoded_rows(kind: RowKind, data: Any) -> ShapedRows:
    """What `row_parts` gave.

    Raises:
        InvalidTrajectory: it is something else, or the bytes do not fill the shape.
    """
    try:
        raw = pybase64.b64decode(data["data"], validate=True)
        dtype = np.dtype(data["dtype"]).newbyteorder("<")
        rows: ShapedRows = np.frombuffer(raw, dtype=dtype).reshape(data["shape"])
        return rows
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidTrajectory(f"{kind.name}_fit", repr(error)) from None
