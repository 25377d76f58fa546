"""NaN and infinity have no form in JSON: each place that takes a reward, a label or metadata refuses them by name."""

from __future__ import annotations

import enum
import itertools
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from miles_router.client import RouterClient, Sample, agentic, multi_turn, single_turn
from miles_router.trajectory import InvalidTrajectory, Malformed
from miles_router.trajectory.sample import READERS, WRITERS, Format
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage


class Verdict(enum.Enum):
    """A reward with a name; orjson writes its value."""

    BROKEN = math.nan


NUMBERS = (
    Verdict.BROKEN,
    *(math.nan, math.inf, -math.inf, np.float64("nan"), np.float32("inf"), np.float16("-inf"), np.longdouble("nan")),
    *(Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), np.array(math.nan), np.array([0.0, math.nan])),
)
#: A value with the number in it, and the place that a refusal names.
DEPTHS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda number: number, ""),
    (lambda number: {"score": number, "kind": "exact"}, ".score"),
    (lambda number: {"parts": [1.0, {"by": (2, number)}]}, ".parts[1].by[1]"),
)
LITERALS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf", "1e999": "inf", "-1e999": "-inf"}


@pytest.fixture
async def trial(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as made:
        yield made


@pytest.fixture
async def client(trial: SessionTrial) -> AsyncIterator[RouterClient]:
    async with RouterClient(trial.router.url) as made:
        yield made


async def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the value is refused before this is called")


async def test_collect_refuses_it_by_name(trial: SessionTrial, client: RouterClient) -> None:
    session = client.session(await trial.create())
    await trial.chat(session.id, [user("Hi")])
    for name, number, (make, place) in itertools.product(("reward", "label", "metadata"), NUMBERS, DEPTHS):
        given: Any = {name: make(number)}
        with pytest.raises(ValueError, match="^" + re.escape(name + place)):
            await session.collect(**given)
    (sample,) = await session.collect(reward=np.float32(0.5), metadata={"none": None})
    assert (sample.reward, sample.metadata["none"]) == (0.5, None)


async def test_nothing_is_started_for_values_that_are_refused(trial: SessionTrial, client: RouterClient) -> None:
    async def agent(base_url: str) -> float:
        await trial.chat(base_url.split("/")[-2], [user("Hi")])
        return math.nan

    async def coroutine(outcome: float) -> float:
        return outcome

    judges: Any = (coroutine, lambda outcome: outcome)
    for judge in judges:
        with pytest.raises(ValueError, match=r"^reward is nan"):
            await agentic(client, agent, reward=judge)
    calls: Any = (
        *((agentic, (client, never), name) for name in ("label", "metadata")),
        *((single_turn, (client, "Once"), name) for name in ("reward", "label", "metadata")),
        *((multi_turn, (client, "Once", never), name) for name in ("reward", "label", "metadata")),
        *((client.create_session, (), name) for name in ("metadata", "contract")),
    )
    for call, arguments, name in calls:
        with pytest.raises(ValueError, match=rf"^{name}\.a\[0\] is NaN"):
            await call(*arguments, **{name: {"a": [Decimal("NaN")]}})
    assert await client.sessions() == []


#: Bodies with a literal, and the place that a refusal names.
PLACES = [
    ("/sessions", '{"session_id": "new", "metadata": {"a": [1, %s]}}', "metadata.a[1]"),
    ("/sessions", '{"session_id": "new", "contract": {"budget": {"deadline_s": %s}}}', "contract.budget.deadline_s"),
    ("/sessions/held/samples", '{"reward": %s}', "reward"),
    ("/sessions/held/samples", '{"format": "miles", "metadata": {"reward": {"é": %s}}}', "metadata.reward.é"),
    ("/session/finalize", '{"session_id": "held", "label": {"NaN": "NaN", "b": %s}}', "label.b"),
    ("/sessions/held/v1/chat/completions", '{"messages": [], "temperature": %s}', "temperature"),
]


async def test_the_router_refuses_the_literal_by_name(trial: SessionTrial) -> None:
    await trial.create("held")
    await trial.chat("held", [user("Hi")])
    for (path, body, place), (literal, number) in itertools.product(PLACES, LITERALS.items()):
        answer = await trial.ask("POST", path, (body % literal).encode())
        assert answer.status == 400, (path, literal)
        assert f"{place} is {number}" in json.dumps(answer.json(), ensure_ascii=False)
    large = b'{"metadata": {"a": "%b", "b": NaN}}' % (b"x" * (1 << 20))
    answer = await trial.ask("POST", "/sessions", large)
    assert (answer.status, b"number at character" in answer.body) == (400, True)
    assert (await trial.ask("GET", "/sessions/new")).status == 404
    (sample,) = await trial.samples("held")
    assert sample["metadata"]["reason"] is None
    assert (await trial.turn("held", [user("Hi"), user("Again")])).status == 200  # it is not finalized


# Samples and their files


GIVEN: dict[str, Any] = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "response_length": 1}


@pytest.mark.parametrize("name", ["reward", "label", "metadata"])
def test_a_sample_is_not_made_of_them(name: str) -> None:
    for number in NUMBERS:
        given: Any = {name: {"a": number}}
        with pytest.raises(InvalidTrajectory, match=rf"^finite: {name}\.a"):
            Sample(**GIVEN, status="completed", **given)


def test_a_file_with_them_is_refused_by_name() -> None:
    forms: tuple[Format, ...] = ("json", "safetensors")
    for form, literal in itertools.product(forms, ("NaN", "-Infinity")):
        data = WRITERS[form]([Sample(**GIVEN, status="completed", reward={"mark": 123.5})], {})
        value = b"123.5"
        spelled = data.replace(value, literal.encode().rjust(len(value)) if len(literal) < len(value) else b"1e999")
        with pytest.raises(Malformed, match=r"reward\.mark is (nan|inf)"):
            READERS[form](spelled)
