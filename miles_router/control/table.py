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
UPDATE_FROM_DISK = Row("/update_weights_from_disk", timeout=SLOW, check=weights.check_model_path, effect=weights.update)
UPDATE_VERSION = Row("/update_weight_version", check=weights.check_version, effect=weights.update)

TABLE = (
    PAUSE,
    CONTINUE,
    ABORT,
    Row("/flush_cache", methods=EITHER, effect=standstill.flush),
    SLEEP,
    WAKE,
    UPDATE_FROM_DISK,
    UPDATE_VERSION,
    Row("/begin_weight_update", timeout=SLOW),
    Row("/end_weight_update", timeout=SLOW, effect=weights.update),
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
