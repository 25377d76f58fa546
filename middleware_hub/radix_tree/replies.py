"""What `/generate` answered: read for the record, and given on without the fields that only the record asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from miles_router.trajectory import Piece

#: What `return_logprob` adds to `meta_info` (SGLang 0.5.23, `tokenizer_manager.convert_logprob_style`).
LOGPROB_FIELDS = frozenset(
    {
        "input_token_logprobs",
        "output_token_logprobs",
        "output_token_logprobs_length",
        "input_top_logprobs",
        "output_top_logprobs",
        "input_token_ids_logprobs",
        "output_token_ids_logprobs",
    }
)


class Unusable(Exception):
    """An answer that cannot be recorded; the message is the reason."""


@dataclass
class Generation:
    """One finished answer, as far as the record needs it."""

    text: str
    ids: list[int]
    logprobs: list[float]
    rid: str
    finish: str
    stop: int | str | None
    spans: list[tuple[str | None, int, int]]

    def pieces(self) -> list[Piece]:
        """The sampled tokens, one piece a weight version.

        Raises:
            InvalidTrajectory: the answer contradicts itself.
        """
        return [Piece.sampled(self.ids[a:b], self.logprobs[a:b], version) for version, a, b in self.spans if a < b]


def generation(answer: Mapping[str, Any]) -> Generation:
    """Read one complete answer.

    Raises:
        Unusable: a field that the record needs is missing, or they contradict each other.
    """
    try:
        meta = answer["meta_info"]
        ids, logprobs = answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]]
        if [entry[1] for entry in meta["output_token_logprobs"]] != ids:
            raise Unusable("logprobs_of_other_tokens")
        reason = meta["finish_reason"]
        return Generation(
            text=answer["text"],
            ids=ids,
            logprobs=logprobs,
            rid=str(meta["id"]),
            finish=reason["type"],
            stop=reason.get("matched"),
            spans=version_spans(meta, len(ids)),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise Unusable("incomplete") from error


def version_spans(meta: Mapping[str, Any], length: int) -> list[tuple[str | None, int, int]]:
    """Weight versions over the output tokens, without gaps: `weight_versions`, or `weight_version` for all of it."""
    whole = meta.get("weight_version")
    spans = [(span["version"], span["start"], min(span["end"], length)) for span in meta.get("weight_versions") or ()]
    covered = all(first[2] == second[1] for first, second in pairwise(spans))
    if not spans or not covered or spans[0][1] != 0 or spans[-1][2] != length:
        return [(None if whole is None else str(whole), 0, length)]
    return [(str(version), start, end) for version, start, end in spans]


def stripped(answer: Any) -> Any:
    """The answer without what only the record asked for; what is none stays as it is."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        return answer
    return {**answer, "meta_info": {name: value for name, value in meta.items() if name not in LOGPROB_FIELDS}}


@dataclass
class Growing:
    """One answer of a stream. SGLang sends everything so far with each event, or with `--incremental-streaming-output`
    only what is new; `completion_tokens` tells which."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add one event; the whole answer once it is the last one.

        Raises:
            Unusable: the event is none of the two kinds.
        """
        try:
            meta, ids, text = event["meta_info"], event["output_ids"], event["text"]
            logprobs, total = meta["output_token_logprobs"], meta["completion_tokens"]
        except (KeyError, TypeError) as error:
            raise Unusable("incomplete") from error
        if len(ids) >= total:  # SGLang may add ids to an event between counting and writing them
            ids, logprobs = ids[:total], logprobs[:total]
            self.text, self.ids, self.logprobs = text, ids, logprobs
        else:
            self.text, self.ids, self.logprobs = self.text + text, self.ids + ids, self.logprobs + logprobs
        if not len(self.ids) == len(self.logprobs) == total:
            raise Unusable("incomplete")
        if meta.get("finish_reason") is None:
            return None
        whole = {**meta, "output_token_logprobs": self.logprobs}
        return {"text": self.text, "output_ids": self.ids, "meta_info": whole}
