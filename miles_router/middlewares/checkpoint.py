"""What the checkpoint of `--hf-checkpoint` has for middlewares: its tokenizer and its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from miles_router.errors import ConfigError
from miles_router.settings.config import RouterConfig


def load_model_config(config: RouterConfig) -> Mapping[str, Any]:
    """`config.json` of `--hf-checkpoint`; nothing where there is none."""
    if config.hf_checkpoint is None:
        return {}
    try:
        return _read(config.hf_checkpoint, "config.json")
    except FileNotFoundError:
        return _from_hub(config.hf_checkpoint)


def load_generation_config(config: RouterConfig) -> Mapping[str, Any]:
    """`generation_config.json` of `--hf-checkpoint`: what an engine assumes in chat where a request says nothing
    (SGLang 0.5.23, `--sampling-defaults model`); nothing where there is none."""
    if config.hf_checkpoint is None:
        return {}
    try:
        return _read(config.hf_checkpoint, "generation_config.json")
    except FileNotFoundError:
        return {} if Path(config.hf_checkpoint).is_dir() else _generation_from_hub(config.hf_checkpoint)


def _read(checkpoint: str, name: str) -> Mapping[str, Any]:
    try:
        found = orjson.loads(Path(checkpoint, name).read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"hf_checkpoint: cannot read {name} of {checkpoint!r}: {error}") from None
    return found if isinstance(found, dict) else {}


def _from_hub(checkpoint: str) -> Mapping[str, Any]:
    """Of a checkpoint that is no directory; nothing without the extra `tito`, or where the hub has none."""
    try:
        from transformers import PretrainedConfig
    except ImportError:
        return {}
    try:
        found: Mapping[str, Any] = PretrainedConfig.get_config_dict(checkpoint)[0]
    except (OSError, ValueError):
        return {}
    return found


def _generation_from_hub(checkpoint: str) -> Mapping[str, Any]:
    """Of a checkpoint that is no directory; nothing without the extra `tito`, or where the hub has none."""
    try:
        from transformers import GenerationConfig
    except ImportError:
        return {}
    try:
        found: Mapping[str, Any] = GenerationConfig.from_pretrained(checkpoint).to_diff_dict()
    except (OSError, ValueError):
        return {}
    return found


def load_tokenizer(config: RouterConfig) -> Any:
    """Load `--hf-checkpoint`'s tokenizer, with `--chat-template-path` in place of its own template."""
    if config.hf_checkpoint is None:
        raise ConfigError("hf_checkpoint: a middleware needs the model's tokenizer; set --hf-checkpoint")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("hf_checkpoint: needs transformers; pip install 'miles-router[tito]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
        if config.chat_template_path is not None:
            with open(config.chat_template_path, encoding="utf-8") as template:
                tokenizer.chat_template = template.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf_checkpoint: cannot load a tokenizer from {config.hf_checkpoint!r}: {error}") from None
    return tokenizer
