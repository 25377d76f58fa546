"""SGLang's control requests: parsers into actions, and the requests for actions. No I/O.

Source: SGLang 0.5.23, `entrypoints/http_server.py`, `managers/io_struct.py`.
"""

from __future__ import annotations

from functools import partial

import orjson

from miles_router.engines.actions import (
    MEMORY,
    PAUSE_MODES,
    Abort,
    AbortAll,
    Action,
    ChangeAdapter,
    Continue,
    EndGroup,
    Flush,
    NameVersion,
    Order,
    Pause,
    Sleep,
    Update,
    Wake,
)
from miles_router.engines.control import SLOW, Arguments, BadArguments, ControlRequest, group_in, other
from miles_router.engines.engine import CannotServe
from miles_router.engines.sglang.adapters import NAME as ADAPTER_NAME
from miles_router.engines.sglang.adapters import PATH as ADAPTER_PATH

PAUSE, CONTINUE, ABORT, FLUSH = "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"
SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"
UPDATE_VERSION, UPDATE_FROM_DISK = "/update_weight_version", "/update_weights_from_disk"
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"
#: Paths of weight updates begin with the first; paths that load or unload an adapter contain the second. Some updates
#: come as many requests with tensors, so users define their own paths.
UPDATES, ADAPTERS = "/update_weights_", "lora_adapter"

MODE, NAME, ALL, PARTS = "mode", "rid", "abort_all", "tags"
NEW_VERSION, VERSION, MODEL_PATH = "new_version", "weight_version", "model_path"
ABORTS, FLUSHES = "abort_all_requests", "flush_cache"


def order(action: Action) -> Order:
    """Return the request for an action. SGLang refuses most of them without a body.

    Raises:
        CannotServe: SGLang has no such request.
    """
    path, fields = _spelled(action)
    return Order("POST", path.encode(), orjson.dumps(fields))


def _spelled(action: Action) -> tuple[str, dict[str, object]]:
    match action:
        case Pause(mode):
            return PAUSE, {MODE: mode}
        case Continue():
            return CONTINUE, {}
        case Abort(name):
            return ABORT, {NAME: name}
        case AbortAll():
            return ABORT, {ALL: True}
        case Flush():
            return FLUSH, {}
        case Sleep(parts):
            return SLEEP, {PARTS: sorted(parts)}
        case Wake(parts):
            return WAKE, {PARTS: sorted(parts)} if parts else {}
        case NameVersion(version, aborts):
            return UPDATE_VERSION, {NEW_VERSION: version, ABORTS: aborts}
        case ChangeAdapter(str() as name, str() as path, True):
            return LOAD_ADAPTER, {ADAPTER_NAME: name, ADAPTER_PATH: path}
        case ChangeAdapter(str() as name, None, False):
            return UNLOAD_ADAPTER, {ADAPTER_NAME: name}
        case _:
            raise CannotServe("this control request has no equal there")


def _read_pause(arguments: Arguments) -> Action:
    mode = arguments.fields.get(MODE, "abort")
    if mode not in PAUSE_MODES:
        raise BadArguments(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    return Pause(mode)


def _read_abort(arguments: Arguments) -> Abort | AbortAll | EndGroup:
    """Parse an abort. SGLang silently ignores one without arguments, so that is refused here."""
    group = group_in(arguments)
    if group is not None:
        return group
    every, name = arguments.fields.get(ALL) or False, arguments.fields.get(NAME)
    if not isinstance(every, bool):  # SGLang reads "false" as false
        raise BadArguments("abort_all must be true or false")
    if every:
        return AbortAll()
    if not isinstance(name, str) or not name:
        raise BadArguments("rid (a string), group or abort_all is required")
    return Abort(name)


def _read_sleep(arguments: Arguments) -> Action:
    return Sleep(_parts(arguments) or MEMORY)


def _read_wake(arguments: Arguments) -> Action:
    return Wake(_parts(arguments))


def _parts(arguments: Arguments) -> frozenset[str]:
    tags = arguments.fields.get(PARTS)
    return frozenset(map(str, tags)) if isinstance(tags, list) else frozenset()


def _read_version(arguments: Arguments) -> Action:
    """Parse a new weight version. SGLang accepts only strings, and aborts all generations by default."""
    version = _text(arguments, NEW_VERSION)
    return NameVersion(version, aborts=arguments.fields.get(ABORTS, True) is not False)


def _read_update(arguments: Arguments, *, flushes: bool = True) -> Action:
    """Parse a weight update. SGLang flushes its caches afterwards by default."""
    version = arguments.fields.get(NEW_VERSION, arguments.fields.get(VERSION))
    flushed = flushes and arguments.fields.get(FLUSHES, True) is True
    return Update(None if version is None else str(version), flushes=flushed)


def _read_update_from_disk(arguments: Arguments) -> Action:
    _text(arguments, MODEL_PATH)
    return _read_update(arguments)


def _text(arguments: Arguments, name: str) -> str:
    value = arguments.fields.get(name)
    if not isinstance(value, str):
        raise BadArguments(f"{name} must be a string")
    return value


def _read_adapter(arguments: Arguments, *, loads: bool | None = None) -> Action:
    name, path = arguments.fields.get(ADAPTER_NAME), arguments.fields.get(ADAPTER_PATH) if loads else None
    return ChangeAdapter(name if isinstance(name, str) else None, path if isinstance(path, str) else None, loads)


def own_request(path: str) -> ControlRequest | None:
    """Return the reader for a user-defined control path; None if the path is not recognized."""
    if path.startswith(UPDATES):
        return ControlRequest(path, _read_update, timeout=SLOW)
    return ControlRequest(path, _read_adapter) if ADAPTERS in path else None


EITHER = ("GET", "POST")
REQUESTS = (
    ControlRequest(PAUSE, _read_pause, needs_body=True),
    ControlRequest(CONTINUE, lambda _: Continue(), needs_body=True),
    ControlRequest(ABORT, _read_abort, may_come_twice=True),
    ControlRequest(FLUSH, lambda _: Flush(), methods=EITHER),
    ControlRequest(SLEEP, _read_sleep, methods=EITHER, timeout=SLOW, needs_body=True),
    ControlRequest(WAKE, _read_wake, methods=EITHER, timeout=SLOW, needs_body=True),
    ControlRequest(UPDATE_FROM_DISK, _read_update_from_disk, timeout=SLOW),
    ControlRequest(UPDATE_VERSION, _read_version),
    other(BEGIN_UPDATE, timeout=SLOW),
    ControlRequest(END_UPDATE, partial(_read_update, flushes=False), timeout=SLOW),
    ControlRequest(LOAD_ADAPTER, partial(_read_adapter, loads=True), timeout=SLOW),
    ControlRequest(UNLOAD_ADAPTER, partial(_read_adapter, loads=False), timeout=SLOW),
    other("/start_profile", methods=EITHER),
    other("/stop_profile", methods=EITHER, timeout=SLOW),
    other("/slow_down", methods=EITHER),
    other("/configure_logging", methods=EITHER),
    other("/freeze_gc", methods=EITHER),
    other("/start_expert_distribution_record", methods=EITHER),
    other("/stop_expert_distribution_record", methods=EITHER),
    other("/dump_expert_distribution_record", methods=EITHER, timeout=SLOW),
)
