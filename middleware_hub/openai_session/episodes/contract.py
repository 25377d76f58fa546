"""The contract of an episode, set when its session is made: what its agent may use up, what it cannot change, how old
the weights may be, and when its work ends. Pure.

    budget     max_tokens, max_context, max_turns, deadline_s
    sampling   settings that count in place of the agent's
    model      name, lora
    freshness  oldest_version, otherwise
    media      refuse, or replace: images and the like
    key        a key of the session's own
    group      what it is aborted with
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Why a session takes no further turns, or has none under way: beside these, `finalized`, `deleted` and `expired`.
BUDGET_TOKENS, CONTEXT, TURNS, DEADLINE, STALE, ABORTED = (
    "budget_tokens",
    "context",
    "turns",
    "deadline",
    "stale",
    "aborted",
)
FINALIZED, DELETED, EXPIRED = "finalized", "deleted", "expired"
#: Of settings that are fixed, others that would change the same.
ALSO = {"stop": ("stop_token_ids", "stop_regex")}
REFUSE, MARK, REPLACE = "refuse", "mark", "replace"
Group = str | int


@dataclass(frozen=True)
class Budget:
    """What an episode may use up; None: as much as it likes.

    Attributes:
        max_tokens: sampled in all turns together.
        max_context: prompt and answer of each turn together.
        max_turns: requests that are answered.
        deadline_s: seconds from the making of the session.
    """

    max_tokens: int | None = None
    max_context: int | None = None
    max_turns: int | None = None
    deadline_s: float | None = None

    @property
    def counts(self) -> bool:
        """Whether what turns have used up matters."""
        return self.max_tokens is not None or self.max_turns is not None

    @property
    def measures(self) -> bool:
        """Whether the length of prompts matters."""
        return self.max_tokens is not None or self.max_context is not None


@dataclass(frozen=True)
class Model:
    """Who answers: the name that the agent is shown, and the adapter by the engine's name for it."""

    name: str | None = None
    lora: str | None = None


@dataclass(frozen=True)
class Freshness:
    """The oldest weight version that may take part, a number, and whether a turn beyond it is refused or its samples
    are marked."""

    oldest_version: int | None = None
    otherwise: str = REFUSE

    def is_stale(self, version: str | None) -> bool:
        """Whether weights of this version are too old; of a version that is no number nobody can tell."""
        if self.oldest_version is None:
            return False
        return version is None or not version.isdecimal() or int(version) < self.oldest_version


@dataclass(frozen=True)
class Contract:
    """One contract; `given` is what was asked for, as it is shown."""

    budget: Budget = field(default_factory=Budget)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: Model = field(default_factory=Model)
    freshness: Freshness = field(default_factory=Freshness)
    media: str | None = None
    key: bool = False
    group: Group | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def fixed(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """A request with what its agent cannot change, and what it asked for instead of that."""
        fixed: dict[str, Any] = dict(self.sampling)
        if self.model.lora is not None:
            fixed["lora_path"] = self.model.lora
        if self.model.name is not None:
            fixed["model"] = self.model.name
        elif self.model.lora is not None:
            fixed |= base_model(request)
        if not fixed:
            return request, {}
        instead = [other for name in fixed for other in ALSO.get(name, ())]
        asked = {
            name: request[name]
            for name in (*fixed, *instead)
            if request.get(name) is not None and request[name] != fixed.get(name)
        }
        kept = {name: value for name, value in request.items() if name not in instead}
        return {**kept, **fixed}, asked


def base_model(request: Mapping[str, Any]) -> dict[str, str]:
    """The model that a request names, without an adapter: SGLang reads one behind a colon, and it would count more than
    `lora_path`."""
    model = request.get("model")
    return {"model": model.partition(":")[0]} if isinstance(model, str) and ":" in model else {}


NO_CONTRACT = Contract()
