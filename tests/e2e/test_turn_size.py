"""What one must hold in mind to follow a request: how many of our modules and calls it passes. The bounds are what they
are today; a change that makes a turn simpler lowers them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from tests.support.call_counts import CallCount
from tests.support.cuts import cut, cuttable
from tests.support.generations import GENERATE
from tests.support.running_router import QUIET
from tests.support.session_apis import COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.support.session_trial import CHAT, JSON
from tests.support.stage import Stage
from tests.support.under_way import under_way

pytestmark = pytest.mark.alone("calls are counted in the test's own process")
TOKENS, TURNS = 12, 3


class Size(NamedTuple):
    """At most so many modules, calls, and JSON texts that are parsed and written."""

    modules: int
    calls: int
    parsed: int
    written: int


#: By path, whether the answer is streamed, and what the router is set to: `plain`; `durable`, with `--partial-rollout
#: resume` and a state directory; `cut`, the same where a pause cuts the turn once, which writes that it paused.
BOUNDS: dict[tuple[str, bool, str], Size] = {
    (GENERATE, False, "plain"): Size(27, 176, 0, 0),
    (CHAT, False, "plain"): Size(64, 553, 2, 6),
    (CHAT, False, "durable"): Size(72, 622, 2, 9),
    (CHAT, False, "cut"): Size(107, 1993, 12, 19),
    (CHAT, True, "plain"): Size(64, 1214, 17, 18),
    (CHAT, True, "durable"): Size(76, 1453, 17, 21),
    (CHAT, True, "cut"): Size(114, 3133, 27, 30),
    (COMPLETIONS, False, "plain"): Size(61, 486, 2, 4),
    (COMPLETIONS, False, "cut"): Size(88, 1305, 5, 10),
    (COMPLETIONS, True, "plain"): Size(61, 1119, 14, 15),
    (COMPLETIONS, True, "cut"): Size(86, 1619, 10, 14),
    (MESSAGES, False, "plain"): Size(70, 586, 2, 6),
    (MESSAGES, False, "cut"): Size(113, 2023, 11, 18),
    (MESSAGES, True, "plain"): Size(72, 1496, 17, 21),
    (MESSAGES, True, "cut"): Size(121, 3363, 27, 33),
    (RESPONSES, False, "plain"): Size(73, 634, 2, 6),
    (RESPONSES, False, "cut"): Size(115, 2082, 11, 19),
    (RESPONSES, True, "plain"): Size(75, 1454, 17, 24),
    (RESPONSES, True, "cut"): Size(123, 3383, 27, 37),
}


@pytest.mark.parametrize(("path", "stream", "kind"), [each for each in BOUNDS if each[0] != GENERATE])
async def test_a_turn_passes_no_more_than_it_did(
    stage: Stage, tmp_path: Path, path: str, stream: bool, kind: str
) -> None:
    settings: dict[str, Any] = {"state_dir": tmp_path} if kind != "plain" else {"partial_rollout": "return"}
    settings["health_check_interval"] = QUIET  # its answers are read between the turn's own calls
    async with cuttable(stage, settings=settings) as (trial, brake):
        api, counts = Api(path), []
        for number in range(TURNS):
            session = await trial.create()
            asked = api.ask(trial, session, TOKENS, stream=stream, ignore_eos=True)
            with CallCount() as count:
                if kind == "cut":
                    async with under_way(asked) as turn:
                        await cut(trial, brake, 3, str(number + 2))
                        answer = await turn
                else:
                    answer = await asked
            assert answer.status == 200
            counts.append(count)
    _check((path, stream, kind), counts)


async def test_a_generation_without_layers_passes_no_more_than_it_did(stage: Stage) -> None:
    asked = orjson.dumps({"text": "Hi", "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}})
    async with SimulatedWorker() as worker:
        router = await stage.router(worker.url)
        counts = []
        for _ in range(TURNS):
            with CallCount() as count:
                answer = await router.ask("POST", GENERATE, JSON, asked)
            assert answer.status == 200
            counts.append(count)
    _check((GENERATE, False, "plain"), counts)


def _check(case: tuple[str, bool, str], counts: Sequence[CallCount]) -> None:
    """Check the least of several turns: what is loaded once, timers and bytes that come in pieces only add to it. On a
    busy machine timers fall into each of them, and what other tests left behind: a few more are no change."""
    sizes = [(len(each.modules), each.calls, each.parsed, each.written) for each in counts]
    found, bound = Size(*map(min, zip(*sizes, strict=True))), BOUNDS[case]
    most = bound._replace(modules=bound.modules + 4, calls=bound.calls + bound.calls // 12)
    assert all(is_now <= limit for is_now, limit in zip(found, most, strict=True)), f"{found}, at most {most}"
