"""Parse `/v1/chat/completions` bodies into the engine's requests, and refuse what SGLang refuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from miles_router.testing.worker.model.tool_calls import required_call
from miles_router.testing.worker.model.vocabulary import Tokenizer
from miles_router.testing.worker.routes.openai import SAMPLING_FIELDS, conversion, sampling_of
from miles_router.testing.worker.visit import Visit, invalid_body
from miles_router.testing.worker.wire.chat_messages import chat_prompt_ids
from miles_router.testing.worker.wire.chat_schema import problems_of
from miles_router.testing.worker.wire.generate_input import GenerateInput, parse_generate
from miles_router.testing.worker.wire.openai_parts import routed_rank

#: Fields of a request; other fields are ignored.
CHAT_FIELDS = (
    *("messages", "model", "input_ids", "tools", "tool_choice", "stream", "stream_options", "rid", "seed", "lora_path"),
    "extra_key",
    *("max_tokens", "max_completion_tokens", "min_tokens", "response_format", "logprobs", "top_logprobs"),
    *("chat_template_kwargs", "continue_final_message", "separate_reasoning"),
    *("return_routed_experts", "routed_experts_start_len", "return_cached_tokens_details", "return_meta_info"),
    "return_indexer_topk",  # only in SGLang's builds for training
    *("return_prompt_token_ids", "return_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext"),
    *SAMPLING_FIELDS,
)
_NOT_WHILE_STREAMING = {
    "return_prompt_token_ids": "return_prompt_token_ids is not supported with streaming. "
    "Please set stream=false when using return_prompt_token_ids=true.",
    "return_token_ids": "return_token_ids is not supported with streaming on /v1/chat/completions. "
    "Please set stream=false when using return_token_ids=true.",
    "return_meta_info": "return_meta_info is not supported with streaming. "
    "Please set stream=false when using return_meta_info=true.",
}


@dataclass(slots=True)
class ChatInput:
    """A parsed chat request: the engine's input and the options of the answer."""

    given: GenerateInput
    body: dict[str, Any]
    model: str
    copies: int
    parses_tools: bool
    separates_reasoning: bool

    @property
    def thinking(self) -> bool:
        """True if the answer begins inside its reasoning. Requests disable it by `enable_thinking: false`."""
        return (self.body.get("chat_template_kwargs") or {}).get("enable_thinking") is not False

    @property
    def tool_names(self) -> list[str]:
        """The names of the request's tools."""
        return [tool["function"]["name"] for tool in self.body.get("tools") or ()]

    def asks(self, name: str) -> bool:
        return bool(self.body.get(name))


def parse_chat(visit: Visit, body: dict[str, Any]) -> ChatInput:
    """Parse a chat request.

    Raises:
        ValueError: SGLang answers this request with 400.
        Refusal: the body does not match SGLang's schema.
    """
    _validate(body)
    tokenizer = visit.engine.model.tokenizer
    with conversion():
        native = _native_body(body, tokenizer)
    native |= {"routed_dp_rank": routed_rank(visit, body), "lora_path": visit.adapter_in(body)}
    given = parse_generate(native, visit.engine, turn=True)
    if _is_forced(body):
        for sample in given.samples:
            sample.script = required_call(body["tools"], body["tool_choice"], tokenizer, sample.noise)
    parses = bool(visit.settings.tool_call_parser and body.get("tools") and body.get("tool_choice") != "none")
    separates = bool(visit.settings.reasoning_parser and body.get("separate_reasoning", True))
    model, copies = str(body.get("model") or "default"), int(body.get("n") or 1)
    chat = ChatInput(given, body, model, copies, parses, separates)
    if visit.settings.script is not None:
        thinks = bool(visit.settings.reasoning_parser) and chat.thinking
        for sample in given.samples:
            sample.script = (
                visit.settings.script.play(body, sample.input_ids, tokenizer, thinks=thinks) or sample.script
            )
    return chat


def _native_body(body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Translate a chat request into a `/generate` body."""
    for field, message in _NOT_WHILE_STREAMING.items():
        if body.get("stream") and body.get(field):
            raise ValueError(message)
    if body.get("return_sampling_mask") and not body.get("return_meta_info"):
        raise ValueError("return_sampling_mask requires return_meta_info=true.")
    return {
        "input_ids": chat_prompt_ids(body, tokenizer),
        "sampling_params": _sampling_params(body),
        "rid": body.get("rid"),
        "stream": body.get("stream"),
        "return_logprob": body.get("logprobs"),
        "top_logprobs_num": body.get("top_logprobs") or 0,
        "return_text_in_logprobs": True,
        "return_sampling_mask": body.get("return_sampling_mask"),
        "return_routed_experts": body.get("return_routed_experts"),
        "routed_experts_start_len": body.get("routed_experts_start_len"),
        "return_indexer_topk": body.get("return_indexer_topk"),
        "return_prompt_token_ids": True,
        "extra_key": body.get("extra_key"),
    }


def _validate(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if "messages" not in body:
        raise invalid_body({"type": "missing", "loc": ("body", "messages"), "msg": "Field required"})
    if problems := problems_of(body):
        raise invalid_body(*problems)
    if not messages:
        raise ValueError("Messages cannot be empty.")
    choice, tools = body.get("tool_choice"), body.get("tools")
    for n, tool in enumerate(tools or ()):
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, Mapping | bool | None):
            raise ValueError(f"Tool {n} function has invalid 'parameters' schema: {parameters!r} is no object")
    if choice == "required" and not tools:
        raise ValueError("Tools cannot be empty if tool choice is set to required.")
    if isinstance(choice, Mapping):
        if not tools:
            raise ValueError("Tools cannot be empty if tool choice is set to a specific tool.")
        name = choice.get("function", {}).get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise ValueError(f"Tool '{name}' not found in tools list.")


def _is_forced(body: Mapping[str, Any]) -> bool:
    return body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), Mapping)


def _sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    params = sampling_of(body)
    if body.get("tools") and body.get("tool_choice") != "none":
        params["skip_special_tokens"] = False
    params["max_new_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens")
    schema = schema_of(body.get("response_format"))
    if schema is not None:
        params["json_schema"] = schema
    return params


def schema_of(response_format: Any) -> str | None:
    """Return the encoded JSON schema that a `response_format` requests, or None."""
    if not isinstance(response_format, Mapping):
        return None
    if response_format.get("type") == "json_object":
        return '{"type": "object"}'
    if response_format.get("type") != "json_schema":
        return None
    schema = (response_format.get("json_schema") or {}).get("schema")
    if schema is None:
        raise ValueError("schema_ is required for json_schema response format request.")
    return orjson.dumps(schema).decode()
