"""`Sample`: what a trainer consumes, checked when it is made, wherever it comes from."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from miles_router.client.answers import Status
from miles_router.client.errors import InvalidSample
from miles_router.trajectory import InvalidTrajectory, VersionRun, from_arrays
from miles_router.trajectory.pieces import Logprobs, Mask, Tokens, frozen

STATUSES: tuple[Status, ...] = get_args(Status)
Experts = npt.NDArray[np.integer[Any]]
Reward = float | Mapping[str, Any] | None


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
        routed_experts: integers [n - 1, layers, top_k], where the router records them.

    Raises:
        InvalidSample: naming the first broken invariant: `tokens_are_ids`, `aligned`, `mask_is_binary`,
            `logprobs_are_logprobs`, `versions_in_order`, `versions_cover_the_loss`, `status_is_known`,
            `response_fits`, `loss_is_in_the_response`, `routed_experts_fit`.
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
    routed_experts: Experts | None = None

    def __post_init__(self) -> None:
        try:
            checked = from_arrays(self.tokens, self.logprobs, self.loss_mask, self.weight_versions)
        except InvalidTrajectory as error:
            raise InvalidSample(str(error), invariant=error.invariant) from None
        self._set("tokens", frozen(checked.tokens))
        self._set("loss_mask", frozen(checked.loss_mask))
        self._set("logprobs", frozen(checked.logprobs))
        self._set("weight_versions", tuple(checked.weight_versions))
        if self.status not in STATUSES:
            raise InvalidSample(f"status_is_known: {self.status!r} is none of {', '.join(STATUSES)}")
        self._check_response()
        if self.routed_experts is not None:
            self._check_experts(np.asarray(self.routed_experts))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_response(self) -> None:
        length = self.response_length
        if not isinstance(length, int) or not 0 <= length <= len(self):
            raise InvalidSample(f"response_fits: {len(self)} tokens cannot have a response of {length!r}")
        if self.loss_mask[: self.prompt_length].any():
            raise InvalidSample(f"loss_is_in_the_response: the loss has tokens in front of the last {length}")

    def _check_experts(self, experts: npt.NDArray[Any]) -> None:
        rows = max(len(self) - 1, 0)
        if experts.ndim != 3 or experts.shape[0] != rows or not np.issubdtype(experts.dtype, np.integer):
            raise InvalidSample(
                f"routed_experts_fit: {rows} rows of integers by layer and rank are needed, not {experts.dtype} "
                f"{list(experts.shape)}"
            )
        self._set("routed_experts", frozen(experts))

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        trained = int(self.loss_mask.sum())
        return f"<Sample of {len(self)} tokens, {trained} in the loss, {self.status}, reward {self.reward!r}>"

    @property
    def prompt_length(self) -> int:
        """How many tokens stand in front of the response."""
        return len(self) - self.response_length

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """A sample as the router's JSON has it, and as `to_dict` gives it.

        Raises:
            InvalidSample: `complete`: a field is missing or of the wrong kind; else as the class says.
        """
        experts = data.get("routed_experts")
        return cls.from_parts(
            {name: data.get(name, ()) for name in ("tokens", "loss_mask", "logprobs")},
            data,
            None if experts is None else _decoded_experts(experts),
        )

    @classmethod
    def from_parts(
        cls, arrays: Mapping[str, Sequence[Any] | npt.NDArray[Any]], facts: Mapping[str, Any], experts: Experts | None
    ) -> Sample:
        """A sample from its arrays and everything else. Raises as `from_json`."""
        try:
            return cls(
                tokens=arrays["tokens"],  # type: ignore[arg-type]  # lists too: all become arrays
                loss_mask=arrays["loss_mask"],  # type: ignore[arg-type]
                logprobs=arrays["logprobs"],  # type: ignore[arg-type]
                weight_versions=tuple(
                    VersionRun(run["version"], run["start"], run["end"]) for run in facts["weight_versions"]
                ),
                response=facts["response"],
                response_length=facts["response_length"],
                status=facts["status"],
                reward=facts.get("reward"),
                label=facts.get("label"),
                metadata=facts.get("metadata") or {},
                routed_experts=experts,
            )
        except (KeyError, TypeError) as error:
            raise InvalidSample(f"complete: a field is missing or of the wrong kind: {error!r}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON takes, in the router's own form: `from_json` reads it back."""
        made: dict[str, Any] = {
            "tokens": self.tokens.tolist(),
            "loss_mask": self.loss_mask.tolist(),
            "logprobs": self.logprobs.tolist(),
            "weight_versions": [run._asdict() for run in self.weight_versions],
            "response": self.response,
            "response_length": self.response_length,
            "status": self.status,
            "reward": self.reward,
            "label": self.label,
            "metadata": dict(self.metadata),
        }
        if self.routed_experts is not None:
            experts = np.ascontiguousarray(self.routed_experts)
            data = base64.b64encode(experts.tobytes()).decode("ascii")
            made["routed_experts"] = {"dtype": experts.dtype.name, "shape": list(experts.shape), "data": data}
        return made

    def trainer_fields(self) -> dict[str, Any]:
        """What a sample of slime or miles is updated with, in their names and their alignment.

        There `loss_mask` and `rollout_log_probs` cover the response alone, versions are a list of names, and `status`
        is the value of an enumeration: `Sample.from_dict({**given.to_dict(), **sample.trainer_fields()})`. Reward and
        label are left out where there are none, so that those of the given sample stay; its metadata stays if the
        rollout was given it.
        """
        start = self.prompt_length
        made: dict[str, Any] = {
            "tokens": self.tokens.tolist(),
            "response": self.response,
            "response_length": self.response_length,
            "loss_mask": self.loss_mask[start:].tolist(),
            "rollout_log_probs": self.logprobs[start:].tolist(),
            "weight_versions": [run.version for run in self.weight_versions],
            "status": self.status,
            "metadata": dict(self.metadata),
        }
        optional = {"reward": self.reward, "label": self.label, "rollout_routed_experts": self.routed_experts}
        return {**made, **{name: value for name, value in optional.items() if value is not None}}


def _decoded_experts(data: Any) -> Experts:
    """`{"dtype", "shape", "data": base64}`.

    Raises:
        InvalidSample: it is none, or the bytes do not fill the shape.
    """
    try:
        raw = base64.b64decode(data["data"], validate=True)
        experts: Experts = np.frombuffer(raw, dtype=np.dtype(data["dtype"])).reshape(data["shape"])
        return experts
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSample(f"routed_experts_fit: {error!r}") from None
