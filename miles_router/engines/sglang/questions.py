"""What SGLang is asked beside generations (0.5.23, `serving_tokenize.py`, `http_server.py`), and the sampling that it
does not carry on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from miles_router.engines.questions import EngineQuestion

TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
#: Sampling parameters, and fields beside them, that depend on the output so far: what was sampled is output no longer
#: once it is given as prompt. And answers that are not joined.
STATEFUL = frozenset(
    (
        *("regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "custom_params", "watermark"),
        *("custom_logit_processor", "max_thinking_tokens", "require_reasoning", "session_params", "input_embeds"),
        *("positional_embed_overrides", "return_hidden_states", "return_sampling_mask", "return_entropy"),
        "return_flat_raw_output_top_logprobs",
    )
)


def prompt_tokens(text: str) -> EngineQuestion[list[int]]:
    """Ask for the tokens of a prompt, special ones added, as `/generate` has them."""
    return EngineQuestion(TOKENIZE, {"prompt": text}, _ids)


def chat_tokens(chat: Mapping[str, Any]) -> EngineQuestion[list[int]]:
    """Ask for the prompt that the template makes of a chat request."""
    fields = {name: value for name, value in chat.items() if name not in ("stream", "stream_options")}
    return EngineQuestion(TOKENIZE, fields, _ids)


def texts(ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> EngineQuestion[list[str]]:
    """Ask for the text of each of these ids."""
    body = {"tokens": list(ids), "skip_special_tokens": skip_special_tokens}
    return EngineQuestion(DETOKENIZE, body, partial(_texts, len(ids)))


def reasoning(text: str, parser: str) -> EngineQuestion[tuple[str, str]]:
    """Ask for the reasoning in a whole answer, and the rest of it."""
    return EngineQuestion("/separate_reasoning", {"text": text, "reasoning_parser": parser}, _reasoning)


def calls(text: str, tools: Sequence[Any], parser: str) -> EngineQuestion[tuple[str, list[Any]]]:
    """Ask for a whole answer without its tool calls, and those: `name`, `parameters` and `tool_index` of each."""
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
