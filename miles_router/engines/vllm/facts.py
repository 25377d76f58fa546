"""Reads the flags and facts of a vLLM server from its own documents. Pure.

Source: vLLM 0.32.0. `/server_info` (only with `VLLM_SERVER_DEV_MODE=1`; its first answer takes up to 10 s) contains
the engine's configuration, `/v1/models` the model names. No document contains the flags of the HTTP server. The user
repeats the relevant ones in `--additional-config`, which vLLM shows and otherwise ignores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from miles_router.engines.engine import WITHHELD, Documents
from miles_router.engines.facts import Facts
from miles_router.engines.vllm.paths import CLIENT_PATHS, MODEL_LIST, SAMPLE, SERVER_INFO, VERSION, WEIGHT_INFO

OWNER = "vllm"
#: vLLM's names of parsers, and SGLang's names of the same parsers.
REASONING: Mapping[str, str] = {
    "deepseek_r1": "deepseek-r1",
    "deepseek_v3": "deepseek-v3",
    "minimax_m2": "minimax",
    "openai_gptoss": "gpt-oss",
}
CALLS: Mapping[str, str] = {
    "hermes": "qwen25",
    "qwen3_xml": "qwen3_coder",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "minimax_m2": "minimax-m2",
    "openai": "gpt-oss",
}
#: Keys in `--additional-config`: the name of the tool parser, and whether logprobs contain ids in place of token texts.
CALL_PARSER, IDS_AS_TOKENS = "tool_call_parser", "return_tokens_as_token_ids"
#: Stands for an unknown tool parser. A `tito_model` setting, if there is one, still decides how calls are parsed.
UNKNOWN_PARSER = "its --tool-call-parser: start it with --additional-config '{\"tool_call_parser\": NAME}'"


class Flags(NamedTuple):
    """The flags of a server on which the handling of requests depends."""

    scale_out: bool = True
    """`--enable-scale-out`"""
    dev_mode: bool = True
    """`VLLM_SERVER_DEV_MODE=1`"""
    raw_logprobs: bool = False
    """Without `--logprobs-mode processed_logprobs`"""
    experts: bool = False
    """`--enable-return-routed-experts`"""
    sleep_mode: bool = False
    """`--enable-sleep-mode`"""
    api_servers: int = 1
    """`--api-server-count`, by default as many as ranks"""
    seed: int | None = None
    """`--seed`"""
    token_ids_in_logprobs: bool = False
    """`--return-tokens-as-token-ids`"""

    def missing(self) -> Iterator[str]:
        """Yield a text for each missing flag, with what is refused without that flag."""
        if not self.scale_out:
            yield "--enable-scale-out: without it /generate and sessions are refused"
        if not self.dev_mode:
            yield "VLLM_SERVER_DEV_MODE=1 in its environment: without it pauses, flushes and versions are refused"
        elif self.raw_logprobs:
            yield "--logprobs-mode processed_logprobs: without it logprobs of a temperature other than 1 are refused"
        if self.api_servers > 1:
            yield "--api-server-count 1: with several, aborts by name are refused"
        if self.seed == 0:
            yield "a --seed of its own: by default all workers begin with the same samples"


def flags(documents: Documents) -> Flags:
    """Read the flags from the documents."""
    config = _config(documents)
    # If the model list is withheld too, only the API key is missing, and a client may have that key.
    scale_out = documents.get(SAMPLE) != WITHHELD or documents.get(MODEL_LIST[0]) == WITHHELD
    if not config:
        return Flags(scale_out=scale_out, dev_mode=False, raw_logprobs=True)
    return Flags(
        scale_out=scale_out,
        raw_logprobs=_config_value(config, "model_config", "logprobs_mode") != "processed_logprobs",
        experts=_config_value(config, "aux_output_config", "enable_return_routed_experts") is True,
        sleep_mode=_config_value(config, "model_config", "enable_sleep_mode") is True,
        api_servers=_count(_config_value(config, "parallel_config", "_api_process_count")) or 1,
        seed=_config_value(config, "model_config", "seed"),
        token_ids_in_logprobs=_config_value(config, "additional_config", IDS_AS_TOKENS) is True,
    )


def is_vllm(documents: Documents) -> bool:
    """Return True if a vLLM server answered. `/weight_info` is enough if `/version` was not asked."""
    if VERSION[0] not in documents:
        return weight_version(documents.get(WEIGHT_INFO[0])) is not None
    return bool(_config(documents)) or any(model.get("owned_by") == OWNER for model in _models(documents))


def read_facts(documents: Documents) -> Facts:
    """Read the facts from the documents. A fact that cannot be read is left unknown."""
    config, models = _config(documents), _models(documents)
    base = next((model for model in models if model.get("parent") is None), {})
    reasoning = _text(_config_value(config, "structured_outputs_config", "reasoning_parser"))
    calls = _text(_config_value(config, "additional_config", CALL_PARSER)) or UNKNOWN_PARSER
    blocks, size = (_config_value(config, "cache_config", name) for name in ("num_gpu_blocks", "block_size"))
    instance = config.get("instance_id")
    return Facts(
        version=_text(_object(documents.get(VERSION[0])).get("version")),
        model_path=_text(_config_value(config, "model_config", "model")) or _text(base.get("root")),
        served_model_name=_text(base.get("id")),
        tokenizer_path=_text(_config_value(config, "model_config", "tokenizer")),
        weight_version=weight_version(documents.get(WEIGHT_INFO[0])),
        dp_size=_count(_config_value(config, "parallel_config", "data_parallel_size")),
        tool_call_parser=CALLS.get(calls, calls) if config else None,
        reasoning_parser=None if reasoning is None else REASONING.get(reasoning, reasoning),
        incremental_streaming=False,  # in the translated streams
        preferred_sampling_params={},
        sampling_defaults="openai",  # session chat is sent as /generate, which ignores the model's defaults
        lora=config.get("lora_config") is not None if config else None,
        auto_truncate=False,
        context_length=_count(base.get("max_model_len")),
        token_capacity=blocks * size if _count(blocks) and _count(size) else None,
        endpoints=CLIENT_PATHS if models else None,
        process=None if instance is None else str(instance).encode(),
    )


def weight_version(body: bytes | None) -> str | None:
    """Return the weight version in an answer to `/weight_info`; None if there is none."""
    return _text(_object(body).get("weight_version"))


@functools.lru_cache(maxsize=8)  # several readers parse the same document
def _object(body: bytes | None) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(body or b"")
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _config(documents: Documents) -> Mapping[str, Any]:
    config = _object(documents.get(SERVER_INFO[0])).get("vllm_config")
    return config if isinstance(config, dict) else {}


def _models(documents: Documents) -> list[Mapping[str, Any]]:
    models = _object(documents.get(MODEL_LIST[0])).get("data")
    return [each for each in models if isinstance(each, dict)] if isinstance(models, list) else []


def _config_value(config: Mapping[str, Any], part: str, name: str) -> Any:
    found = config.get(part)
    return found.get(name) if isinstance(found, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
