"""Reads and writes vLLM's control requests. Pure.

Source: vLLM 0.32.0, `entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev/`. Most requests have a query and
no body.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from miles_router.engines.actions import (
    MEMORY,
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
from miles_router.engines.control import (
    BETWEEN,
    GROUP,
    SLOW,
    Arguments,
    BadArguments,
    ControlRequest,
    group_in,
    other,
)
from miles_router.engines.engine import CannotServe
from miles_router.engines.vllm.facts import Flags

PAUSE, CONTINUE, FLUSH = "/pause", "/resume", "/reset_prefix_cache"
#: `ABORT` ends the named requests. `ABORT_ALL` ends every request. The router never sends an empty list to `ABORT`.
ABORT, ABORT_ALL = "/inference/v1/abort_requests", "/abort_requests"
SLEEP, WAKE, RELEASE_CACHE = "/sleep", "/wake_up", "/release_kv_cache_memory"
UPDATE_VERSION, CALL_WORKERS = "/update_weight_version", "/collective_rpc"
BEGIN_UPDATE, UPDATE, END_UPDATE = "/start_weight_update", "/update_weights", "/finish_weight_update"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

MODE, CLEARS, NAMES, LEVEL, PARTS = "mode", "clear_cache", "request_ids", "level", "tags"
#: vLLM's prefix for a request id, by path: `/inference/v1/generate`, chat, completions, responses.
PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-", "resp_")
#: The id of a generation inside the engine, in the same order. An abort finds no other id. Completions and responses
#: number the generations of one request.
ENGINE_NAMES = ("generate-tokens-{}", "chatcmpl-{}", "cmpl-{}-0", "{}_0")
#: vLLM's parameters for each pause mode of the router. With `clear_cache` the prefix cache and the KV of running
#: generations are dropped and recomputed. (vLLM's documentation says that mode `keep` ignores it; in fact it does not.)
PAUSES: Mapping[str, Mapping[str, str]] = {
    "abort": {MODE: "abort", CLEARS: "false"},
    "retract": {MODE: "keep", CLEARS: "true"},
    "in_place": {MODE: "keep", CLEARS: "false"},
}
WAITS = "wait_for_inflight_requests"
#: Values of a flag in a query, in any case (pydantic).
_TRUE, _FALSE = frozenset({"true", "t", "1", "yes", "y", "on"}), frozenset({"false", "f", "0", "no", "n", "off"})


def order(action: Action, flags: Flags) -> Order:
    """Return vLLM's request for an action.

    Raises:
        CannotServe: vLLM has no such request, or a flag is missing.
    """
    if not flags.dev_mode:
        raise CannotServe("it was started without VLLM_SERVER_DEV_MODE=1")
    match action:
        case Pause(mode):
            return _order(PAUSE, PAUSES[mode])
        case Continue():
            return _order(CONTINUE)
        case Abort(name):
            if flags.api_servers > 1:
                raise CannotServe("only one of its API servers knows the request: start it with --api-server-count 1")
            named = name.startswith(PREFIXES)
            own = (name, f"{name}-0", f"{name}_0") if named else tuple(each.format(name) for each in ENGINE_NAMES)
            return _order(ABORT, fields={NAMES: own})
        case AbortAll():
            return _order(ABORT_ALL, fields={})
        case Flush():
            return _order(FLUSH)
        case Sleep(parts):
            return _sleep(parts, flags)
        case Wake(parts):
            return Order("POST", "&".join([f"{WAKE}?", *(f"{PARTS}={each}" for each in sorted(parts))]).encode(), b"")
        case NameVersion(version):
            return _order(UPDATE_VERSION, fields={"new_version": version})
        case ChangeAdapter(str() as name, path, loads):
            return _adapter(name, path, loads=loads)
        case Update():
            raise CannotServe(f"to update its weights use {BEGIN_UPDATE}, {UPDATE} and {END_UPDATE}, or {CALL_WORKERS}")
        case _:
            raise CannotServe("it has no control request for this")


def refused(answer: bytes) -> bool:
    """Return True if an answer with status 200 reports failure (`"success": false`)."""
    try:
        parsed = orjson.loads(answer) if b'"success"' in answer else None
    except orjson.JSONDecodeError:
        return False
    return isinstance(parsed, dict) and parsed.get("success") is False


def _order(path: str, query: Mapping[str, str] | None = None, *, fields: object = None) -> Order:
    asked = "&".join(f"{name}={value}" for name, value in (query or {}).items())
    body = b"" if fields is None else orjson.dumps(fields)
    return Order("POST", f"{path}?{asked}".encode() if asked else path.encode(), body)


def _sleep(parts: object, flags: Flags) -> Order:
    if parts == {"kv_cache"}:
        return _order(RELEASE_CACHE)
    if not flags.sleep_mode:
        raise CannotServe("it was started without --enable-sleep-mode")
    if parts != MEMORY:
        raise CannotServe("it can release all of its memory, or only its kv_cache")
    return _order(SLEEP, {LEVEL: "1"})


def _adapter(name: str, path: str | None, *, loads: bool | None) -> Order:
    if loads is False:
        return _order(UNLOAD_ADAPTER, fields={"lora_name": name})
    if not loads or path is None:
        raise CannotServe("it can load an adapter only from a lora_path")
    return _order(LOAD_ADAPTER, fields={"lora_name": name, "lora_path": path})


def _read_pause(arguments: Arguments) -> Action:
    mode = arguments.query.get(MODE, "abort")
    clears, waits = _flag(arguments, CLEARS, usual="true"), _flag(arguments, WAITS, usual="false")
    if mode == "abort" and not waits:
        return Pause("abort")
    if mode != "keep" or waits:  # vLLM reads `WAITS` as mode `wait`
        raise BadArguments(f"{MODE} must be abort or keep: the router holds new requests, so nothing is waited for")
    return Pause("retract" if clears else "in_place")


def _flag(arguments: Arguments, name: str, *, usual: str) -> bool:
    value = arguments.query.get(name, usual).lower()
    if value not in _TRUE | _FALSE:
        raise BadArguments(f"{name} must be true or false, and given once")
    return value in _TRUE


def _read_abort(arguments: Arguments) -> Abort | EndGroup:
    if (group := group_in(arguments)) is not None:
        return group
    names = arguments.fields.get(NAMES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BadArguments(f"{NAMES} must be a list with one id: send an abort for each id")
    name: str = names[0]
    return Abort(next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name))


def _read_abort_of_all(arguments: Arguments) -> Abort | AbortAll | EndGroup:
    """Read an abort of all requests. Refuse an empty list of ids, with which vLLM would abort everything."""
    return _read_abort(arguments) if arguments.fields.keys() & {NAMES, GROUP} else AbortAll()


def _read_sleep(arguments: Arguments) -> Action:
    if arguments.query.get(LEVEL, "1") not in ("1", "2"):
        raise BadArguments(f"{LEVEL} must be 1 or 2; to pause without a release of memory use {PAUSE}?{MODE}=keep")
    return Sleep(MEMORY)


def _read_wake(arguments: Arguments) -> Action:
    given = arguments.query.get(PARTS)
    parts = frozenset() if given is None else frozenset(given.split(BETWEEN))
    if parts - MEMORY:
        raise BadArguments(f"{PARTS} must be {' or '.join(sorted(MEMORY))}, got {', '.join(sorted(parts))}")
    return Wake(parts)


def _read_version(arguments: Arguments) -> Action:
    version = arguments.fields.get("new_version")
    if not isinstance(version, str):
        raise BadArguments("new_version must be a string")
    return NameVersion(version)


def _read_end_of_update(arguments: Arguments) -> Action:
    version = arguments.fields.get("weight_version")
    return Update(None if version is None else str(version))


def _read_call(arguments: Arguments) -> Action:
    """Read a call of an engine method. A method with "weight" in its name, such as `reload_weights`, is an update."""
    method = arguments.fields.get("method")
    return Update(None) if isinstance(method, str) and "weight" in method else other(CALL_WORKERS).read(arguments)


def _read_adapter(arguments: Arguments, *, loads: bool) -> Action:
    name, path = (arguments.fields.get(each) for each in ("lora_name", "lora_path"))
    if not isinstance(name, str):
        return ChangeAdapter(None)
    return ChangeAdapter(name, path if loads and isinstance(path, str) else None, loads)


REQUESTS = (
    ControlRequest(PAUSE, _read_pause),
    ControlRequest(CONTINUE, lambda _: Continue()),
    ControlRequest(ABORT, _read_abort, may_come_twice=True),
    ControlRequest(ABORT_ALL, _read_abort_of_all, may_come_twice=True),
    ControlRequest(FLUSH, lambda _: Flush()),
    ControlRequest(SLEEP, _read_sleep, timeout=SLOW),
    ControlRequest(RELEASE_CACHE, lambda _: Sleep(frozenset({"kv_cache"})), timeout=SLOW),
    ControlRequest(WAKE, _read_wake, timeout=SLOW),
    ControlRequest(UPDATE_VERSION, _read_version),
    ControlRequest(CALL_WORKERS, _read_call, timeout=SLOW),
    other("/init_weight_transfer_engine", timeout=SLOW),
    other("/shutdown_weight_transfer_engine", timeout=SLOW),
    other(BEGIN_UPDATE, timeout=SLOW),
    other("/start_draft_weight_update", timeout=SLOW),
    other(UPDATE, timeout=SLOW),
    ControlRequest(END_UPDATE, _read_end_of_update, timeout=SLOW),
    ControlRequest(LOAD_ADAPTER, lambda arguments: _read_adapter(arguments, loads=True), timeout=SLOW),
    ControlRequest(UNLOAD_ADAPTER, lambda arguments: _read_adapter(arguments, loads=False), timeout=SLOW),
    other("/reset_mm_cache"),
    other("/reset_encoder_cache"),
    other("/start_profile"),
    other("/stop_profile", timeout=SLOW),
)
