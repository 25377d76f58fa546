"""A simulated SGLang-Jax worker: where its HTTP API differs from SGLang's, features that it lacks, and requests that
crash it (observed at cddbf6f)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from miles_router.testing import PauseMode, SimulatedWorker
from miles_router.testing.worker.routes.chat import chat_completions
from miles_router.testing.worker.routes.completions import completions
from miles_router.testing.worker.routes.control import (
    Route,
    abort_request,
    answer_empty,
    continue_generation,
    flush_cache,
    pause_generation,
)
from miles_router.testing.worker.routes.info import health, model_card
from miles_router.testing.worker.routes.native import generate
from miles_router.testing.worker.routes.schema import openapi
from miles_router.testing.worker.visit import Visit
from miles_router.testing.worker.wire.generate_input import LethalPrompt
from miles_router.testing.worker.wire.generate_output import OutputBuilder
from tests.support.simulated.jax_output import JaxOutputBuilder, asks_alone
from tests.support.simulated.odd_workers import MortalWorker

JAX_VERSION = "0.0.0.dev0"
_CHAT_FIELDS = (
    *("messages", "model", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "n", "stop", "stream"),
    *("stream_options", "temperature", "top_p", "tools", "tool_choice", "top_k", "min_p", "regex", "ebnf", "rid"),
    *("stop_token_ids", "no_stop_trim", "ignore_eos", "continue_final_message", "skip_special_tokens"),
    *("extra_key", "chat_template_kwargs", "separate_reasoning", "response_format", "frequency_penalty", "seed"),
)
_COMPLETION_FIELDS = (*_CHAT_FIELDS, "prompt", "echo", "suffix", "lora_path")
_UNKNOWN_TO_GENERATE = ("routed_experts_start_len", "return_prompt_token_ids", "return_indexer_topk", "session_params")


@dataclass(slots=True)
class JaxVisit(Visit):
    """One request to SGLang-Jax."""

    asked_for_none: bool = False

    def adapter_in(self, body: Mapping[str, Any]) -> Any:
        """Return `lora_path`; adapters in `model` are not read."""
        return body.get("lora_path")

    def output_builder(self) -> OutputBuilder:
        return JaxOutputBuilder(self.engine, self.settings, asked_for_none=self.asked_for_none)


async def _generate(visit: Visit) -> web.StreamResponse:
    """Answer `/generate`. Unknown fields are ignored silently, and at least one token is sampled."""
    body = {name: value for name, value in visit.json().items() if name not in _UNKNOWN_TO_GENERATE}
    body.setdefault("return_text_in_logprobs", True)
    given = body.get("sampling_params") or {}
    if isinstance(given, Mapping):
        params = {name: value for name, value in given.items() if name != "logit_bias"}
        if params.get("max_new_tokens") == 0:
            params["max_new_tokens"] = 1
            assert isinstance(visit, JaxVisit)
            visit.asked_for_none = True
        body["sampling_params"] = params
    visit.body = orjson.dumps(body)
    _check_batch(visit, body)
    return await generate(visit)


def _check_batch(visit: Visit, body: Mapping[str, Any]) -> None:
    """Refuse requests that use both of its logprob paths in one batch, since that crashes it.

    Raises:
        LethalPrompt: a running request uses the other path.
    """
    alone = bool(body.get("return_logprob")) and not (
        body.get("top_logprobs_num") or body.get("token_ids_logprob") or (body.get("logprob_start_len") or -1) >= 0
    )
    if any(asks_alone(each.request) is not alone for each in visit.engine.running.values()):
        raise LethalPrompt("return_logprob alone in one batch with other requests")


def _with_fields(names: tuple[str, ...], route: Route) -> Route:
    async def answer(visit: Visit) -> web.StreamResponse:
        visit.body = orjson.dumps({name: value for name, value in visit.json().items() if name in names})
        return await route(visit)

    return answer


async def _pause_generation(visit: Visit) -> web.StreamResponse:
    """Pause. Mode "abort" hangs if requests run: the real one waits for notices that its queue never sends."""
    if visit.json().get("mode", "abort") == PauseMode.ABORT.value and visit.engine.running:
        visit.engine.pause(PauseMode.ABORT)
        await asyncio.get_running_loop().create_future()
    return await pause_generation(visit)


async def _flush_cache(visit: Visit) -> web.StreamResponse:
    """Flush the cache, or answer 400 while any request runs or waits."""
    if visit.engine.running:
        return await visit.reply.text("Flush cache failed.\nReason: pending requests\n", 400)
    return await flush_cache(visit)


async def _dies(visit: Visit) -> web.StreamResponse:
    raise LethalPrompt(f"a request to {visit.exchange.path}")


async def _health(visit: Visit) -> web.StreamResponse:
    """Answer 200 whatever the engine's state."""
    return await visit.reply.empty()


async def _model_info(visit: Visit) -> web.StreamResponse:
    settings = visit.settings
    said = {"model_path": settings.model_path, "tokenizer_path": settings.tokenizer_path}
    return await visit.reply.json({**said, "is_generation": True, "preferred_sampling_params": None})


async def _models(visit: Visit) -> web.StreamResponse:
    """List the base model only, even if adapters are loaded."""
    return await visit.reply.json({"object": "list", "data": [model_card(visit)]})


async def server_info(visit: Visit) -> web.StreamResponse:
    """Answer with those of its arguments that a router may read."""
    settings = visit.settings
    return await visit.reply.json(
        {
            "model_path": settings.model_path,
            "tokenizer_path": settings.tokenizer_path,
            "context_length": settings.context_len,
            "device": "cpu",
            "stream_output": False,
            "precompile_token_paddings": None,
            "precompile_bs_paddings": None,
            "preferred_sampling_params": None,
            "enable_return_routed_experts": settings.moe is not None,
            "enable_lora": visit.engine.enable_lora,
            "lora_paths": [{"lora_name": name, "lora_path": path} for name, path in visit.engine.adapters.items()],
            "tool_call_parser": settings.tool_call_parser,
            "reasoning_parser": settings.reasoning_parser,
            "tp_size": 1,
            "dp_size": 1,
            "internal_states": [{}],
            "version": JAX_VERSION,
            "simulated": True,
        }
    )


_chat = _with_fields(_CHAT_FIELDS, chat_completions)
JAX_ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/generate"): _generate,
    ("PUT", "/generate"): _generate,
    ("POST", "/v1/chat/completions"): _chat,
    ("POST", "/invocations"): _chat,
    ("POST", "/v1/completions"): _with_fields(_COMPLETION_FIELDS, completions),
    ("GET", "/v1/models"): _models,
    ("GET", "/health"): _health,
    ("GET", "/ping"): _health,
    ("GET", "/health_generate"): health,
    ("GET", "/get_model_info"): _model_info,
    ("GET", "/get_server_info"): server_info,
    ("POST", "/abort_request"): abort_request,
    ("POST", "/pause_generation"): _pause_generation,
    ("POST", "/continue_generation"): continue_generation,
    ("GET", "/flush_cache"): _flush_cache,
    ("POST", "/flush_cache"): _flush_cache,
    ("GET", "/release_memory_occupation"): _dies,
    ("POST", "/release_memory_occupation"): _dies,
    ("GET", "/resume_memory_occupation"): _dies,
    ("POST", "/resume_memory_occupation"): _dies,
    ("POST", "/configure_logging"): answer_empty,
}
JAX_ROUTES["GET", "/openapi.json"] = openapi(JAX_ROUTES, _CHAT_FIELDS, ("extra_key",))


class SimulatedJax(MortalWorker):
    """A simulated SGLang-Jax worker, with its mistakes."""

    routes = JAX_ROUTES
    scheduler_routes = SimulatedWorker.scheduler_routes | {server_info}
    visit_type = JaxVisit
