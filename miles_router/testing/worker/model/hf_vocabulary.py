"""A real tokenizer from a model directory: `tokenizer.json` and the chat template.

Needs the packages `tokenizers` and `jinja2` (`pip install "miles-router[tito]"`); nothing is downloaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from characters to bytes. Printable bytes stand for themselves, others begin at U+0100."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {**{chr(value): value for value in own}, **{chr(256 + rank): value for rank, value in enumerate(others)}}


_BYTE_OF = _byte_alphabet()


class DirectoryTokenizer:
    """The tokenizer of a model directory.

    Raises:
        FileNotFoundError: the directory has no `tokenizer.json`.
    """

    def __init__(self, directory: str) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = Path(directory)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        self._fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
        self._config = _json_of(path / "tokenizer_config.json")
        model = _json_of(path / "config.json")
        # A model's embedding is often larger than the tokenizer. Such ids can be sampled and decode to nothing.
        self.vocab_size = int(model.get("vocab_size") or self._fast.get_vocab_size(with_added_tokens=True))
        self.eos_token_ids = self._find_eos(model, _json_of(path / "generation_config.json"))
        self.model_max_length = int(self._config.get("model_max_length") or 32768)
        self._template = _chat_template(path, self._config)

    @property
    def size(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return self.decode([token]).encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if self._template is None:
            raise ValueError("this tokenizer has no chat template")
        from jinja2 import TemplateError

        tokens = {name: _text_of(self._config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            return str(self._template.render(messages=list(messages), add_generation_prompt=True, **tokens, **options))
        except (TemplateError, TypeError) as error:
            raise ValueError(str(error)) from error

    def _find_eos(self, *configs: Mapping[str, Any]) -> frozenset[int]:
        ids: set[int] = set()
        for config in configs:
            given = config.get("eos_token_id")
            ids.update([given] if isinstance(given, int) else given or ())
        named = _text_of(self._config.get("eos_token"))
        token = self._fast.token_to_id(named) if named else None
        return frozenset(ids if token is None else ids | {token})


def _json_of(path: Path) -> dict[str, Any]:
    return dict(orjson.loads(path.read_bytes())) if path.is_file() else {}


def _text_of(token: Any) -> str:
    """Return a token's text, which configurations contain as a string or as an object."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _chat_template(path: Path, config: Mapping[str, Any]) -> Any:
    """Return the compiled chat template, in the same environment as in transformers, or None."""
    file = path / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        return None
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
