"""What `/generate` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_router.client.errors import InvalidReply
from miles_router.trajectory.sample import BY_FINISH_REASON, Status


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
            InvalidReply: a field is missing.
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
