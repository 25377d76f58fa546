"""What the tests of one chapter after the other need: answers written down, and what must hold after each fault."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import numpy as np

from tests.support.experts_trial import ASKED, ExpertsTrial, event_of, generated, in_one, told, truth
from tests.support.http import CutReply, RawReply
from tests.support.scripted_chat import DONE, PROMPT, chat_events, chat_reply, meta_of, streamed
from tests.support.scripted_worker import Behaviour, ScriptedWorker, script
from tests.support.session_trial import user

FIELD = b"routed_experts"
FLAG = "--enable-return-routed-experts"
HI = [user("Hi")]
IDS = [7, 8]
TOKENS = [*PROMPT, *IDS]
GOOD = told(IDS)
RUNNING = {**generated([7], None), "meta_info": {**generated([7], None)["meta_info"], "finish_reason": None}}
ABORT = {"type": "abort", "message": "Abort in waiting queue"}


def native(experts: str | None, *, stream: bool, **meta: Any) -> Behaviour:
    """An answer of `/generate` with what is told of its experts."""
    answer = generated(IDS, experts, **meta)
    if not stream:
        return script(in_one(answer))
    return streamed(event_of(RUNNING), event_of(answer), DONE)


def chat(experts: str | None, *, stream: bool) -> Behaviour:
    """The same of a chat request."""
    if stream:
        return streamed(*chat_events(IDS, ["o", "k"], routed_experts=experts))
    extra = {} if experts is None else {"routed_experts": experts}
    return script(chat_reply(IDS, meta_info=meta_of(IDS, **extra)))


async def nothing_is_held(trial: ExpertsTrial) -> None:
    assert (trial.held["bytes"], trial.held["generations"]) == (0, 0)
    assert await trial.metric("bytes") == 0


async def the_next_works(trial: ExpertsTrial, worker: ScriptedWorker) -> None:
    """On the same worker, and its rows are held."""
    worker.next(native(GOOD, stream=False, id="next"))
    assert (await trial.post("/generate", ASKED)).status == 200
    assert np.array_equal(await trial.rows(rid="next"), truth(TOKENS))


async def the_next_turn_works(trial: ExpertsTrial, worker: ScriptedWorker) -> None:
    for stream in (False, True):
        session = await trial.create()
        worker.next(chat(GOOD, stream=stream))
        assert (await trial.turn(session, HI, stream=stream)).status == 200
        (sample,) = await trial.exact(session)
        assert sample["tokens"] == TOKENS


async def outcome(asking: Awaitable[RawReply]) -> tuple[RawReply, bool]:
    try:
        return await asking, False
    except CutReply as cut:
        return cut.reply, True
