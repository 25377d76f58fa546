"""What is shown of episodes where texts are shown to nobody. Layers of anybody's own hold episodes too: what is known
to be no text is shown, and nothing else that they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from miles_router.middlewares.episodes import OTHER_REASON, EpisodeRow, TurnRow

Json = Mapping[str, Any]
#: Of a turn of a line, beside its reason and edit; of an episode, beside its turns.
TURN = {
    *("turn", "start", "end", "finish_reason", "worker", "rid", "turn_id", "cached_tokens", "cache_versions"),
    *("versions", "asked_at", "first_token_at", "answered_at"),
}
ABOUT = {"untraced"}
#: Of a turn beside its tokens, and of each of its spans.
TURN_ROW = {each.name for each in fields(TurnRow)}
SPAN = ("start", "end", "version", "worker")
#: Of the difference of two messages.
EDIT = ("message", "field")


def named_reason(reason: str, named: Collection[str]) -> str:
    """A reason that has a name; others are in words."""
    return reason if reason in named else OTHER_REASON


@dataclass(frozen=True)
class HiddenTexts:
    """Takes texts out of what layers say. `reasons`: those that are names; any other one is in words."""

    reasons: Collection[str]

    def reason(self, reason: str | None) -> str | None:
        """Words may be those of a prompt."""
        return None if reason is None else named_reason(reason, self.reasons)

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """How often each reason was."""
        found: Counter[str] = Counter()
        for reason, count in counts.items():
            found[named_reason(reason, self.reasons)] += count
        return dict(found)

    def row(self, row: EpisodeRow) -> EpisodeRow:
        """Of a list."""
        shown = {each.name: getattr(row, each.name) for each in fields(EpisodeRow)}
        return EpisodeRow(**{**shown, "label": None, "reasons": self.counts(row.reasons)})

    def about(self, about: Json) -> Json:
        """What stands beside the turns of an episode. A contract may name texts to stop at, and ids."""
        return {"metadata": None, "contract": None, **{name: about[name] for name in ABOUT if name in about}}

    def turn(self, turn: Json) -> Json:
        """Of an episode."""
        spans = [{name: span.get(name) for name in SPAN} for span in turn["spans"]]
        return {**self._turn(turn, TURN_ROW), "spans": spans}

    def turn_of_line(self, turn: Json) -> Json:
        """Of the tokens up to a leaf, where layers may say more of it."""
        return self._turn(turn, TURN)

    def _turn(self, turn: Json, names: Collection[str]) -> Json:
        shown = {name: value for name, value in turn.items() if name in names}
        return {**shown, "reason": self.reason(turn.get("reason")), "edit": _without_texts(turn.get("edit"))}

    def run(self, run: Json) -> Json:
        """What the run has come to."""
        return {**run, **{name: [self._forks(each) for each in run[name]] for name in ("intervals", "versions")}}

    def _forks(self, counts: Json) -> Json:
        return {**counts, "forks": self.counts(counts["forks"])}


def _without_texts(edit: Json | None) -> Json | None:
    """Which field of which message was changed, and not the texts."""
    return None if edit is None else {**{name: edit.get(name) for name in EDIT}, "held": None, "sent": None}
