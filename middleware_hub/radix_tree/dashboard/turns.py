"""A text rollout: a generation, and the generations that go on from what it sampled. Each is a turn of it."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.radix_tree.entry import Entry
from miles_router.middlewares.episodes import EpisodePlace, TurnRow, version_spans

#: In front of an episode's name. No session has such a character.
NAMED = "text@"
#: Why a generation is not simply the next one: another one goes on from the same.
BRANCH = "branch"


class RequestFacts(NamedTuple):
    """Of a generation's request, as `TurnRow` names them."""

    cached_tokens: int | None = None
    worker: str | None = None
    request_id: str | None = None
    asked_at: float | None = None
    answered_at: float | None = None
    waited_s: float = 0.0


NOTHING_KNOWN = RequestFacts()


class TextTurn:
    """One generation. `kept`: how many tokens of the one before it its prompt begins with; `prompt`: tokens of all of
    its prompt."""

    __slots__ = ("after", "before", "entry", "facts", "kept", "number", "prompt", "read", "reason", "rollout")

    def __init__(
        self, rollout: TextRollout, entry: Entry, before: TextTurn | None, kept: int, prompt: int, facts: RequestFacts
    ) -> None:
        self.rollout = rollout
        self.entry = entry
        self.before = before
        self.kept = kept
        self.prompt = prompt
        self.facts = facts
        self.number = rollout.count
        #: Those that go on from it.
        self.after: dict[TextTurn, None] = {}
        self.reason = BRANCH if before is not None and before.after else None
        if before is not None:
            before.after[self] = None
        self.read = prompt  # position up to which its tokens are counted as trained

    def line(self) -> list[TextTurn]:
        """The turns from the first one to this."""
        line = [self]
        while (before := line[-1].before) is not None:
            line.append(before)
        return line[::-1]

    def spans(self) -> list[dict[str, Any]]:
        """What it sampled, by the weights that did."""
        return version_spans(self.entry.behind(self.prompt)[0].pieces, self.prompt, self.facts.worker)

    def sampled(self) -> Counter[str | None]:
        """How many tokens each version sampled in it."""
        tokens: Counter[str | None] = Counter()
        if self.prompt < self.entry.reused:  # some of them are those of another
            for span in self.spans():
                tokens[span["version"]] += span["end"] - span["start"]
            return tokens
        begin = self.prompt - self.entry.reused
        for end, is_sampled, version in self.entry.runs:
            if is_sampled and end > begin:
                tokens[version] += end - begin
            begin = max(begin, end)
        return tokens

    def count_read(self, tokens: int) -> Counter[str | None]:
        """Mark the tokens up to the position `tokens` as read; return how many of them are new, by weight version."""
        new: Counter[str | None] = Counter()
        for span in self.spans():
            new[span["version"]] += max(min(span["end"], tokens) - max(span["start"], self.read), 0)
        self.read = max(self.read, tokens)
        return new

    def agrees_with(self, other: TextTurn, tokens: int) -> bool:
        """Return whether both sampled the same ids behind prompts of one length, up to the position `tokens`."""
        if self.prompt != other.prompt or min(len(self.entry), len(other.entry)) < tokens:
            return False
        mine, theirs = (each.entry.behind(each.prompt)[0][: tokens - each.prompt] for each in (self, other))
        return np.array_equal(mine.tokens, theirs.tokens)

    def row(self) -> TurnRow:
        """As it is shown."""
        return TurnRow(
            turn=self.number,
            parent=None if self.before is None else self.before.number,
            reason=self.reason,
            prompt_tokens=self.prompt,
            given_tokens=self.prompt - self.kept,
            dropped_tokens=0 if self.before is None else len(self.before.entry) - self.kept,
            start=self.prompt,
            end=len(self.entry),
            spans=self.spans(),
            finish_reason=self.entry.finish,
            rid=self.entry.rid,
            **self.facts._asdict(),
        )


class TextRollout:
    """One episode."""

    __slots__ = ("count", "flights", "group", "id", "model", "started_at", "turns", "used_at")

    def __init__(self, now: float, group: str | None = None, model: str | None = None) -> None:
        self.id = NAMED + secrets.token_hex(8)
        self.started_at = self.used_at = now
        self.group = group
        self.model = model
        self.turns: dict[int, TextTurn] = {}
        self.count = 0  # turns that it has had
        self.flights: list[Any] = []  # where the requests under way are

    def continued(self) -> dict[int, int]:
        """The turns that others go on from, and how many of their tokens some of these have."""
        ends: dict[int, int] = {}
        for turn in self.turns.values():
            if turn.before is not None:
                ends[turn.before.number] = max(ends.get(turn.before.number, 0), turn.kept)
        return ends

    def leaves(self) -> list[TextTurn]:
        """The turns that none goes on from, oldest first."""
        continued = self.continued()
        return [turn for turn in self.turns.values() if turn.number not in continued]

    @property
    def place(self) -> EpisodePlace:
        """Where it stands among all."""
        return self.started_at, self.id
