"""The worker's control routes: pause, aborts, weight updates, memory, adapters, and stubs that only answer."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from miles_router.testing.worker.engine import PauseMode
from miles_router.testing.worker.visit import Visit, invalid_body

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
Route = Callable[[Visit], Awaitable[web.StreamResponse]]

LORA_IS_OFF = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


async def pause_generation(visit: Visit) -> web.StreamResponse:
    """Handle POST {"mode": "abort" | "retract" | "in_place"}. Answer once the engine is paused."""
    mode = visit.json().get("mode", "abort")
    if mode not in [known.value for known in PauseMode]:
        raise invalid_body(_problem(f"Invalid enum value '{mode}' - at `$.mode`"))
    visit.engine.pause(PauseMode(mode))
    if mode == PauseMode.ABORT.value:
        await visit.engine.idle()
    return await visit.reply.json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(visit: Visit) -> web.StreamResponse:
    visit.json()
    visit.engine.resume()
    return await visit.reply.json({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(visit: Visit) -> web.StreamResponse:
    """Handle POST {"rid"} or {"abort_all": true}. Answer 200 whether or not the request was running."""
    body = visit.json()
    if body.get("abort_all"):
        visit.engine.abort_all()
    else:
        visit.engine.abort(str(body.get("rid") or ""))
    return await visit.reply.empty()


async def flush_cache(visit: Visit) -> web.StreamResponse:
    """Flush the cache, or answer 400 while generations occupy it. The answer is plain text."""
    if not visit.engine.can_flush():
        return await visit.reply.text("Flush cache failed.\n", 400)
    visit.engine.flush()
    return await visit.reply.text(FLUSHED)


async def update_weight_version(visit: Visit) -> web.StreamResponse:
    """Handle POST {"new_version", "abort_all_requests": true}."""
    body = visit.json()
    version = _required(body, "new_version")
    if body.get("abort_all_requests", True):
        visit.engine.abort_all()
    visit.engine.weight_version = version
    return await visit.reply.json(
        {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
    )


async def update_weights_from_disk(visit: Visit) -> web.StreamResponse:
    """Handle POST {"model_path", "weight_version"?, "abort_all_requests"?, "flush_cache"?}.

    Unless paused, wait for running generations first. If a pause keeps generations in place, the cache cannot be
    flushed: the answer is 400 although the weights have changed.
    """
    body = visit.json()
    _required(body, "model_path")
    if body.get("abort_all_requests"):
        visit.engine.abort_all()
    if visit.engine.paused is None:
        await visit.engine.idle()
    named = visit.engine.named_version
    if body.get("weight_version") is not None:
        visit.engine.weight_version = str(body["weight_version"])
    if body.get("flush_cache", True):
        if not visit.engine.can_flush():
            visit.engine.named_version = named
            return await visit.reply.json({"success": False, "message": NOT_FLUSHED, "num_paused_requests": 0}, 400)
        visit.engine.flush()
    message = "Succeeded to update model weights."
    if body.get("weight_version") is not None:
        message += f" Weight version updated to {visit.engine.weight_version}."
    return await visit.reply.json({"success": True, "message": message, "num_paused_requests": 0})


async def begin_weight_update(visit: Visit) -> web.StreamResponse:
    visit.json()
    visit.engine.updating = True
    return await visit.reply.json({"success": True, "message": "Success"})


async def end_weight_update(visit: Visit) -> web.StreamResponse:
    """End a weight update; answer 400 if none was begun."""
    visit.json()
    if not visit.engine.updating:
        message = "no weight-update session is open; call begin_weight_update() first"
        return await visit.reply.json({"success": False, "message": message}, 400)
    visit.engine.updating = False
    return await visit.reply.json({"success": True, "message": "Success"})


async def load_lora_adapter(visit: Visit) -> web.StreamResponse:
    """Handle POST {"lora_name", "lora_path"}. Answer 400 unless the worker was started with `enable_lora`."""
    body = visit.json()
    name, path = _required(body, "lora_name"), _required(body, "lora_path")
    if not visit.engine.enable_lora:
        return await _lora_result(visit, LORA_IS_OFF)
    if name in visit.engine.adapters:
        known = list(visit.engine.adapters)
        return await _lora_result(visit, f"LoRA with name {name} already exists. Loaded LoRAs: {known}")
    visit.engine.adapters[name] = path
    return await _lora_result(visit)


async def unload_lora_adapter(visit: Visit) -> web.StreamResponse:
    """Handle POST {"lora_name"}."""
    name = _required(visit.json(), "lora_name")
    if not visit.engine.enable_lora:
        return await _lora_result(visit, LORA_IS_OFF)
    if visit.engine.adapters.pop(name, None) is None:
        return await _lora_result(visit, f"LoRA with name {name} does not exist.")
    return await _lora_result(visit)


async def _lora_result(visit: Visit, error: str | None = None) -> web.StreamResponse:
    result = {
        "rid": None,
        "http_worker_ipc": None,
        "success": error is None,
        "error_message": error,
        "loaded_adapters": dict(visit.engine.adapters) if visit.engine.enable_lora else None,
    }
    return await visit.reply.json(result, 200 if error is None else 400)


async def slow_down(visit: Visit) -> web.StreamResponse:
    """Handle POST {"forward_sleep_time": seconds | null}: delay every token by so many seconds."""
    body = visit.json()
    if "forward_sleep_time" not in body:
        raise invalid_body(_problem("Object missing required field `forward_sleep_time`"))
    visit.engine.slow_down_s = float(body["forward_sleep_time"] or 0.0)
    return await visit.reply.json(None)


async def answer_null(visit: Visit) -> web.StreamResponse:
    """Answer `null` to a JSON body."""
    visit.json()
    return await visit.reply.json(None)


async def answer_empty(visit: Visit) -> web.StreamResponse:
    visit.json()
    return await visit.reply.empty()


def _says(text: str) -> Route:
    async def route(visit: Visit) -> web.StreamResponse:
        return await visit.reply.text(text)

    return route


def _required(body: dict[str, Any], name: str) -> str:
    if not isinstance(body.get(name), str):
        raise invalid_body(_problem(f"Object missing required field `{name}`"))
    return str(body[name])


def _problem(message: str) -> dict[str, Any]:
    return {"type": "value_error", "loc": ("body",), "msg": f"Value error, {message}"}


CONTROL_ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/pause_generation"): pause_generation,
    ("POST", "/continue_generation"): continue_generation,
    ("POST", "/abort_request"): abort_request,
    ("POST", "/update_weight_version"): update_weight_version,
    ("POST", "/update_weights_from_disk"): update_weights_from_disk,
    ("POST", "/begin_weight_update"): begin_weight_update,
    ("POST", "/end_weight_update"): end_weight_update,
    ("POST", "/load_lora_adapter"): load_lora_adapter,
    ("POST", "/unload_lora_adapter"): unload_lora_adapter,
}
_EITHER_METHOD: dict[str, Route] = {
    "/flush_cache": flush_cache,
    "/release_memory_occupation": answer_null,
    "/resume_memory_occupation": answer_null,
    "/slow_down": slow_down,
    "/configure_logging": answer_empty,
    "/freeze_gc": _says("Garbage collection frozen.\n"),
    "/start_profile": _says("Start profiling.\n"),
    "/stop_profile": _says("Stop profiling. This will take some time.\n"),
    "/start_expert_distribution_record": _says("Start recording the expert distribution.\n"),
    "/stop_expert_distribution_record": _says("Stop recording the expert distribution.\n"),
    "/dump_expert_distribution_record": _says("Dump expert distribution record.\n"),
}
CONTROL_ROUTES.update({(method, path): route for path, route in _EITHER_METHOD.items() for method in ("GET", "POST")})
