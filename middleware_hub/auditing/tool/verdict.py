"""Compare recorded with recomputed logprobs and judge whether they differ too much. No I/O.

The judged distance is a quantile of |recorded - recomputed|, in nats, over all compared tokens. Each sample, kind of
episode, worker and weight version is also judged alone, so that a bad one does not hide among good ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.trajectory import Malformed

Floats = npt.NDArray[np.float64]

#: Kinds of episodes.
SESSION, TEXT = "session", "text"
#: Quantiles in the report.
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
#: Boundaries between the groups of the report by position.
EDGES = (64, 256, 1024, 4096, 16384, 65536, 262144)
#: A group with fewer tokens is not judged alone.
ENOUGH = 32
#: Misalignments to look for, in positions.
SLIPS = (-1, 1)


@dataclass(frozen=True)
class Limits:
    """The limit: the `quantile` of the distances may be at most `threshold` nats."""

    quantile: float = 0.95
    threshold: float = 0.3


@dataclass(frozen=True)
class ComparedSpan:
    """Tokens of one turn under one weight version: `recorded` and `recomputed` logprobs from position `start` on."""

    episode_id: str
    kind: str
    leaf: int
    start: int
    version: str
    worker: str
    recomputed_by: str
    recorded: Floats
    recomputed: Floats

    @property
    def distances(self) -> Floats:
        """|recorded - recomputed|."""
        apart: Floats = np.abs(self.recorded - self.recomputed)
        return apart

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each token in its sample."""
        return np.arange(self.start, self.start + len(self.recorded))

    def slipped(self, by: int) -> Floats:
        """Return the distances if each recorded logprob belonged to the token `by` positions later."""
        kept = len(self.recorded) - abs(by)
        recorded, recomputed = (
            (self.recorded[:kept], self.recomputed[by:])
            if by > 0
            else (
                self.recorded[-by:],
                self.recomputed[:kept],
            )
        )
        apart: Floats = np.abs(recorded - recomputed)
        return apart

    @classmethod
    def read(cls, episode_id: str, kind: str, leaf: int, given: Mapping[str, Any]) -> ComparedSpan:
        """Parse a span of an answer to `POST /episodes/{id}/audit`.

        Raises:
            KeyError, TypeError, ValueError: the span is malformed.
        """
        recorded, recomputed = (np.asarray(given[name], np.float64) for name in ("recorded", "recomputed"))
        if recorded.ndim != 1 or recorded.shape != recomputed.shape or not np.isfinite(recorded - recomputed).all():
            raise ValueError("recorded and recomputed must be equally many finite logprobs")
        if not len(recorded):
            raise ValueError("a span must have tokens")
        version, worker, recomputed_by = (str(given[name]) for name in ("version", "worker", "recomputed_by"))
        return cls(episode_id, kind, leaf, int(given["start"]), version, worker, recomputed_by, recorded, recomputed)


@dataclass
class AuditedEpisodes:
    """The router's audit answers, collected."""

    spans: list[ComparedSpan] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    not_comparable: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    prompts: Counter[str] = field(default_factory=Counter)
    prompts_not_compared: Counter[str] = field(default_factory=Counter)
    differences: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, answer: Mapping[str, Any]) -> int:
        """Add one episode's answer. Return how many of its samples had something to compare.

        Raises:
            Malformed: the answer does not have the expected form.
        """
        try:
            return self._add(answer)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Malformed(repr(error)) from None

    def _add(self, answer: Mapping[str, Any]) -> int:
        episode_id, kind, compared = str(answer["id"]), str(answer["kind"]), 0
        self.kinds[kind] += 1
        for sample in answer["samples"]:
            self.samples += 1
            compared += bool(sample["spans"])
            self.spans += [ComparedSpan.read(episode_id, kind, int(sample["leaf"]), each) for each in sample["spans"]]
            self.not_comparable.update(_counts(sample["not_comparable"]))
            self.refusals += [str(each) for each in sample["refusals"]]
        prompts = answer["prompts"]
        self.prompts.update({name: int(prompts[name]) for name in ("compared", "differ")})
        self.prompts_not_compared.update(_counts(prompts["not_compared"]))
        self.differences += [_difference(episode_id, each) for each in prompts["differences"]]
        return compared


def _counts(given: Mapping[str, Any]) -> dict[str, int]:
    return {reason: int(count) for reason, count in given.items()}


def _difference(episode_id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert the fields of a prompt difference that the report shows."""
    held, rendered = ({**given[side], "text": str(given[side]["text"])} for side in ("held", "rendered"))
    places = {name: int(given[name]) for name in ("turn", "position")}
    return {"session_id": episode_id, **given, **places, "held": held, "rendered": rendered}


@dataclass(frozen=True)
class Spread:
    """The distances of a group of tokens: their number and quantiles, in nats.

    `at` is the judged quantile. A group with too few tokens to be judged has `too_far` None.
    """

    tokens: int
    quantiles: Mapping[float, float]
    at: float
    too_far: bool | None

    @classmethod
    def of(cls, distances: Floats, limits: Limits, enough: int = ENOUGH) -> Spread:
        """Summarize distances, of which there must be at least one."""
        at = float(np.quantile(distances, limits.quantile))
        values = np.quantile(distances, QUANTILES)
        known = {quantile: float(value) for quantile, value in zip(QUANTILES, values, strict=True)}
        return cls(len(distances), known, at, at > limits.threshold if len(distances) >= enough else None)

    def as_json(self) -> dict[str, Any]:
        quantiles = {str(quantile): round(value, 6) for quantile, value in self.quantiles.items()}
        return {"tokens": self.tokens, "quantiles": quantiles, "at": round(self.at, 6), "too_far": self.too_far}


@dataclass(frozen=True)
class Verdict:
    """The result of an audit.

    Attributes:
        total: the distances of all compared tokens; None without any.
        parts: the distances by `sample`, `kind`, `worker`, `recomputed_by`, `version` or `position`, then by its value.
        slip: the misalignment of recorded logprobs, in positions; None unless shifting them makes them fit.
    """

    found: AuditedEpisodes
    limits: Limits
    total: Spread | None
    parts: Mapping[str, Mapping[str, Spread]]
    slip: int | None

    @property
    def too_far(self) -> list[str]:
        """The groups whose distances are too large, such as `worker http://...`; `all` for all tokens."""
        whole = ["all"] if self.total is not None and self.total.too_far else []
        named = ("sample", "kind", "worker", "recomputed_by", "version")
        return whole + [f"{by} {part}" for by in named for part, each in self.parts[by].items() if each.too_far]

    @property
    def good(self) -> bool | None:
        """True if everything that was compared agrees; None if nothing could be compared."""
        if self.too_far or self.found.prompts["differ"]:
            return False
        return None if self.total is None else True

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of `--json`."""
        found = self.found
        return {
            "good": self.good,
            "quantile": self.limits.quantile,
            "threshold": self.limits.threshold,
            "sessions": found.kinds[SESSION],
            "text_rollouts": found.kinds[TEXT],
            "samples": found.samples,
            "total": None if self.total is None else self.total.as_json(),
            "too_far": self.too_far,
            "slip": self.slip,
            **{f"by_{by}": {part: each.as_json() for part, each in of.items()} for by, of in self.parts.items()},
            "not_comparable": dict(found.not_comparable),
            "refusals": found.refusals,
            "prompts": {
                **{name: found.prompts[name] for name in ("compared", "differ")},
                "differences": found.differences,
                "not_compared": dict(found.prompts_not_compared),
            },
        }


def judge(found: AuditedEpisodes, limits: Limits) -> Verdict:
    """Compute the verdict over the collected answers."""
    spans = found.spans
    parts = {
        "sample": _parts(spans, lambda span: f"{span.episode_id}/{span.leaf}", limits),
        "kind": _parts(spans, lambda span: span.kind, limits),
        "worker": _parts(spans, lambda span: span.worker, limits),
        "recomputed_by": _parts(spans, lambda span: span.recomputed_by, limits),
        "version": _parts(spans, lambda span: span.version, limits),
        "position": _by_position(spans, limits),
    }
    total = Spread.of(_joined(span.distances for span in spans), limits, enough=1) if spans else None
    made = Verdict(found, limits, total, parts, None)
    return replace(made, slip=_slip(spans, limits)) if made.too_far else made


def _joined(arrays: Iterable[Floats]) -> Floats:
    return np.concatenate([*arrays, np.zeros(0)])


def _parts(spans: Sequence[ComparedSpan], name: Callable[[ComparedSpan], str], limits: Limits) -> dict[str, Spread]:
    distances: dict[str, list[Floats]] = {}
    for span in spans:
        distances.setdefault(name(span), []).append(span.distances)
    return {part: Spread.of(_joined(each), limits) for part, each in distances.items()}


def _by_position(spans: Sequence[ComparedSpan], limits: Limits) -> dict[str, Spread]:
    if not spans:
        return {}
    distances = _joined(span.distances for span in spans)
    place = np.searchsorted(EDGES, np.concatenate([span.positions for span in spans]), side="right")
    begins, ends = (0, *EDGES), (*EDGES, None)
    return {
        f"{begins[each]}-" if ends[each] is None else f"{begins[each]}-{ends[each]}": Spread.of(
            distances[place == each], limits
        )
        for each in map(int, np.unique(place))
    }


def _slip(spans: Sequence[ComparedSpan], limits: Limits) -> int | None:
    """Return the shift by which all spans that are too far would fit together, or None."""
    wrong = [span for span in spans if Spread.of(span.distances, limits, enough=1).too_far]
    for by in SLIPS:
        moved = _joined(span.slipped(by) for span in wrong if len(span.recorded) > abs(by))
        if len(moved) and not Spread.of(moved, limits, enough=1).too_far:
            return by
    return None
