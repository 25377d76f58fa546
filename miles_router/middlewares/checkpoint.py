"""What the checkpoint of `--hf-checkpoint` has for middlewares: its tokenizer and its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from miles_router.engines.probe_text import probe_text
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
    trusted = config.trust_remote_tokenizer
    if not trusted and _needs_code(config.hf_checkpoint):
        raise ConfigError(f"hf_checkpoint: the tokenizer of {config.hf_checkpoint!r} is code; {TRUST}")
    try:
        # Given either way: where nothing is said, transformers asks on the terminal.
        tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint, trust_remote_code=trusted)
        if config.chat_template_path is not None:
            with open(config.chat_template_path, encoding="utf-8") as template:
                tokenizer.chat_template = template.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf_checkpoint: cannot load a tokenizer from {config.hf_checkpoint!r}: {error}") from None
    _check_loaded(tokenizer, config.hf_checkpoint)
    return tokenizer


#: What to do about a tokenizer that comes with code of its own.
TRUST = "set --trust-remote-tokenizer to run what comes with the checkpoint"


def _file(checkpoint: str, name: str) -> Path | None:
    """A file of a checkpoint, a directory or of the hub; None where it has none."""
    if Path(checkpoint).is_dir():
        found = Path(checkpoint, name)
        return found if found.is_file() else None
    from transformers.utils import cached_file

    path = cached_file(
        checkpoint, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else Path(path)


def _needs_code(checkpoint: str) -> bool:
    """Whether a tokenizer is made by code that comes with it, and by no `tokenizer.json`: what transformers makes of
    its other files (Kimi K2.5's tiktoken ones) splits texts in another way."""
    auto = _settings(checkpoint).get("auto_map")
    return _file(checkpoint, "tokenizer.json") is None and isinstance(auto, dict) and "AutoTokenizer" in auto


def _check_loaded(tokenizer: Any, checkpoint: str) -> None:
    """See that what transformers has loaded is what `tokenizer.json` says: releases put other parts in place of its own
    (5.2 to 5.14 and 5.19 of DeepSeek-V3's, 5.24 by the model's type). Parts are written in several ways, so that what
    they do counts.

    Raises:
        ConfigError: it reads or writes a text otherwise.
    """
    backend, file = getattr(tokenizer, "backend_tokenizer", None), _file(checkpoint, "tokenizer.json")
    if backend is None or file is None or b'"ByteLevel"' not in file.read_bytes():
        return  # what is no ByteLevel tokenizer, transformers makes of other files too; engines are compared with it
    import transformers
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    difference = _difference(backend, own, _settings(checkpoint))
    if difference is not None:
        raise ConfigError(
            f"hf_checkpoint: transformers {transformers.__version__} loads the tokenizer of {checkpoint!r} "
            f"otherwise than its tokenizer.json says ({type(tokenizer).__name__} {difference}): "
            "install another release of transformers, or name the right tokenizer_class in its files"
        )


def _difference(loaded: Any, own: Any, settings: Mapping[str, Any]) -> str | None:
    """Return how a loaded tokenizer differs from the one in its file; None where it does not. `tokenizer_config.json`
    may say otherwise than the file how added tokens are found, and whether a text is begun and ended by some."""
    told = settings.get("added_tokens_decoder")
    alike = []
    here = loaded.get_added_tokens_decoder()
    for token, added in own.get_added_tokens_decoder().items():
        how = _found_by(here.get(token))
        if how == _found_by(added):
            alike.append(added.content)
        elif how is None or how != _told(told.get(str(token)) if isinstance(told, dict) else None):
            return f"has another added token {token} than {added.content!r}"
    text = probe_text(alike, usual=False)
    for part in (*text.split("\n"), text):
        ids = own.encode(part, add_special_tokens=False).ids
        if loaded.encode(part, add_special_tokens=False).ids != ids:
            return f"splits {part[:16]!r} in another way"
        if loaded.decode(ids, skip_special_tokens=False) != own.decode(ids, skip_special_tokens=False):
            return f"decodes the tokens of {part[:16]!r} otherwise"
    if any(settings.get(name) is not None for name in ("add_bos_token", "add_eos_token")):
        return None
    if loaded.encode("a").ids != own.encode("a").ids:
        return "begins or ends a text with other special tokens"
    return None


def _found_by(added: Any) -> tuple[object, ...] | None:
    """Return an added token's text, and by what is around it in a text it is found."""
    return None if added is None else (added.content, added.lstrip, added.rstrip, added.single_word)


def _told(added: Any) -> tuple[object, ...] | None:
    """The same as it is written in `tokenizer_config.json`."""
    if not isinstance(added, dict):
        return None
    return (added.get("content"), *(added.get(name, False) for name in ("lstrip", "rstrip", "single_word")))


def _settings(checkpoint: str) -> Mapping[str, Any]:
    """Return `tokenizer_config.json`; nothing where there is none, or transformers says what is wrong with it."""
    config = _file(checkpoint, "tokenizer_config.json")
    try:
        read = {} if config is None else orjson.loads(config.read_bytes())
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}
