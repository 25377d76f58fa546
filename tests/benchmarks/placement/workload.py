"""A workload: JSON lines, each an episode.

    {"at": 0.0, "group": "g1", "shared_prefix": 400, "prompt_tokens": 500,
     "turns": [{"output_tokens": 120, "tool_wait_s": 2.5, "append_tokens": 300}, {"output_tokens": 80}]}

`at` is when it begins, in seconds of the fleet's time. Its prompt has `prompt_tokens` tokens, or `shared_prefix` where
that is more; the first `shared_prefix` are the same in every episode of its `group`. After each turn but the last it
waits `tool_wait_s`, then `append_tokens` follow what was said. One turn is a text rollout, several are a session.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Turn:
    """One request; what follows it is left out after the last."""

    output_tokens: int
    tool_wait_s: float = 0.0
    append_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Episode:
    """One sample or session."""

    turns: tuple[Turn, ...]
    prompt_tokens: int
    shared_prefix: int = 0
    group: str = ""
    at: float = 0.0

    @property
    def prompt(self) -> int:
        return max(self.prompt_tokens, self.shared_prefix)

    @property
    def tokens(self) -> int:
        """Tokens after its last turn."""
        return self.prompt + sum(turn.output_tokens for turn in self.turns) + self.appended

    @property
    def appended(self) -> int:
        return sum(turn.append_tokens for turn in self.turns[:-1])


def read(path: Path) -> list[Episode]:
    """The episodes in a file; ValueError that names the line for anything that is none."""
    episodes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                episodes.append(_episode(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: no episode: {type(error).__name__}: {error}") from None
    if not episodes:
        raise ValueError(f"{path}: no episodes")
    return episodes


def _episode(given: Mapping[str, object]) -> Episode:
    turns = given["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns must be a list of at least one")
    episode = Episode(
        turns=tuple(
            Turn(
                _count(turn, "output_tokens", least=1),
                _seconds(turn, "tool_wait_s"),
                _count(turn, "append_tokens", default=0),
            )
            for turn in turns
        ),
        prompt_tokens=_count(given, "prompt_tokens"),
        shared_prefix=_count(given, "shared_prefix", default=0),
        group=str(given.get("group") or ""),
        at=_seconds(given, "at"),
    )
    if not episode.prompt:
        raise ValueError("the prompt is empty")
    return episode


def _count(given: Mapping[str, object], name: str, *, least: int = 0, default: int | None = None) -> int:
    value = given.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _seconds(given: Mapping[str, object], name: str) -> float:
    value = given.get(name, 0.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be seconds of at least 0, got {value!r}")
    return float(value)


def lines(episodes: Iterable[Episode]) -> str:
    return "".join(json.dumps(_ordered(episode)) + "\n" for episode in episodes)


def _ordered(episode: Episode) -> dict[str, object]:
    known = asdict(episode)
    return {name: known[name] for name in ("at", "group", "shared_prefix", "prompt_tokens", "turns")}


class Ids:
    """Token ids as JSON writes them: what one seed gives to groups, episodes and turns. All below 256."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, number: int, episode: Episode) -> bytes:
        """The first request of the episode with this number."""
        shared = self._written(f"group {episode.group}", episode.shared_prefix)
        own = self._written(f"episode {number}", episode.prompt - episode.shared_prefix)
        return b",".join(part for part in (shared, own) if part)

    def appended(self, number: int, turn: int, tokens: int) -> bytes:
        return self._written(f"episode {number} turn {turn}", tokens)

    def _written(self, what: str, tokens: int) -> bytes:
        return b",".join(_SPELLED[value] for value in random.Random(f"{self._seed} {what}").randbytes(tokens))


_SPELLED = [b"%d" % value for value in range(256)]
