"""Pieces that the OpenAI-style answers share: errors, usage, logprobs, weight versions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from miles_router.testing.worker.model.vocabulary import Tokenizer
from miles_router.testing.worker.settings import JAX
from miles_router.testing.worker.visit import Refusal, Visit, error_object, invalid_body


def require_json(visit: Visit) -> None:
    """Refusal with 400 unless the body says that it is JSON."""
    if visit.content_type.lower().partition(";")[0].strip() != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise invalid_body({"loc": ["header", "content-type"], "msg": message, "type": "value_error"})


def adapter_of(visit: Visit, body: Mapping[str, Any]) -> Any:
    """The adapter that answers: by `base:adapter` in `model`, whatever the base, else by `lora_path`. Any other name is
    the base model's. SGLang-Jax reads `lora_path` alone, and that of completions."""
    if visit.settings.profile == JAX:
        return body.get("lora_path")
    model, served = str(body.get("model") or ""), visit.settings.served_model_name
    behind = model[len(served) :] if model.startswith(f"{served}:") else model[model.find(":") :]
    named = behind[1:].strip() if ":" in model and model != served else ""
    return named or body.get("lora_path")


def routed_rank(visit: Visit, body: Mapping[str, Any]) -> Any:
    """The rank that a request is pinned to: by its header, else by its body."""
    header = visit.exchange.header("x-data-parallel-rank")
    if header is None:
        return body.get("routed_dp_rank", body.get("data_parallel_rank"))
    try:
        return int(header)
    except ValueError:
        detail = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{header}'"
        raise Refusal(400, error_object(detail, 400, "Bad Request")) from None


async def refuse(visit: Visit, message: str, kind: str = "BadRequestError") -> web.StreamResponse:
    """400 in the OpenAI-style shape."""
    return await visit.reply.json(error_object(message, 400, kind), 400)


def usage_of(metas: Sequence[dict[str, Any]], copies: int) -> dict[str, Any]:
    """Token counts of one answer; a prompt sampled several times counts once."""
    prompt = sum(meta.get("prompt_tokens", 0) for meta in metas[::copies])
    completion = sum(meta.get("completion_tokens", 0) for meta in metas)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def metadata_of(meta: dict[str, Any]) -> dict[str, Any]:
    """The weight versions that an answer names outside `meta_info`."""
    return {name: meta[name] for name in ("weight_version", "weight_versions") if name in meta}


def chat_logprobs(tokenizer: Tokenizer, triples: Sequence[Any], tops: Sequence[Any]) -> dict[str, Any]:
    """`logprobs` of a chat choice from the engine's `[logprob, id, text]` lists."""
    content = []
    for position, triple in enumerate(triples):
        alternatives = tops[position] if position < len(tops) else ()
        top = [_chat_token(tokenizer, alternative) for alternative in alternatives]
        content.append({**_chat_token(tokenizer, triple), "top_logprobs": top})
    return {"content": content}


def completion_logprobs(tokenizer: Tokenizer, triples: Iterable[Any], tops: Iterable[Any]) -> dict[str, Any]:
    """`logprobs` of a completion choice."""
    triples = list(triples)
    return {
        "text_offset": [-1] * len(triples),
        "token_logprobs": [logprob for logprob, _, _ in triples],
        "tokens": [_lossless_text(tokenizer, token) for _, token, _ in triples],
        "top_logprobs": [None if row is None else _by_text(tokenizer, row) for row in tops],
    }


def _by_text(tokenizer: Tokenizer, row: Iterable[Any]) -> dict[str, float]:
    return {_lossless_text(tokenizer, token): logprob for logprob, token, _ in row}


def _chat_token(tokenizer: Tokenizer, triple: Sequence[Any]) -> dict[str, Any]:
    logprob, token, text = triple
    return {"token": text or "", "bytes": list(tokenizer.token_bytes(token)), "logprob": logprob}


def _lossless_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; a piece of a character is shown byte for byte as latin-1."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
