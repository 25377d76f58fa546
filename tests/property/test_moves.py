"""Generations that move after any token give what one go would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.moving import BUDGET, moving, of_one_go
from tests.support.stage import Stage, staged
from tests.support.tiers import examples
from tests.support.waiting import until

pytestmark = pytest.mark.alone("generations do not move to idler workers")

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a case is short as it is


@dataclass(frozen=True)
class MoveCase:
    """A request, after how many tokens it moves, and what may end it."""

    held: int
    there: int  # and after how many it may move back
    ends: bool
    stop: int | None  # the place in the uncut answer that a stop string is taken from
    fields: dict[str, Any]
    params: dict[str, Any]


cases = st.builds(
    MoveCase,
    held=st.integers(0, BUDGET - 1),
    there=st.integers(1, BUDGET),
    ends=st.booleans(),
    stop=st.none() | st.integers(0, BUDGET - 2),
    fields=st.fixed_dictionaries(
        {"return_logprob": st.booleans(), "return_routed_experts": st.booleans()},
        optional={"text": st.just("Tell me of 世界"), "top_logprobs_num": st.just(2), "logprob_start_len": st.just(0)},
    ),
    params=st.fixed_dictionaries(
        {"ignore_eos": st.booleans()},
        optional={"skip_special_tokens": st.just(False), "no_stop_trim": st.just(True), "min_new_tokens": st.just(3)},
    ),
)


async def play(stage: Stage, case: MoveCase) -> None:
    kind = {"stop_probability": 0.1 if case.ends else 0.0}
    async with moving(stage, kind=kind, held_there=case.there) as scene:
        fields, params = dict(case.fields), dict(case.params)
        if case.stop is not None:
            uncut = await scene.uncut("rollout", **fields, params=params)
            decode = scene.reference.tokenizer.decode
            left, right = decode(uncut["output_ids"][case.stop :][:1]), decode(uncut["output_ids"][case.stop + 1 :][:1])
            if left and right and "\N{REPLACEMENT CHARACTER}" not in left + right:
                params["stop"] = [left[-2:] + right[:2]]
        scene.holds.tokens = case.held
        rids = [f"rollout-number-{number}" for number in range(3)]
        for rid in rids:
            scene.ask(rid, **fields, params=params)
        await until(lambda: scene.holds.holds(3) or scene.ended == 3, "all are held, or all have ended")
        if not scene.ended:
            await scene.open()
            await until(lambda: scene.numbers["moved_generations"] or scene.ended, "one has moved, or was at its end")
        for rid, answer in (await scene.end()).items():
            assert of_one_go(answer) == of_one_go(await scene.uncut(rid, **fields, params=params))


@settings(max_examples=examples(120), phases=PHASES, suppress_health_check=list(HealthCheck), deadline=None)
@given(cases)
async def test_what_moves_after_any_token_is_what_one_go_would_give(case: MoveCase) -> None:
    async with staged() as stage:
        await play(stage, case)
