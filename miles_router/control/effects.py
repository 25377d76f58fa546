"""The effect of each control action: how the workers are asked, and what changes in the fleet by their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from miles_router.control import aborts, standstill, weights
from miles_router.control.call import Call, ask_all
from miles_router.control.fan_out import Outcome
from miles_router.engines.actions import (
    Abort,
    AbortAll,
    Action,
    ChangeAdapter,
    Continue,
    EndGroup,
    Flush,
    NameVersion,
    Other,
    Pause,
    Sleep,
    Update,
    Wake,
)


@dataclass(frozen=True)
class Effect:
    """The way an action is carried out.

    Attributes:
        run: sends the requests to the workers, and updates gate and pool by their answers.
        blocks_joins: no worker can join the fleet while the action runs.
        concurrent: runs in parallel with other control requests; all others run one at a time.
    """

    run: Callable[[Call], Awaitable[list[Outcome]]] = ask_all
    blocks_joins: bool = False
    concurrent: bool = False


def effect_of(action: Action) -> Effect:
    match action:
        case Pause():
            return Effect(partial(standstill.pause, action=action), blocks_joins=True)
        case Continue():
            return Effect(standstill.continue_generation, blocks_joins=True)
        case Sleep():
            return Effect(partial(standstill.sleep, action=action), blocks_joins=True)
        case Wake():
            return Effect(partial(standstill.wake, action=action), blocks_joins=True)
        case Abort(name):
            return Effect(partial(aborts.abort, name=name), concurrent=True)
        case AbortAll():
            return Effect(partial(aborts.abort, name=None), concurrent=True)
        case EndGroup(group):
            return Effect(partial(aborts.end_group, group=group), concurrent=True)
        case Flush():
            return Effect(weights.flush)
        case NameVersion(version):
            return Effect(partial(weights.name_version, version=version))
        case Update():
            return Effect(partial(weights.update, action=action))
        case ChangeAdapter():
            return Effect(partial(weights.change_adapter, action=action))
        case Other():
            return Effect()
