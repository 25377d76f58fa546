"""The reply of `/generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_router.client.errors import InvalidReply
from miles_router.trajectory.sample import BY_FINISH_REASON, Status


@dataclass(frozen=True)
class Generation:
    """One reply of `/generate`.

    Attributes:
        text: the generated text as the engine returns it, without trimmed stop tokens and the like.
        output_ids: every sampled token id, trimmed ones included.
        meta_info: SGLang's, unchanged: `id`, `finish_reason`, `prompt_tokens`, `weight_versions`, ...
    """

    text: str
    output_ids: list[int]
    meta_info: Mapping[str, Any]

    @classmethod
    def from_json(cls, answer: Any) -> Generation:
        """Read one reply, or one event of a stream.

        Raises:
            InvalidReply: a field is missing.
        """
        try:
            meta = answer["meta_info"]
            made = cls(answer["text"], answer["output_ids"], meta)
            _ = meta["id"], meta["prompt_tokens"], meta["finish_reason"]
        except (KeyError, TypeError) as error:
            raise InvalidReply(f"the reply of /generate lacks a field or has another form: {error!r}") from None
        return made

    @property
    def rid(self) -> str:
        """The engine's id of the generation, which selects its tokens in `RouterClient.retrieve`."""
        return str(self.meta_info["id"])

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt, as the engine counts them."""
        return int(self.meta_info["prompt_tokens"])

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `abort`; None while a stream goes on."""
        reason = self.meta_info["finish_reason"]
        return str(reason["type"]) if isinstance(reason, Mapping) else reason

    @property
    def status(self) -> Status:
        """The status of a sample made from this generation.

        Raises:
            InvalidReply: the generation has not ended, or its finish reason is unknown.
        """
        status = BY_FINISH_REASON.get(self.finish_reason)
        if status is None:
            raise InvalidReply(f"generation {self.rid} has the finish reason {self.finish_reason!r}")
        return status

    @property
    def logprobs(self) -> list[float] | None:
        """One logprob for each of `output_ids`; None unless the request had `return_logprob=True`."""
        entries = self.meta_info.get("output_token_logprobs")
        return None if entries is None else [entry[0] for entry in entries]
