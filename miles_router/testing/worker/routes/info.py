"""The worker's routes for model, server, health and load information, and for tokenizing."""

import asyncio
import datetime
import time
from typing import Any

from aiohttp import web

from miles_router.testing.worker.model.generation import HEADROOM
from miles_router.testing.worker.routes.control import Route
from miles_router.testing.worker.visit import Visit, invalid_body
from miles_router.testing.worker.wire.chat_messages import chat_prompt_ids

SGLANG_VERSION = "0.5.23"


async def health(visit: Visit) -> web.StreamResponse:
    """Answer 200 once the engine can generate, or 503 after `health_timeout_s`. A paused engine cannot."""
    engine, settings = visit.engine, visit.settings
    deadline = asyncio.get_running_loop().time() + settings.health_timeout_s
    await asyncio.sleep(settings.health_latency_s)
    engine.healthy = await engine.generates_before(deadline)
    if engine.healthy:
        return await visit.reply.empty()
    return await visit.reply.empty(503)


async def ready(visit: Visit) -> web.StreamResponse:
    """Answer 503 while paused, and after a failed `/health` until one succeeds; else 200."""
    status = 200 if visit.engine.paused is None and visit.engine.healthy else 503
    return await visit.reply.empty(status)


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
            "weight_version": visit.engine.named_version,
            "load_format": "auto",
            "reasoning_parser": settings.reasoning_parser,
            "tool_call_parser": settings.tool_call_parser,
            "disaggregation_mode": settings.disaggregation_mode,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": kind,
            "architectures": ["Qwen3MoeForCausalLM" if settings.moe else "Qwen3ForCausalLM"],
        }
    )


async def server_info(visit: Visit) -> web.StreamResponse:
    """Answer with those few of SGLang's several hundred settings that a router may read."""
    settings = visit.settings
    return await visit.reply.json(
        {
            "model_path": settings.model_path,
            "tokenizer_path": settings.tokenizer_path,
            "served_model_name": settings.served_model_name,
            "context_length": settings.context_len,
            "max_total_num_tokens": visit.engine.load().capacity,
            "max_req_input_len": settings.context_len - HEADROOM,
            "allow_auto_truncate": settings.auto_truncate,
            "disaggregation_mode": settings.disaggregation_mode,
            "status": "ready",
            "incremental_streaming_output": settings.incremental_streaming_output,
            "enable_lora": visit.engine.enable_lora,
            "enable_return_routed_experts": settings.moe is not None,
            "enable_return_indexer_topk": settings.indexer is not None,
            "weight_version": visit.engine.named_version,
            "tool_call_parser": settings.tool_call_parser,
            "reasoning_parser": settings.reasoning_parser,
            "sampling_defaults": "model",
            "tp_size": 1,
            "dp_size": visit.engine.dp_size,
            "startup_time": {"scheduler_e2e": settings.startup_s},
            "internal_states": [{"weight_version": visit.engine.weight_version}] * visit.engine.dp_size,
            "version": SGLANG_VERSION,
            "frontend": "python",
            "simulated": True,
        }
    )


async def loads(visit: Visit) -> web.StreamResponse:
    """Handle GET /v1/loads: the running and waiting requests of each rank."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    return await visit.reply.json(
        {
            "timestamp": now,
            "version": SGLANG_VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [_load(visit, rank) for rank in range(visit.engine.dp_size)],
        }
    )


async def models(visit: Visit) -> web.StreamResponse:
    base = model_card(visit)
    loaded = visit.engine.adapters.items()
    adapters = [
        {**base, "id": name, "root": path, "parent": base["id"], "max_model_len": None} for name, path in loaded
    ]
    return await visit.reply.json({"object": "list", "data": [base, *adapters]})


async def model(visit: Visit) -> web.StreamResponse:
    """Handle GET /v1/models/{name}."""
    name = visit.path_tail
    if name == visit.settings.served_model_name:
        return await visit.reply.json(model_card(visit))
    error = {
        "message": f"The model '{name}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return await visit.reply.json({"error": error}, 404)


async def tokenize(visit: Visit) -> web.StreamResponse:
    """Handle POST /v1/tokenize {"prompt": text | [text]} or {"messages": [...]}."""
    body = visit.json()
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        message = "Value error, Exactly one of 'prompt' or 'messages' must be provided."
        raise invalid_body({"type": "value_error", "loc": ("body",), "msg": message})
    tokenizer, special = visit.engine.model.tokenizer, bool(body.get("add_special_tokens", True))
    limit = getattr(tokenizer, "model_max_length", visit.settings.context_len)
    if isinstance(prompt, list):
        tokens = [tokenizer.encode(text, add_special_tokens=special) for text in prompt]
        return await visit.reply.json({"tokens": tokens, "count": list(map(len, tokens)), "max_model_len": limit})
    plain = messages is None
    ids = tokenizer.encode(str(prompt), add_special_tokens=special) if plain else chat_prompt_ids(body, tokenizer)
    return await visit.reply.json({"tokens": ids, "count": len(ids), "max_model_len": limit})


async def detokenize(visit: Visit) -> web.StreamResponse:
    """Handle POST /v1/detokenize {"tokens": ids | [ids], "skip_special_tokens": true}."""
    body = visit.json()
    tokens, skip = body.get("tokens"), body.get("skip_special_tokens", True)
    if not isinstance(tokens, list):
        raise invalid_body({"type": "list_type", "loc": ("body", "tokens"), "msg": "Input should be a valid list"})
    decode = visit.engine.model.tokenizer.decode
    if tokens and isinstance(tokens[0], list):
        return await visit.reply.json({"text": [decode(ids, skip_special_tokens=skip) for ids in tokens]})
    return await visit.reply.json({"text": decode(tokens, skip_special_tokens=skip)})


async def ping(visit: Visit) -> web.StreamResponse:
    """Answer 503 after a failed `/health` until one succeeds, else 200, whether paused or not."""
    return await visit.reply.empty(200 if visit.engine.healthy else 503)


async def root(visit: Visit) -> web.StreamResponse:
    return await visit.reply.json("SGLang is running")


def _load(visit: Visit, rank: int) -> dict[str, Any]:
    load = visit.engine.load(rank)
    total = load.used_tokens + load.waiting_tokens
    return {
        "timestamp": time.time(),
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": total,
        "num_active_tokens": total,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": load.capacity,
        "max_running_requests": load.max_running,
        "token_usage": round(load.used_tokens / load.capacity, 4),
        "gen_throughput": round(load.tokens_per_second, 2),
        "cache_hit_rate": round(load.cache_hit_rate, 4),
        "utilization": 0.0,
        "total_prefill_uncached_tokens": load.prefilled_tokens,
        "total_prefill_busy_us": int(load.prefill_seconds * 1e6),
        "decode_moments": None,
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": load.capacity},
        "disaggregation": {"mode": visit.settings.disaggregation_mode},
        "queues": {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }


def model_card(visit: Visit) -> dict[str, object]:
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
    ("GET", "/v1/models"): models,
    ("POST", "/v1/tokenize"): tokenize,
    ("POST", "/v1/detokenize"): detokenize,
    ("GET", "/ping"): ping,
    ("GET", "/"): root,
}
