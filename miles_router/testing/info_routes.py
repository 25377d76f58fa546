"""What a worker says about itself: model, server, health and load."""

import asyncio
import datetime

from aiohttp import web

from miles_router.testing.control_routes import Route
from miles_router.testing.visit import Visit, optional_json_object

SGLANG_VERSION = "0.5.23"


async def health(visit: Visit) -> web.StreamResponse:
    """200 once the engine generates; while paused it cannot, and the answer is 503 after `health_timeout_s`."""
    engine, settings = visit.engine, visit.settings
    deadline = asyncio.get_running_loop().time() + settings.health_timeout_s
    await asyncio.sleep(settings.health_latency_s)
    if await engine.generates_before(deadline):
        return await visit.reply.whole(b"", "text/plain; charset=utf-8")
    return await visit.reply.whole(b"", "text/plain; charset=utf-8", 503)


async def ready(visit: Visit) -> web.StreamResponse:
    status = 503 if visit.engine.paused else 200
    return await visit.reply.whole(b"", "text/plain; charset=utf-8", status)


async def model_info(visit: Visit) -> web.StreamResponse:
    settings = visit.settings
    kind = "qwen3_moe" if settings.moe else "qwen3"
    return await visit.reply.json(
        {
            "model_path": settings.model_path,
            "served_model_name": settings.served_model_name,
            "tokenizer_path": settings.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": visit.engine.weight_version,
            "load_format": "auto",
            "reasoning_parser": settings.reasoning_parser,
            "tool_call_parser": settings.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": kind,
            "architectures": ["Qwen3MoeForCausalLM" if settings.moe else "Qwen3ForCausalLM"],
        }
    )


async def server_info(visit: Visit) -> web.StreamResponse:
    """The few of SGLang's several hundred settings that a router may look at."""
    settings = visit.settings
    return await visit.reply.json(
        {
            "model_path": settings.model_path,
            "tokenizer_path": settings.tokenizer_path,
            "served_model_name": settings.served_model_name,
            "context_length": settings.context_len,
            "incremental_streaming_output": settings.incremental_streaming_output,
            "enable_return_routed_experts": settings.moe is not None,
            "weight_version": visit.engine.weight_version,
            "tool_call_parser": settings.tool_call_parser,
            "reasoning_parser": settings.reasoning_parser,
            "tp_size": 1,
            "dp_size": 1,
            "internal_states": [{"weight_version": visit.engine.weight_version}],
            "version": SGLANG_VERSION,
            "frontend": "python",
            "simulated": True,
        }
    )


async def loads(visit: Visit) -> web.StreamResponse:
    """GET /v1/loads: running and waiting requests."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    return await visit.reply.json(
        {
            "timestamp": now,
            "version": SGLANG_VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [{"dp_rank": 0, **_load(visit)}],
        }
    )


async def get_load(visit: Visit) -> web.StreamResponse:
    """GET /get_load: how releases before `/v1/loads` answered."""
    load = _load(visit)
    answer = {
        "dp_rank": 0,
        "num_reqs": load["num_total_reqs"],
        "num_waiting_reqs": load["num_waiting_reqs"],
        "num_tokens": load["num_used_tokens"],
    }
    return await visit.reply.json([answer])


async def models(visit: Visit) -> web.StreamResponse:
    return await visit.reply.json({"object": "list", "data": [_model_card(visit)]})


async def model(visit: Visit) -> web.StreamResponse:
    """GET /v1/models/{name}."""
    name = visit.path_tail
    if name == visit.settings.served_model_name:
        return await visit.reply.json(_model_card(visit))
    error = {
        "message": f"The model '{name}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return await visit.reply.json({"error": error}, 404)


async def tokenize(visit: Visit) -> web.StreamResponse:
    """POST /v1/tokenize {"prompt": text | [text]}."""
    prompt = optional_json_object(visit.body).get("prompt", "")
    encode = visit.engine.model.tokenizer.encode
    tokens = [encode(text) for text in prompt] if isinstance(prompt, list) else encode(prompt)
    count = [len(ids) for ids in tokens] if isinstance(prompt, list) else len(tokens)
    return await visit.reply.json({"tokens": tokens, "count": count, "max_model_len": visit.settings.context_len})


async def detokenize(visit: Visit) -> web.StreamResponse:
    """POST /v1/detokenize {"tokens": ids | [ids], "skip_special_tokens": true}."""
    body = optional_json_object(visit.body)
    tokens, skip = body.get("tokens", []), body.get("skip_special_tokens", True)
    decode = visit.engine.model.tokenizer.decode
    if tokens and isinstance(tokens[0], list):
        return await visit.reply.json({"text": [decode(ids, skip_special_tokens=skip) for ids in tokens]})
    return await visit.reply.json({"text": decode(tokens, skip_special_tokens=skip)})


def _load(visit: Visit) -> dict[str, int]:
    running = [generation for generation in visit.engine.running.values() if not generation.waiting]
    waiting = len(visit.engine.running) - len(running)
    used = sum(generation.prompt_tokens + len(generation.output_ids) for generation in running)
    return {
        "num_running_reqs": len(running),
        "num_waiting_reqs": waiting,
        "num_total_reqs": len(running) + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": visit.settings.context_len,
    }


def _model_card(visit: Visit) -> dict[str, object]:
    name = visit.settings.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": visit.settings.started_at,
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": visit.settings.context_len,
    }


INFO_ROUTES: dict[tuple[str, str], Route] = {
    ("GET", "/health"): health,
    ("GET", "/health_generate"): health,
    ("GET", "/ready"): ready,
    ("GET", "/model_info"): model_info,
    ("GET", "/get_model_info"): model_info,
    ("GET", "/server_info"): server_info,
    ("GET", "/get_server_info"): server_info,
    ("GET", "/v1/loads"): loads,
    ("GET", "/get_load"): get_load,
    ("GET", "/v1/models"): models,
    ("POST", "/v1/tokenize"): tokenize,
    ("POST", "/v1/detokenize"): detokenize,
}
