"""`TokenSheet`: a sample as the token view reads it, and its form on a page: a safetensors file.

Tensors `tokens`, and `loss_mask`, `sampled`, `logprobs`, `expert_entropy` where they are known; everything else as
JSON under `facts` in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from miles_router.trajectory import Malformed, Sample, VersionRun
from miles_router.trajectory.pieces import Mask, Tokens
from miles_router.trajectory.safetensors import pack
from miles_router.trajectory.sample import ShapedRows
from miles_router.view.entropy import expert_entropy

Floats = npt.NDArray[np.floating[Any]]
#: Of a sample's metadata: where its turns are, and why one begins a segment.
TURNS, EDIT = "turns", "edit"
#: Of the difference of two messages, beside the place of the message.
EDITED = ("field", "held", "sent")
#: Characters that are shown of what a sample has beside its tokens.
SHOWN = 20_000
NO_TURNS = "The turns in its metadata do not fit its tokens: turns and workers are not shown."


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenSheet:
    """One sample, token by token; n tokens. None stands for what the file does not say.

    Attributes:
        tokens: int32 [n].
        loss_mask: uint8 [n], 1 = in the loss.
        sampled: uint8 [n], 1 = sampled by the engine, in the loss or not.
        logprobs: [n], of the type that the file has; 0 where not sampled.
        expert_entropy: float32 [n - 1], bits.
        versions: runs over sampled positions.
        version_names: which versions sampled it, where nobody says which token is whose.
        turns: as the metadata of a session's sample has them, with `start` and `end` of what each sampled.
        path: the numbers of the turns from the first to the leaf.
        status, reward, label, response_length: of the sample.
        metadata: the rest.
        notes: what is wrong with it, in words.
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
        """Of which session it is."""
        found = self.metadata.get("session_id")
        return found if isinstance(found, str) else None

    @property
    def trained(self) -> int | None:
        """How many of its tokens are in the loss."""
        return None if self.loss_mask is None else int(self.loss_mask.sum())

    def facts(self) -> dict[str, Any]:
        """Everything but the arrays. `about` is for people: a text, for scripts would round what it has of numbers."""
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
        """Those that are known, by their names."""
        names = ("tokens", "loss_mask", "sampled", "logprobs", "expert_entropy")
        every = {name: getattr(self, name) for name in names}
        return {name: array for name, array in every.items() if array is not None}

    def packed(self) -> bytes:
        """The form on a page.

        Raises:
            Malformed: its metadata cannot be written.
        """
        return pack(self.arrays(), {"facts": as_json(self.facts())})


def as_json(value: object, options: int = 0) -> str:
    """What a file says, as JSON.

    Raises:
        Malformed: it is nested deeper than `orjson` writes, which reads deeper.
    """
    try:
        return orjson.dumps(value, option=options).decode()
    except orjson.JSONEncodeError as error:
        raise Malformed(f"its metadata cannot be written: {error}") from None


def sheet_of(sample: Sample) -> TokenSheet:
    """A sample of ours."""
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
    """Of each token that has a row of experts."""
    return None if rows is None else expert_entropy(rows)


def sampled_positions(
    loss_mask: Mask, logprobs: Floats | None, runs: Iterable[VersionRun], turns: Iterable[Mapping[str, Any]]
) -> Mask:
    """1 where anything says that the engine sampled the token."""
    sampled: Mask = loss_mask.copy()
    if logprobs is not None:
        sampled[logprobs != 0] = 1
    for start, end in (*((run.start, run.end) for run in runs), *((turn["start"], turn["end"]) for turn in turns)):
        sampled[start:end] = 1
    return sampled


def fitting_turns(given: Any, length: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Turns as metadata has them, in order and within `length` tokens; or none, and a note that says so."""
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
    """A turn whose words are words, whatever a file has in their place: scripts could not make some of it a text."""
    edit = turn.get(EDIT)
    words: dict[str, Any] = {name: _words(turn[name]) for name in ("reason", "worker") if name in turn}
    if isinstance(edit, dict):
        words[EDIT] = {"message": edit.get("message"), **{name: _words(edit.get(name)) for name in EDITED}}
    elif EDIT in turn:
        words[EDIT] = None
    return {**turn, **words}


def _words(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else as_json(value)
