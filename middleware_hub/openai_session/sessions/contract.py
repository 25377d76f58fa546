"""The contract of an episode, set when its session is made: what its agent may use up, what it cannot change, how old
the weights may be, and when its work ends. Pure.

    budget     max_tokens, max_context, max_turns, deadline_s
    sampling   settings that count in place of the agent's
    model      name, lora
    freshness  oldest_version, otherwise
    key        a key of the session's own
    group      what it is aborted with
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from miles_router.errors import BadRequest

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
#: Seconds that a deadline may be away: a year.
LONGEST = 366 * 24 * 3600.0
#: Of settings that are fixed, others that would change the same.
ALSO = {"stop": ("stop_token_ids", "stop_regex")}
REFUSE, MARK = "refuse", "mark"
Group = str | int
MAX_NAME = 256


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
    key: bool = False
    group: Group | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: object) -> Contract:
        """A contract as JSON has it; None for one without any part.

        Raises:
            BadRequest: a field is unknown, or of the wrong type; it is named.
        """
        if given is None:
            return NO_CONTRACT
        parts = _known("contract", given, PARTS)
        budget = _read("contract.budget", parts.get("budget"), BUDGET)
        sampling = _read("contract.sampling", parts.get("sampling"), SAMPLING)
        model = _read("contract.model", parts.get("model"), MODEL)
        freshness = _read("contract.freshness", parts.get("freshness"), FRESHNESS)
        if freshness and "oldest_version" not in freshness:
            raise BadRequest("contract.freshness: oldest_version is required")
        if "oldest_version" in freshness:
            freshness["oldest_version"] = int(freshness["oldest_version"])
        key = parts.get("key", False)
        if not isinstance(key, bool):
            raise BadRequest("contract.key must be true or false: the router makes the key")
        group = parts.get("group")
        if group is not None and not is_group(group):
            raise BadRequest(f"contract.group must be a whole number, or a string of 1 to {MAX_NAME} characters")
        return cls(Budget(**budget), sampling, Model(**model), Freshness(**freshness), key, group, dict(parts))

    @property
    def binds_turns(self) -> bool:
        """Whether it says something of turns, so that none may pass without being read."""
        return any(getattr(self, name) != getattr(NO_CONTRACT, name) for name in TURN_PARTS)

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


class Ledger:
    """What an episode has used of its budget. A turn reserves what it may take, so that turns at the same time never
    take more than there is."""

    def __init__(self) -> None:
        self.tokens = 0  # sampled, in turns that are recorded
        self.turns = 0  # requests that are recorded
        self._reserved: dict[object, int] = {}

    def reserve(self, turn: object, tokens: int) -> None:
        """A turn begins, and may sample so many tokens."""
        self._reserved[turn] = tokens

    def settle(self, turn: object, tokens: int) -> None:
        """It is recorded with so many."""
        self._reserved.pop(turn, None)
        self.tokens += tokens
        self.turns += 1

    def release(self, turn: object) -> None:
        """It is over, recorded or not."""
        self._reserved.pop(turn, None)

    @property
    def reserved(self) -> int:
        """Turns that run."""
        return len(self._reserved)

    def tokens_left(self, budget: Budget) -> int | None:
        """What is neither sampled nor reserved; None: without a bound."""
        if budget.max_tokens is None:
            return None
        return max(0, budget.max_tokens - self.tokens - sum(self._reserved.values()))

    def has_turns(self, budget: Budget) -> bool:
        """Whether one more turn may begin."""
        return budget.max_turns is None or self.turns + len(self._reserved) < budget.max_turns

    @property
    def used(self) -> dict[str, int]:
        """For those who read the session."""
        return {"tokens": self.tokens, "turns": self.turns}


@dataclass(frozen=True)
class Allowance:
    """What is left for a turn; `reason` and `limit` say of what there is least."""

    tokens: int | None  # for each choice; None: without a bound
    reason: str = BUDGET_TOKENS
    limit: int = 0


def allowance(
    budget: Budget, ledger: Ledger, *, prompt: int | None, choices: int, window: int | None = None
) -> Allowance:
    """How many tokens each of a turn's choices may have, for a prompt of so many tokens (None: not known) and an engine
    whose window holds so many."""
    windows = [limit for limit in (budget.max_context, window) if limit is not None and prompt is not None]
    bounds = [(max(0, limit - (prompt or 0)), CONTEXT, limit) for limit in windows]
    left = ledger.tokens_left(budget)
    if left is not None:
        bounds.append((left // choices, BUDGET_TOKENS, budget.max_tokens or 0))
    return Allowance(*min(bounds, key=lambda bound: bound[0])) if bounds else Allowance(None)


def asked_tokens(request: Mapping[str, Any], lengths: Sequence[str], default: int | None) -> int | None:
    """How many tokens a request asks for each choice; None: as many as fit.

    Args:
        lengths: the fields that say it; what stands first counts.
        default: of a request that does not say.

    Raises:
        BadRequest: nobody can tell.
    """
    given = [name for name in lengths if request.get(name) is not None]
    for name in given:
        if type(request[name]) is not int or request[name] < 1:
            raise BadRequest(f"{name} must be a whole number from 1: the session has a contract")
    if given:
        return int(request[given[0]])
    return None if any(name in request for name in lengths) else default


def cut(request: Mapping[str, Any], lengths: Sequence[str], tokens: int) -> Mapping[str, Any]:
    """A request for at most so many tokens."""
    names = [name for name in lengths if request.get(name) is not None] or lengths[-1:]
    least = request.get("min_tokens")
    shorter = {"min_tokens": tokens} if isinstance(least, int) and least > tokens else {}
    return {**request, **dict.fromkeys(names, tokens), **shorter}


def choices_of(request: Mapping[str, Any], prompts: int) -> int:
    """How many choices an answer will have.

    Raises:
        BadRequest: nobody can tell.
    """
    n = request.get("n")
    if n is not None and (type(n) is not int or n < 1):
        raise BadRequest("n must be a whole number from 1: the session has a contract")
    return prompts * (n or 1)


def is_group(value: object) -> bool:
    """Whether it can name a group."""
    return (isinstance(value, str) and 0 < len(value) <= MAX_NAME) or type(value) is int


# What a contract may have

Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 53


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _seconds(value: Any) -> bool:
    return _number(value) and 0 < value <= LONGEST


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _model_name(value: Any) -> bool:
    return _name(value) and ":" not in value  # behind it, SGLang reads the name of an adapter


def _stops(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _biases(value: Any) -> bool:
    return isinstance(value, dict) and all(_number(each) for each in value.values())


def _version(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and value.isdecimal() and value.isascii())


COUNT, NUMBER = (_count, "a whole number from 1"), (_number, "a number")
Fields = Mapping[str, tuple[Check, str]]
BUDGET: Fields = {
    "max_tokens": COUNT,
    "max_context": COUNT,
    "max_turns": COUNT,
    "deadline_s": (_seconds, f"seconds, above 0 and at most {LONGEST:.0f}"),
}
SAMPLING: Fields = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": (lambda value: type(value) is int, "a whole number"),
    "min_p": NUMBER,
    "stop": (_stops, "a string or a list of strings"),
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": (_biases, "an object of numbers"),
}
MODEL: Fields = {
    "name": (_model_name, f"a string of 1 to {MAX_NAME} characters without a colon"),
    "lora": (_name, f"a string of 1 to {MAX_NAME} characters"),
}
FRESHNESS: Fields = {
    "oldest_version": (_version, "a whole number, or one in a string"),
    "otherwise": (lambda value: value in (REFUSE, MARK), f"{REFUSE!r} or {MARK!r}"),
}
TURN_PARTS = ("budget", "sampling", "model", "freshness")
PARTS = tuple(each.name for each in fields(Contract) if each.name != "given")
NO_CONTRACT = Contract()


def _known(where: str, given: object, known: Sequence[str] | Fields) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise BadRequest(f"{where} must be an object")
    if unknown := given.keys() - set(known):
        raise BadRequest(f"unknown field {where}.{min(unknown)}; known are {', '.join(known)}")
    return given


def _read(where: str, given: object, known: Fields) -> dict[str, Any]:
    if given is None:
        return {}
    read = dict(_known(where, given, known))
    for name, value in read.items():
        check, words = known[name]
        if not check(value):
            raise BadRequest(f"{where}.{name} must be {words}")
    return read
