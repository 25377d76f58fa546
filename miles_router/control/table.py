"""The control requests: every path that goes to all workers, with its checks and effects. No path stands elsewhere."""

from __future__ import annotations

from miles_router.control import aborts, standstill, weights
from miles_router.control.fan_out import SLOW
from miles_router.control.row import Row

EITHER = ("GET", "POST")

CONTINUE = Row("/continue_generation", needs_body=True, effect=standstill.go_on, holds_membership=True)
PAUSE = Row(
    "/pause_generation",
    needs_body=True,
    check=standstill.check_pause,
    effect=standstill.pause,
    holds_membership=True,
    undo=CONTINUE.path,
)
SLEEP = Row(
    "/release_memory_occupation",
    methods=EITHER,
    timeout=SLOW,
    needs_body=True,
    effect=standstill.sleep,
    holds_membership=True,
)
WAKE = Row(
    "/resume_memory_occupation",
    methods=EITHER,
    timeout=SLOW,
    needs_body=True,
    effect=standstill.wake,
    holds_membership=True,
)
ABORT = Row("/abort_request", check=aborts.check, effect=aborts.abort, beside_others=True)
UPDATE_VERSION = Row(
    "/update_weight_version", check=weights.check_version, effect=weights.update, naming="/update_weight_version"
)
FLUSH = Row("/flush_cache", methods=EITHER, effect=weights.flush)
UPDATE_FROM_DISK = Row(
    "/update_weights_from_disk",
    timeout=SLOW,
    check=weights.check_model_path,
    effect=weights.update_and_flush,
    naming=UPDATE_VERSION.path,
    flushing=FLUSH.path,
)


def own_row(path: str) -> Row:
    """The row of a path of the user's own. SGLang's other updates come in many requests, with tensors of the trainer's
    choice: such a path may be one."""
    if path.startswith("/update_weights_"):
        return Row(
            path,
            timeout=SLOW,
            effect=weights.update_and_flush,
            naming=UPDATE_VERSION.path,
            flushing=FLUSH.path,
        )
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
    Row("/begin_weight_update", timeout=SLOW),
    Row("/end_weight_update", timeout=SLOW, effect=weights.update, naming=UPDATE_VERSION.path),
    Row("/load_lora_adapter", timeout=SLOW),
    Row("/unload_lora_adapter", timeout=SLOW),
    Row("/start_profile", methods=EITHER),
    Row("/stop_profile", methods=EITHER, timeout=SLOW),
    Row("/slow_down", methods=EITHER),
    Row("/configure_logging", methods=EITHER),
    Row("/freeze_gc", methods=EITHER),
    Row("/start_expert_distribution_record", methods=EITHER),
    Row("/stop_expert_distribution_record", methods=EITHER),
    Row("/dump_expert_distribution_record", methods=EITHER, timeout=SLOW),
)
