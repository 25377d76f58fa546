"""Renderers for model families, from `miles-tito-tokenizers`, behind the interface of templates.py.

The library contains templates that do not rewrite history, settings for the same purpose, and encoders of families that
have no chat template. The tokens behind an answer are measured as for every other template (endings.py); tests compare
them with the library's own `merge_tokens`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from middleware_hub.openai_session.continuing.preparing import FAILURES, CannotRender
from middleware_hub.openai_session.continuing.templates import Renderer, from_tokenizer
from miles_router.errors import ConfigError

#: Values of the option, each with the families of the library that it may mean.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("qwen3",),
    "qwen3.5": ("qwen35",),
    "qwen3-next": ("qwennext",),
    "glm-4.7": ("glm47",),
    "kimi": ("kimi26", "kimi25"),
    "minimax": ("minimax_m27", "minimax_m25"),
    "deepseek": ("deepseekv32", "deepseekv4"),
    "nemotron": ("nemotron3",),
    "gpt-oss": (),  # not in the library: the tokenizer's own template is used
}
LIBRARY = tuple(sorted({name for names in FAMILIES.values() for name in names}))
#: Text in the chat template that identifies the newer family of a pair.
NEWER = {"kimi26": "preserve_thinking", "minimax_m27": "M2.7"}
#: Sets of roles that may be appended, the widest first: the library has a template for each set.
ROLES = (("tool", "user", "system"), ("tool", "user"), ("tool",))


def for_family(tokenizer: Any, tito_model: str) -> Renderer:
    """Return the renderer of a family, by a name in `FAMILIES` or one of the library's own names.

    Raises:
        ConfigError: there is no such family, the library is not installed, or the tokenizer is of another family.
    """
    name = tito_model.strip().lower()
    candidates = FAMILIES.get(name, (name,) if name in LIBRARY else None)
    if candidates is None:
        raise ConfigError(f"openai_session_middleware.tito_model: {_unknown(tito_model)}")
    if not candidates:
        return from_tokenizer(tokenizer, origin=f"the tokenizer's chat template ({name}: not in the library)")
    _require_library()
    if name == "deepseek" or candidates[0].startswith("deepseek"):
        return _deepseek_renderer(tokenizer, candidates)
    family = candidates[0]
    if len(candidates) > 1 and NEWER[family] not in str(tokenizer.chat_template):
        family = candidates[1]
    return _template_renderer(tokenizer, family)


def _unknown(tito_model: str) -> str:
    known = [*FAMILIES, *LIBRARY]
    near = difflib.get_close_matches(tito_model.lower(), known, n=1, cutoff=0.4)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown model family {tito_model!r}{meant} (families: {', '.join(FAMILIES)})"


def _require_library() -> None:
    try:
        import miles_tito_tokenizers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "openai_session_middleware.tito_model: needs miles-tito-tokenizers; pip install 'miles-router[tito]'"
        ) from None


def _template_renderer(tokenizer: Any, family: str) -> Renderer:
    from miles_tito_tokenizers import resolve_fixed_chat_template
    from miles_tito_tokenizers.tokenizer_type import TITOTokenizerType

    rows = TITOTokenizerType.get_tokenizer_class(TITOTokenizerType(family)).SUPPORTED_TEMPLATES
    roles = next(roles for roles in ROLES if any(row.allowed_roles.issuperset(roles) for row in rows))
    path, settings = resolve_fixed_chat_template(family, roles)
    template = Path(path).read_text(encoding="utf-8") if path is not None else None
    whose = f"{Path(path).name} of miles-tito-tokenizers" if path is not None else "the tokenizer's chat template"
    return from_tokenizer(tokenizer, template=template, settings=settings, origin=f"{whose} ({family})", family=family)


def _deepseek_renderer(tokenizer: Any, families: tuple[str, ...]) -> Renderer:
    """Return a renderer with DeepSeek's encoder, or with the chat template of a tokenizer before V3.2."""
    from miles_tito_tokenizers.encoders import deepseek_v4, deepseek_v32

    modules = {"deepseekv32": deepseek_v32, "deepseekv4": deepseek_v4}
    family = families[0]
    if len(families) > 1:
        if deepseek_v4.is_deepseek_v4(tokenizer):
            family = families[1]
        elif not deepseek_v32.is_deepseek_v32(tokenizer) and tokenizer.chat_template:
            return from_tokenizer(tokenizer, origin="the tokenizer's chat template (deepseek, before V3.2)")
    encoder = modules[family]
    failures = (*FAILURES, deepseek_v32.DS32EncodingError)

    def write(messages: list[Any], tools: list[Any] | None, generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
        try:
            return str(encoder.render_messages(messages, tools=tools, thinking_mode=_thinking(kwargs)))
        except failures as error:
            raise CannotRender(f"the encoder fails with {type(error).__name__}") from None

    origin = f"the encoder of miles-tito-tokenizers ({family})"
    return Renderer(tokenizer, write, origin=origin, subject={"encoder": family}, json=True, family=family)


def _thinking(kwargs: Mapping[str, Any]) -> str:
    """Return the thinking mode. SGLang reads one setting for these families, and thinks only on request."""
    return "thinking" if kwargs.get("thinking") else "chat"
