"""Loaders for the tokenizer and the configuration files of `--hf-checkpoint`, which middlewares use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from miles_router.engines.probe_text import probe_text
from miles_router.errors import ConfigError
from miles_router.settings.config import RouterConfig


def load_model_config(config: RouterConfig) -> Mapping[str, Any]:
    """Return `config.json` of `--hf-checkpoint`; empty if the option is not set or no file is found.

    Raises:
        ConfigError: the file of a local checkpoint cannot be read.
    """
    if config.hf_checkpoint is None:
        return {}
    try:
        return _read(config.hf_checkpoint, "config.json")
    except FileNotFoundError:
        return _from_hub(config.hf_checkpoint)


def load_generation_config(config: RouterConfig) -> Mapping[str, Any]:
    """Return `generation_config.json` of `--hf-checkpoint`; empty if the option is not set or no file is found.

    Engines take their defaults for chat requests from this file (SGLang 0.5.23, `--sampling-defaults model`).

    Raises:
        ConfigError: the file of a local checkpoint cannot be read.
    """
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
    """Return a hub checkpoint's `config.json`; empty without the extra `tito` or if the file cannot be loaded."""
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
    """Return a hub checkpoint's generation config; empty without the extra `tito` or if it cannot be loaded."""
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
    """Load the tokenizer of `--hf-checkpoint`, with `--chat-template-path` in place of its own template.

    Raises:
        ConfigError: no checkpoint is set, transformers is missing, or the tokenizer cannot be loaded, needs code that
            is not trusted, or differs from its `tokenizer.json`.
    """
    if config.hf_checkpoint is None:
        raise ConfigError("hf_checkpoint: a middleware needs the model's tokenizer; set --hf-checkpoint")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("hf_checkpoint: needs transformers; pip install 'miles-router[tito]'") from None
    trusted = config.trust_remote_tokenizer
    try:
        if not trusted and _needs_code(config.hf_checkpoint):
            raise ConfigError(f"hf_checkpoint: the tokenizer of {config.hf_checkpoint!r} needs its own code; {TRUST}")
        # Always passed: without this argument, transformers asks on the terminal.
        tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint, trust_remote_code=trusted)
        if config.chat_template_path is not None:
            with open(config.chat_template_path, encoding="utf-8") as template:
                tokenizer.chat_template = template.read()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf_checkpoint: cannot load a tokenizer from {config.hf_checkpoint!r}: {error}") from None
    _check_loaded(tokenizer, config.hf_checkpoint)
    return tokenizer


#: The advice in errors about tokenizers that need code from the checkpoint.
TRUST = "set --trust-remote-tokenizer to run what comes with the checkpoint"


def _file(checkpoint: str, name: str) -> Path | None:
    """Return the path of a file in a checkpoint (a directory or a name on the hub); None if the file is missing."""
    if Path(checkpoint).is_dir():
        found = Path(checkpoint, name)
        return found if found.is_file() else None
    from transformers.utils import cached_file

    path = cached_file(
        checkpoint, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else Path(path)


def _needs_code(checkpoint: str) -> bool:
    """Return whether a tokenizer has no `tokenizer.json` and is built by Python code from the checkpoint.

    Without that code, transformers builds a tokenizer from the other files (Kimi K2.5's tiktoken files), and that
    tokenizer splits texts differently.
    """
    auto = _settings(checkpoint).get("auto_map")
    return _file(checkpoint, "tokenizer.json") is None and isinstance(auto, dict) and "AutoTokenizer" in auto


def _check_loaded(tokenizer: Any, checkpoint: str) -> None:
    """Check that the tokenizer that transformers loaded behaves as its `tokenizer.json` does.

    Some transformers releases replace parts of the file: 5.2 to 5.14 and 5.19 for DeepSeek-V3, 5.24 depending on the
    model's type. Equal parts can be written in several ways, so the check compares behavior, not settings.

    Raises:
        ConfigError: the loaded tokenizer encodes or decodes a probe text differently.
    """
    backend, file = getattr(tokenizer, "backend_tokenizer", None), _file(checkpoint, "tokenizer.json")
    if backend is None or file is None or b'"ByteLevel"' not in file.read_bytes():
        return  # transformers builds other tokenizers from other files too; those are compared with the engine
    import transformers
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    difference = _difference(backend, own, _settings(checkpoint))
    if difference is not None:
        raise ConfigError(
            f"hf_checkpoint: transformers {transformers.__version__} loads a tokenizer for {checkpoint!r} "
            f"that differs from its tokenizer.json ({type(tokenizer).__name__} {difference}): "
            "install another release of transformers, or set the right tokenizer_class in tokenizer_config.json"
        )


def _difference(loaded: Any, own: Any, settings: Mapping[str, Any]) -> str | None:
    """Return how a loaded tokenizer differs from the one in its file, as a phrase for the error; None if it does not.

    Differences that `tokenizer_config.json` requests are allowed: the matching of added tokens, and the special tokens
    at the beginning and end of a text.
    """
    saved = settings.get("added_tokens_decoder")
    alike = []
    here = loaded.get_added_tokens_decoder()
    for token, added in own.get_added_tokens_decoder().items():
        how = _match_flags(here.get(token))
        if how == _match_flags(added):
            alike.append(added.content)
        elif how is None or how != _saved_match_flags(saved.get(str(token)) if isinstance(saved, dict) else None):
            return f"has another added token {token} than {added.content!r}"
    text = probe_text(alike, usual=False)
    for part in (*text.split("\n"), text):
        ids = own.encode(part, add_special_tokens=False).ids
        if loaded.encode(part, add_special_tokens=False).ids != ids:
            return f"splits {part[:16]!r} differently"
        if loaded.decode(ids, skip_special_tokens=False) != own.decode(ids, skip_special_tokens=False):
            return f"decodes the tokens of {part[:16]!r} differently"
    if any(settings.get(name) is not None for name in ("add_bos_token", "add_eos_token")):
        return None
    if loaded.encode("a").ids != own.encode("a").ids:
        return "begins or ends a text with other special tokens"
    return None


def _match_flags(added: Any) -> tuple[object, ...] | None:
    """Return an added token's text and matching flags: lstrip, rstrip, single_word."""
    return None if added is None else (added.content, added.lstrip, added.rstrip, added.single_word)


def _saved_match_flags(added: Any) -> tuple[object, ...] | None:
    """Return the same tuple as `_match_flags` for an entry of `tokenizer_config.json`."""
    if not isinstance(added, dict):
        return None
    return (added.get("content"), *(added.get(name, False) for name in ("lstrip", "rstrip", "single_word")))


def _settings(checkpoint: str) -> Mapping[str, Any]:
    """Return `tokenizer_config.json`; empty if it is missing or invalid (transformers reports invalid files)."""
    config = _file(checkpoint, "tokenizer_config.json")
    try:
        read = {} if config is None else orjson.loads(config.read_bytes())
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}
