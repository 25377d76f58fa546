"""The contract of an episode, without a socket: what may stand in one, and what it leaves for a turn."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.openai_session.episodes.contract import (
    NO_CONTRACT,
    Budget,
    Freshness,
    SessionStatus,
)
from middleware_hub.openai_session.episodes.episode import (
    Allowance,
    Ledger,
    allowance,
    asked_tokens,
    choices_of,
    limit_tokens,
)
from middleware_hub.openai_session.episodes.reading import read_contract
from miles_router.errors import BadRequest

LENGTHS = ("max_completion_tokens", "max_tokens")
WHOLE = {
    "budget": {"max_tokens": 512, "max_context": 4096, "max_turns": 3, "deadline_s": 60.5},
    "sampling": {"temperature": 0.7, "stop": ["a"], "logit_bias": {"7": -1}},
    "model": {"name": "student", "lora": "adapter-3"},
    "freshness": {"oldest_version": "7", "otherwise": "mark"},
    "key": True,
    "group": "task-3",
}


def test_a_contract_is_shown_as_it_was_given() -> None:
    contract = read_contract(WHOLE)
    assert contract.given == WHOLE
    assert contract.budget == Budget(512, 4096, 3, 60.5)
    assert contract.freshness == Freshness(7, "mark")
    assert (contract.model.name, contract.model.lora, contract.group, contract.key) == (
        "student",
        "adapter-3",
        "task-3",
        True,
    )


@pytest.mark.parametrize("part", list(WHOLE))
def test_every_part_is_optional(part: str) -> None:
    assert read_contract({part: WHOLE[part]}).given == {part: WHOLE[part]}


@pytest.mark.parametrize("nothing", [None, {}])
def test_nothing_is_no_contract(nothing: Any) -> None:
    assert read_contract(nothing) == NO_CONTRACT


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([], "contract must be an object"),
        ({"bugdet": {}}, "contract.bugdet"),
        ({"budget": {"max_token": 1}}, "contract.budget.max_token"),
        ({"budget": []}, "contract.budget must"),
        ({"budget": {"max_tokens": 0}}, "contract.budget.max_tokens"),
        ({"budget": {"max_tokens": True}}, "contract.budget.max_tokens"),
        ({"budget": {"max_turns": 1.0}}, "contract.budget.max_turns"),
        ({"budget": {"max_context": "9"}}, "contract.budget.max_context"),
        ({"budget": {"deadline_s": 0}}, "contract.budget.deadline_s"),
        ({"budget": {"deadline_s": 1e12}}, "contract.budget.deadline_s"),
        ({"sampling": {"max_tokens": 1}}, "contract.sampling.max_tokens"),
        ({"sampling": {"temperature": "hot"}}, "contract.sampling.temperature"),
        ({"sampling": {"temperature": True}}, "contract.sampling.temperature"),
        ({"sampling": {"temperature": float("inf")}}, "contract.sampling.temperature"),
        ({"sampling": {"stop": [1]}}, "contract.sampling.stop"),
        ({"sampling": {"logit_bias": {"7": "x"}}}, "contract.sampling.logit_bias"),
        ({"model": {"base": "x"}}, "contract.model.base"),
        ({"model": {"name": "base:adapter"}}, "contract.model.name"),
        ({"model": {"lora": ""}}, "contract.model.lora"),
        ({"freshness": {"otherwise": "mark"}}, "oldest_version is required"),
        ({"freshness": {"oldest_version": "new"}}, "contract.freshness.oldest_version"),
        ({"freshness": {"oldest_version": 1, "otherwise": "ask"}}, "contract.freshness.otherwise"),
        ({"freshness": {"oldest_version": 1, "otherwise": []}}, "contract.freshness.otherwise"),
        ({"key": "mine"}, "contract.key"),
        ({"group": ""}, "contract.group"),
        ({"group": True}, "contract.group"),
        ({"group": "g" * 257}, "contract.group"),
    ],
)
def test_what_is_wrong_with_a_contract_is_named(wrong: Any, named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_contract(wrong)
    assert named in str(refused.value)


def test_what_is_fixed_counts_and_what_was_asked_for_is_told() -> None:
    contract = read_contract({"sampling": {"temperature": 0.7, "top_p": 1, "stop": "a"}})
    request = {"temperature": 0.1, "top_p": 1, "stop_token_ids": [7], "seed": 3}
    fixed, asked = contract.apply_fixed(request)
    assert fixed == {"temperature": 0.7, "top_p": 1, "stop": "a", "seed": 3}
    assert asked == {"temperature": 0.1, "stop_token_ids": [7]}
    assert request == {"temperature": 0.1, "top_p": 1, "stop_token_ids": [7], "seed": 3}, "the request is not changed"


def test_without_fixed_settings_a_request_stays_as_it_is() -> None:
    request = {"temperature": 0.1}
    assert read_contract({"budget": {"max_turns": 1}}).apply_fixed(request) == (request, {})


def test_no_name_of_a_model_brings_another_adapter_than_the_contract_s() -> None:
    fixed, asked = read_contract({"model": {"lora": "mine"}}).apply_fixed(
        {"model": "base:other", "lora_path": "another"}
    )
    assert fixed == {"model": "base", "lora_path": "mine"}
    assert asked == {"model": "base:other", "lora_path": "another"}


def test_the_name_of_the_contract_takes_the_place_of_the_agent_s() -> None:
    fixed, _ = read_contract({"model": {"name": "student", "lora": "mine"}}).apply_fixed({"model": "gpt:x"})
    assert fixed == {"model": "student", "lora_path": "mine"}


def test_turns_at_the_same_time_never_take_more_than_there_is() -> None:
    budget, ledger = Budget(max_tokens=10, max_turns=3), Ledger()
    ledger.reserve("a", 6)
    assert ledger.tokens_left(budget) == 4
    ledger.reserve("b", 4)
    assert ledger.tokens_left(budget) == 0
    ledger.settle("a", 2)
    assert (ledger.tokens_left(budget), ledger.has_turns(budget)) == (4, True)
    ledger.release("a")
    ledger.release("b")
    assert (ledger.tokens_left(budget), ledger.tokens, ledger.turns) == (8, 2, 1)
    ledger.settle("c", 8)
    ledger.reserve("d", 0)
    assert (ledger.tokens_left(budget), ledger.has_turns(budget)) == (0, False)


@pytest.mark.parametrize(
    ("budget", "used", "prompt", "choices", "window", "left"),
    [
        (Budget(), 0, 5, 1, None, Allowance(None)),
        (Budget(max_turns=1), 0, None, 1, None, Allowance(None)),
        (Budget(max_tokens=10), 3, None, 1, 100, Allowance(7, SessionStatus.BUDGET_TOKENS, 10)),
        (Budget(max_tokens=10), 3, 50, 3, 100, Allowance(2, SessionStatus.BUDGET_TOKENS, 10)),
        (Budget(max_tokens=10), 12, 50, 1, 100, Allowance(0, SessionStatus.BUDGET_TOKENS, 10)),
        (Budget(max_context=60), 0, 50, 2, 100, Allowance(10, SessionStatus.CONTEXT, 60)),
        (Budget(max_context=60), 0, 60, 1, 100, Allowance(0, SessionStatus.CONTEXT, 60)),
        (Budget(max_context=60), 0, 70, 1, 100, Allowance(0, SessionStatus.CONTEXT, 60)),
        (Budget(max_context=200), 0, 70, 1, 100, Allowance(30, SessionStatus.CONTEXT, 100)),
        (Budget(max_tokens=20, max_context=60), 0, 50, 1, None, Allowance(10, SessionStatus.CONTEXT, 60)),
    ],
)
def test_a_turn_may_have_what_there_is_least_of(
    budget: Budget, used: int, prompt: int | None, choices: int, window: int | None, left: Allowance
) -> None:
    ledger = Ledger()
    ledger.settle("before", used)
    assert allowance(budget, ledger, prompt=prompt, choices=choices, window=window) == left


@pytest.mark.parametrize(
    ("request_", "default", "asked"),
    [
        ({"max_tokens": 5}, None, 5),
        ({"max_completion_tokens": 4, "max_tokens": 5}, None, 4),
        ({"max_completion_tokens": None, "max_tokens": 5}, None, 5),
        ({}, None, None),
        ({}, 16, 16),
        ({"max_tokens": None}, 16, None),
    ],
)
def test_how_much_is_asked_for_is_read_as_the_engine_reads_it(request_: Any, default: int | None, asked: Any) -> None:
    assert asked_tokens(request_, LENGTHS, default) == asked


@pytest.mark.parametrize("value", [0, -1, "9", 9.0, True])
def test_what_an_engine_might_read_otherwise_is_refused(value: Any) -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        asked_tokens({"max_tokens": value}, LENGTHS, None)
    with pytest.raises(BadRequest, match="n must be"):
        choices_of({"n": value}, 1)


def test_a_request_is_cut_where_it_says_how_long_it_may_be() -> None:
    assert limit_tokens({}, LENGTHS, 3) == {"max_tokens": 3}
    assert limit_tokens({"max_completion_tokens": 9}, LENGTHS, 3) == {"max_completion_tokens": 3}
    assert limit_tokens({"max_completion_tokens": 9, "max_tokens": 8, "min_tokens": 5}, LENGTHS, 3) == {
        "max_completion_tokens": 3,
        "max_tokens": 3,
        "min_tokens": 3,
    }


@pytest.mark.parametrize(
    ("version", "stale"), [("6", True), ("7", False), ("10", False), (None, True), ("default", True)]
)
def test_versions_are_numbers_and_what_is_none_is_stale(version: str | None, stale: bool) -> None:
    assert Freshness(7).is_stale(version) is stale
    assert not Freshness().is_stale(version)
