"""Auxiliary requests to SGLang (0.5.23, `serving_tokenize.py`, `http_server.py`), and settings that prevent resuming.
No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from miles_router.engines.questions import EngineQuestion

TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
#: Sampling parameters and request fields that depend on the earlier output. In a resumed request that output is part of
#: the prompt, so they would act differently. The last ones make answers that cannot be joined.
STATEFUL = frozenset(
    (
        *("regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "custom_params", "watermark"),
        *("custom_logit_processor", "max_thinking_tokens", "require_reasoning", "session_params", "input_embeds"),
        *("positional_embed_overrides", "return_hidden_states", "return_entropy"),
        "return_flat_raw_output_top_logprobs",
    )
)


def prompt_tokens(text: str) -> EngineQuestion[list[int]]:
    """Return the request for the ids of a `/generate` prompt, with special tokens added."""
    return EngineQuestion(TOKENIZE, {"prompt": text}, _ids)


def chat_tokens(chat: Mapping[str, Any]) -> EngineQuestion[list[int]]:
    """Return the request for the prompt ids that the chat template renders."""
    fields = {name: value for name, value in chat.items() if name not in ("stream", "stream_options")}
    return EngineQuestion(TOKENIZE, fields, _ids)


def texts(ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> EngineQuestion[list[str]]:
    """Return the request for the text of each list of ids."""
    body = {"tokens": list(ids), "skip_special_tokens": skip_special_tokens}
    return EngineQuestion(DETOKENIZE, body, partial(_texts, len(ids)))


def reasoning(text: str, parser: str) -> EngineQuestion[tuple[str, str]]:
    """Return the request that splits a complete answer into reasoning and the rest."""
    return EngineQuestion("/separate_reasoning", {"text": text, "reasoning_parser": parser}, _reasoning)


def calls(text: str, tools: Sequence[Any], parser: str) -> EngineQuestion[tuple[str, list[Any]]]:
    """Return the request that extracts tool calls from a complete answer: `name`, `parameters` and `tool_index` of
    each."""
    body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
    return EngineQuestion("/parse_function_call", body, _calls)


def _ids(answer: Mapping[str, Any]) -> list[int] | None:
    return _list(answer.get("tokens"), lambda each: isinstance(each, int))


def _texts(count: int, answer: Mapping[str, Any]) -> list[str] | None:
    found = _list(answer.get("text"), lambda each: isinstance(each, str))
    return found if found is not None and len(found) == count else None


def _reasoning(answer: Mapping[str, Any]) -> tuple[str, str] | None:
    found, rest = answer.get("reasoning_text"), answer.get("text")
    if not isinstance(found, str | None) or not isinstance(rest, str | None):
        return None
    return found or "", rest or ""


def _calls(answer: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    rest, found = answer.get("normal_text"), _list(answer.get("calls"), _is_call)
    return None if not isinstance(rest, str) or found is None else (rest, found)


def _is_call(call: object) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("name"), str) and isinstance(call.get("parameters"), str)


def _list(found: object, is_one: Callable[[object], bool]) -> list[Any] | None:
    return found if isinstance(found, list) and all(map(is_one, found)) else None
