"""Remove texts from episodes, for `dashboard_text` off.

User-written middlewares hold episodes too. So this is an allowlist: only fields known to contain no text are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from miles_router.middlewares.episodes import OTHER_REASON, EpisodeRow, TurnRow

Json = Mapping[str, Any]
#: Fields shown of a turn in a token slice, besides its reason and edit.
TURN = {
    *("turn", "start", "end", "finish_reason", "worker", "rid", "turn_id", "cached_tokens", "cache_versions"),
    *("versions", "asked_at", "first_token_at", "answered_at"),
}
#: Fields shown of an episode, besides its row and its turns.
ABOUT = {"untraced"}
#: Fields shown of a turn in an episode's detail, and of each of its spans.
TURN_ROW = {each.name for each in fields(TurnRow)}
SPAN = ("start", "end", "version", "worker")
#: Fields shown of a reward, besides a value that is a number.
REWARD = ("turn", "segment", "span", "name")
#: Fields shown of a turn's edit, the difference between a recorded and a sent message.
EDIT = ("message", "field")


def named_reason(reason: str, named: Collection[str]) -> str:
    """Return `reason` if it is a fixed name, else `OTHER_REASON`: it is free text and may quote a prompt."""
    return reason if reason in named else OTHER_REASON


@dataclass(frozen=True)
class HiddenTexts:
    """Removes texts from the records of middlewares. `reasons` are the fixed names; other reasons are free text."""

    reasons: Collection[str]

    def reason(self, reason: str | None) -> str | None:
        """Return a reason with free text replaced by `OTHER_REASON`."""
        return None if reason is None else named_reason(reason, self.reasons)

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return counts by reason, with all free-text reasons counted under `OTHER_REASON`."""
        found: Counter[str] = Counter()
        for reason, count in counts.items():
            found[named_reason(reason, self.reasons)] += count
        return dict(found)

    def row(self, row: EpisodeRow) -> EpisodeRow:
        """Return an episode's row of the list without its label and free-text reasons."""
        shown = {each.name: getattr(row, each.name) for each in fields(EpisodeRow)}
        return EpisodeRow(**{**shown, "label": None, "reasons": self.counts(row.reasons)})

    def about(self, about: Json) -> Json:
        """Return an episode's other fields. The contract is hidden, since it may contain stop texts and token ids."""
        return {"metadata": None, "contract": None, **{name: about[name] for name in ABOUT if name in about}}

    def turn(self, turn: Json) -> Json:
        """Return a turn of an episode's detail without its texts and tokens."""
        spans = [{name: span.get(name) for name in SPAN} for span in turn["spans"]]
        return {**self._turn(turn, TURN_ROW), "spans": spans, "rewards": [*map(_number_alone, turn["rewards"])]}

    def turn_of_line(self, turn: Json) -> Json:
        """Return a turn of a token slice without texts. Middlewares may add other fields to it, which are dropped."""
        return self._turn(turn, TURN)

    def _turn(self, turn: Json, names: Collection[str]) -> Json:
        shown = {name: value for name, value in turn.items() if name in names}
        return {**shown, "reason": self.reason(turn.get("reason")), "edit": _without_texts(turn.get("edit"))}

    def run(self, run: Json) -> Json:
        """Return the run's numbers with free-text fork reasons replaced."""
        return {**run, **{name: [self._forks(each) for each in run[name]] for name in ("intervals", "versions")}}

    def _forks(self, counts: Json) -> Json:
        return {**counts, "forks": self.counts(counts["forks"])}


def _number_alone(reward: Json) -> Json:
    """Return a reward without its value, unless that is a number."""
    value = reward.get("value")
    shown = {name: reward[name] for name in REWARD if name in reward}
    return {**shown, "value": value if isinstance(value, (int, float)) else None}


def _without_texts(edit: Json | None) -> Json | None:
    """Return which field of which message was changed, without the texts."""
    return None if edit is None else {**{name: edit.get(name) for name in EDIT}, "held": None, "sent": None}
