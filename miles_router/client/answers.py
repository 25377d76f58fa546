"""What `/generate` and `/retrieve_from_text` answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from miles_router.client.errors import InvalidReply, InvalidSample
from miles_router.trajectory import InvalidTrajectory, Trajectory, VersionRun, from_arrays
from miles_router.trajectory.pieces import Logprobs, Mask, Tokens
from miles_router.trajectory.wire import VERSIONS, unpack

#: `completed`: the engine stopped by itself; `truncated`: something ran out; `aborted`: somebody cut it.
Status = Literal["completed", "truncated", "aborted"]
BY_FINISH_REASON: Mapping[str | None, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
NO_SAFETENSORS = "safetensors"  # the invariant that `unpack` names


@dataclass(frozen=True)
class Generation:
    """One answer of `/generate`.

    Attributes:
        text: what the engine shows of it; trimmed stop tokens and the like are not in it.
        output_ids: every id that was sampled.
        meta_info: SGLang's, as it came: `id`, `finish_reason`, `prompt_tokens`, `weight_versions`, ...
    """

    text: str
    output_ids: list[int]
    meta_info: Mapping[str, Any]

    @classmethod
    def from_json(cls, answer: Any) -> Generation:
        """Read one answer, or one event of a stream.

        Raises:
            InvalidReply: it is none.
        """
        try:
            meta = answer["meta_info"]
            made = cls(answer["text"], answer["output_ids"], meta)
            _ = meta["id"], meta["prompt_tokens"], meta["finish_reason"]
        except (KeyError, TypeError) as error:
            raise InvalidReply(f"no answer of /generate: {error!r}") from None
        return made

    @property
    def rid(self) -> str:
        """Its id at the engine, which selects its tokens in `RouterClient.retrieve`."""
        return str(self.meta_info["id"])

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the engine was given."""
        return int(self.meta_info["prompt_tokens"])

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `abort`; None while a stream goes on."""
        reason = self.meta_info["finish_reason"]
        return str(reason["type"]) if isinstance(reason, Mapping) else reason

    @property
    def status(self) -> Status:
        """What a sample of it is.

        Raises:
            InvalidReply: it has not ended, or in a way that nobody knows.
        """
        status = BY_FINISH_REASON.get(self.finish_reason)
        if status is None:
            raise InvalidReply(f"generation {self.rid} has the finish reason {self.finish_reason!r}")
        return status

    @property
    def logprobs(self) -> list[float] | None:
        """One for each of `output_ids`; None unless asked for with `return_logprob=True`."""
        entries = self.meta_info.get("output_token_logprobs")
        return None if entries is None else [entry[0] for entry in entries]


@dataclass(frozen=True, eq=False)
class Retrieved:
    """The exact tokens of a text.

    Attributes:
        trajectory: `tokens` int32 [n], `loss_mask` uint8 [n], `logprobs` float32 [n], `weight_versions` runs.
        text: the text.
        matched_tokens: how many of the tokens were recorded; n for a rollout, 0 for a text never seen.
        ambiguous: trajectories with other ids have this text too; `candidates` has the id of each.
        rid, finish_reason, finished: of the generation; None where the text is no rollout's.
    """

    trajectory: Trajectory
    text: str
    matched_tokens: int
    ambiguous: bool
    candidates: tuple[str, ...]
    rid: str | None
    finish_reason: str | None
    finished: bool | None

    @classmethod
    def from_bytes(cls, data: bytes) -> Retrieved:
        """Read the safetensors answer of `/retrieve_from_text`.

        Raises:
            InvalidReply: it is none.
            InvalidSample: arrays that no rollout can have.
        """
        try:
            arrays, metadata = unpack(data)
            facts = orjson.loads(metadata["facts"])
            runs = [(run["version"], run["start"], run["end"]) for run in facts[VERSIONS]]
            return cls(
                trajectory=from_arrays(arrays["tokens"], arrays["logprobs"], arrays["loss_mask"], runs),
                text=facts["response"],
                matched_tokens=facts["matched_tokens"],
                ambiguous=facts["ambiguous"],
                candidates=tuple(facts["candidates"]),
                rid=facts["rid"],
                finish_reason=facts["finish_reason"],
                finished=facts["finished"],
            )
        except InvalidTrajectory as error:
            if error.invariant == NO_SAFETENSORS:
                raise InvalidReply(f"no answer of /retrieve_from_text: {error}") from None
            raise InvalidSample(str(error), invariant=error.invariant) from None
        except (KeyError, TypeError, orjson.JSONDecodeError) as error:
            raise InvalidReply(f"no answer of /retrieve_from_text: {error!r}") from None

    def __len__(self) -> int:
        return len(self.trajectory)

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
    def weight_versions(self) -> list[VersionRun]:
        """`(version, start, end)` over the sampled positions."""
        return self.trajectory.weight_versions
