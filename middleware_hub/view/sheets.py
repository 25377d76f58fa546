"""`TokenSheet`: a sample in the form that the token view reads.

On a page it is a safetensors file with the tensor `tokens`, and `loss_mask`, `sampled`, `logprobs`, `expert_entropy` if
they are known. Everything else is JSON under `facts` in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from middleware_hub.view.entropy import expert_entropy
from miles_router.trajectory import Malformed, Sample, VersionRun
from miles_router.trajectory.pieces import Mask, Tokens
from miles_router.trajectory.safetensors import pack
from miles_router.trajectory.sample import ShapedRows

Floats = npt.NDArray[np.floating[Any]]
#: Keys: a sample's turns in its metadata, and a turn's changed message that began a new segment.
TURNS, EDIT = "turns", "edit"
#: Text fields of an edit, besides the index of the message.
EDITED = ("field", "held", "sent")
#: Characters of a sample's metadata that the page shows, at most.
SHOWN = 20_000
NO_TURNS = "The turns in its metadata do not fit its tokens: turns and workers are not shown."


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenSheet:
    """One sample of n tokens, token by token. None means that the file does not contain the field.

    Attributes:
        tokens: int32 [n].
        loss_mask: uint8 [n], 1 = in the loss.
        sampled: uint8 [n], 1 = sampled by the engine, in the loss or not.
        logprobs: float [n] with the file's dtype; 0 where not sampled.
        expert_entropy: float32 [n - 1], bits.
        versions: weight versions of runs of sampled positions.
        version_names: the weight versions of the sample, if the file does not assign them to tokens.
        turns: the turns from a session sample's metadata; each sampled the positions `start` to `end`.
        path: the numbers of the turns from the first to the leaf.
        status, reward, label, response_length: fields of the sample.
        metadata: everything else in the sample's metadata.
        notes: problems with the sample, as sentences to show.
    """

    tokens: Tokens
    loss_mask: Mask | None = None
    sampled: Mask | None = None
    logprobs: Floats | None = None
    expert_entropy: npt.NDArray[np.float32] | None = None
    versions: Sequence[VersionRun] = ()
    version_names: Sequence[str] = ()
    turns: Sequence[Mapping[str, Any]] = ()
    path: Sequence[int] = ()
    status: str
    reward: Any = None
    label: Any = None
    response_length: int
    metadata: Mapping[str, Any]
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def session_id(self) -> str | None:
        """The id of the sample's session, from its metadata."""
        found = self.metadata.get("session_id")
        return found if isinstance(found, str) else None

    @property
    def trained(self) -> int | None:
        """The number of tokens in the loss; None without a loss mask."""
        return None if self.loss_mask is None else int(self.loss_mask.sum())

    def facts(self) -> dict[str, Any]:
        """Return everything but the arrays. `about` is a JSON text, not an object: JavaScript would round its large
        integers."""
        names = ("status", "reward", "label", "response_length", "metadata")
        about = as_json({name: getattr(self, name) for name in names}, orjson.OPT_INDENT_2)
        return {
            "response_length": self.response_length,
            "versions": [run._asdict() for run in self.versions],
            "version_names": list(self.version_names),
            "turns": list(self.turns),
            "about": about if len(about) <= SHOWN else f"{about[:SHOWN]}…",
            "notes": list(self.notes),
        }

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the known arrays by name."""
        names = ("tokens", "loss_mask", "sampled", "logprobs", "expert_entropy")
        every = {name: getattr(self, name) for name in names}
        return {name: array for name, array in every.items() if array is not None}

    def packed(self) -> bytes:
        """Return the sheet as a safetensors file.

        Raises:
            Malformed: the metadata cannot be encoded as JSON.
        """
        return pack(self.arrays(), {"facts": as_json(self.facts())})


def as_json(value: object, options: int = 0) -> str:
    """Encode a value from a file as JSON.

    Raises:
        Malformed: it is nested too deeply: `orjson` reads deeper nesting than it writes.
    """
    try:
        return orjson.dumps(value, option=options).decode()
    except orjson.JSONEncodeError as error:
        raise Malformed(f"its metadata cannot be encoded as JSON: {error}") from None


def sheet_of(sample: Sample) -> TokenSheet:
    """Return the sheet of a sample in the router's own format."""
    own = dict(sample.metadata)
    turns, notes = fitting_turns(own.pop(TURNS, None), len(sample))
    return TokenSheet(
        tokens=sample.tokens,
        loss_mask=sample.loss_mask,
        sampled=sampled_positions(sample.loss_mask, sample.logprobs, sample.weight_versions, turns),
        logprobs=sample.logprobs,
        expert_entropy=entropy_of(sample.routed_experts),
        versions=sample.weight_versions,
        turns=turns,
        path=[turn["turn"] for turn in turns],
        status=sample.status,
        reward=sample.reward,
        label=sample.label,
        response_length=sample.response_length,
        metadata=own,
        notes=notes,
    )


def entropy_of(rows: ShapedRows | None) -> npt.NDArray[np.float32] | None:
    """Return the expert entropy of each token that has a row, or None without rows."""
    return None if rows is None else expert_entropy(rows)


def sampled_positions(
    loss_mask: Mask, logprobs: Floats | None, runs: Iterable[VersionRun], turns: Iterable[Mapping[str, Any]]
) -> Mask:
    """Return 1 for each token that is in the loss, has a nonzero logprob, or lies in a version run or a turn."""
    sampled: Mask = loss_mask.copy()
    if logprobs is not None:
        sampled[logprobs != 0] = 1
    for start, end in (*((run.start, run.end) for run in runs), *((turn["start"], turn["end"]) for turn in turns)):
        sampled[start:end] = 1
    return sampled


def fitting_turns(given: Any, length: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the turns in a sample's metadata, and notes for the reader of the sheet.

    Malformed turns, or turns that are out of order or end after `length` tokens, are left out: the result is then no
    turns and one note.
    """
    if not isinstance(given, list):
        return [], []
    before = 0
    for turn in given:
        if not isinstance(turn, dict) or not all(type(turn.get(name)) is int for name in ("turn", "start", "end")):
            return [], [NO_TURNS]
        if not before <= turn["start"] <= turn["end"] <= length:
            return [], [NO_TURNS]
        before = turn["end"]
    return [_as_shown(turn) for turn in given], []


def _as_shown(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose text fields are strings or None. A file may hold anything there, and the page's scripts
    cannot turn every value into text."""
    edit = turn.get(EDIT)
    words: dict[str, Any] = {name: _words(turn[name]) for name in ("reason", "worker") if name in turn}
    if isinstance(edit, dict):
        words[EDIT] = {"message": edit.get("message"), **{name: _words(edit.get(name)) for name in EDITED}}
    elif EDIT in turn:
        words[EDIT] = None
    return {**turn, **words}


def _words(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else as_json(value)
