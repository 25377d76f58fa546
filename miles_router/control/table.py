"""The control requests: every path that goes to all workers, with its checks and effects. Their paths stand in
`engines/paths.py`."""

from __future__ import annotations

from miles_router.control import aborts, standstill, weights
from miles_router.control.fan_out import SLOW
from miles_router.control.row import Row
from miles_router.engines import paths

EITHER = ("GET", "POST")

CONTINUE = Row(paths.CONTINUE, needs_body=True, effect=standstill.go_on, holds_membership=True)
PAUSE = Row(
    paths.PAUSE,
    needs_body=True,
    check=standstill.check_pause,
    effect=standstill.pause,
    holds_membership=True,
)
SLEEP = Row(
    paths.SLEEP,
    methods=EITHER,
    timeout=SLOW,
    needs_body=True,
    effect=standstill.sleep,
    holds_membership=True,
)
WAKE = Row(
    paths.WAKE,
    methods=EITHER,
    timeout=SLOW,
    needs_body=True,
    effect=standstill.wake,
    holds_membership=True,
)
ABORT = Row(paths.ABORT, check=aborts.check, effect=aborts.abort, beside_others=True)
UPDATE_VERSION = Row(paths.UPDATE_VERSION, check=weights.check_version, effect=weights.update, only_names=True)
FLUSH = Row(paths.FLUSH, methods=EITHER, effect=weights.flush)
UPDATE_FROM_DISK = Row(
    paths.UPDATE_FROM_DISK,
    timeout=SLOW,
    check=weights.check_model_path,
    effect=weights.update_and_flush,
)


def own_row(path: str) -> Row:
    """The row of a path of the user's own. SGLang's other updates come in many requests, with tensors of the trainer's
    choice: such a path may be one."""
    if path.startswith(paths.OWN_UPDATES):
        return Row(path, timeout=SLOW, effect=weights.update_and_flush)
    return Row(path)


TABLE = (
    PAUSE,
    CONTINUE,
    ABORT,
    FLUSH,
    SLEEP,
    WAKE,
    UPDATE_FROM_DISK,
    UPDATE_VERSION,
    Row(paths.BEGIN_UPDATE, timeout=SLOW),
    Row(paths.END_UPDATE, timeout=SLOW, effect=weights.update),
    Row(paths.LOAD_ADAPTER, timeout=SLOW),
    Row(paths.UNLOAD_ADAPTER, timeout=SLOW),
    Row(paths.START_PROFILE, methods=EITHER),
    Row(paths.STOP_PROFILE, methods=EITHER, timeout=SLOW),
    Row(paths.SLOW_DOWN, methods=EITHER),
    Row(paths.CONFIGURE_LOGGING, methods=EITHER),
    Row(paths.FREEZE_GC, methods=EITHER),
    Row(paths.START_EXPERTS, methods=EITHER),
    Row(paths.STOP_EXPERTS, methods=EITHER),
    Row(paths.DUMP_EXPERTS, methods=EITHER, timeout=SLOW),
)
