"""A text rollout: a generation, and the generations that continue what it sampled. Each generation is a turn."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.radix_tree.entry import Entry
from miles_router.middlewares.episodes import EpisodePlace, TurnRow, version_spans

#: Prefix of episode ids. Ids of sessions do not contain `@`.
NAMED = "text@"
#: The reason of a turn that is not the first continuation of the turn before it.
BRANCH = "branch"


class RequestFacts(NamedTuple):
    """Facts about a generation's request, named as in `TurnRow`."""

    cached_tokens: int | None = None
    worker: str | None = None
    request_id: str | None = None
    asked_at: float | None = None
    answered_at: float | None = None
    waited_s: float = 0.0


NOTHING_KNOWN = RequestFacts()


class TextTurn:
    """One generation.

    Attributes:
        kept: how many tokens of the turn before it its prompt begins with.
        prompt: the number of tokens of its whole prompt.
    """

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
        #: The turns that continue this one, in order.
        self.after: dict[TextTurn, None] = {}
        self.reason = BRANCH if before is not None and before.after else None
        if before is not None:
            before.after[self] = None
        self.read = prompt  # position up to which its tokens are counted as trained

    def line(self) -> list[TextTurn]:
        """Return the turns from the first one to this one."""
        line = [self]
        while (before := line[-1].before) is not None:
            line.append(before)
        return line[::-1]

    def spans(self) -> list[dict[str, Any]]:
        """Return the sampled spans by weight version."""
        return version_spans(self.entry.suffix(self.prompt)[0].pieces, self.prompt, self.facts.worker)

    def sampled(self) -> Counter[str | None]:
        """Return how many tokens each weight version sampled in this turn."""
        tokens: Counter[str | None] = Counter()
        if self.prompt < self.entry.reused:  # the parent entry owns some of the sampled tokens
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
        mine, theirs = (each.entry.suffix(each.prompt)[0][: tokens - each.prompt] for each in (self, other))
        return np.array_equal(mine.tokens, theirs.tokens)

    def row(self) -> TurnRow:
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
    """One episode: a tree of turns."""

    __slots__ = ("count", "group", "id", "model", "routings", "started_at", "turns", "used_at")

    def __init__(self, now: float, group: str | None = None, model: str | None = None) -> None:
        self.id = NAMED + secrets.token_hex(8)
        self.started_at = self.used_at = now
        self.group = group
        self.model = model
        self.turns: dict[int, TextTurn] = {}
        self.count = 0  # of turns so far, evicted ones included
        self.routings: list[Any] = []  # the routing states of the requests in flight

    def continued(self) -> dict[int, int]:
        """Return, by number of a turn that others continue, how many of its tokens the longest continuation keeps."""
        ends: dict[int, int] = {}
        for turn in self.turns.values():
            if turn.before is not None:
                ends[turn.before.number] = max(ends.get(turn.before.number, 0), turn.kept)
        return ends

    def leaves(self) -> list[TextTurn]:
        """Return the turns that no turn continues, oldest first."""
        continued = self.continued()
        return [turn for turn in self.turns.values() if turn.number not in continued]

    @property
    def place(self) -> EpisodePlace:
        """The position in the order of all episodes: by start time, then id."""
        return self.started_at, self.id
