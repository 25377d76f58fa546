"""Parts that OpenAI-style requests and answers share: ranks, errors, usage, logprobs, weight versions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from miles_router.testing.worker.model.vocabulary import Tokenizer
from miles_router.testing.worker.visit import Refusal, Visit, error_object, invalid_body


def require_json(visit: Visit) -> None:
    """Check that the content type is JSON.

    Raises:
        Refusal: 400, it is not.
    """
    if visit.content_type.lower().partition(";")[0].strip() != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise invalid_body({"loc": ["header", "content-type"], "msg": message, "type": "value_error"})


def routed_rank(visit: Visit, body: Mapping[str, Any]) -> Any:
    """Return the data-parallel rank that the request's header, else its body, names; None if neither does.

    Raises:
        Refusal: 400, the header is not an integer.
    """
    header = visit.exchange.header("x-data-parallel-rank")
    if header is None:
        return body.get("routed_dp_rank", body.get("data_parallel_rank"))
    try:
        return int(header)
    except ValueError:
        detail = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{header}'"
        raise Refusal(400, error_object(detail, 400, "Bad Request")) from None


async def refuse(visit: Visit, message: str, kind: str = "BadRequestError") -> web.StreamResponse:
    """Answer 400 with an OpenAI-style error."""
    return await visit.reply.json(error_object(message, 400, kind), 400)


def usage_of(metas: Sequence[dict[str, Any]], copies: int) -> dict[str, Any]:
    """Return the token counts of one answer. A prompt that is sampled several times counts once."""
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
    """Return the weight version fields that OpenAI-style answers have under `metadata`."""
    return {name: meta[name] for name in ("weight_version", "weight_versions") if name in meta}


def chat_logprobs(tokenizer: Tokenizer, triples: Sequence[Any], tops: Sequence[Any]) -> dict[str, Any]:
    """Build `logprobs` of a chat choice from the engine's `[logprob, id, text]` lists."""
    content = []
    for position, triple in enumerate(triples):
        alternatives = tops[position] if position < len(tops) else ()
        top = [_chat_token(tokenizer, alternative) for alternative in alternatives]
        content.append({**_chat_token(tokenizer, triple), "top_logprobs": top})
    return {"content": content}


def completion_logprobs(tokenizer: Tokenizer, triples: Iterable[Any], tops: Iterable[Any]) -> dict[str, Any]:
    """Build `logprobs` of a completion choice from the engine's `[logprob, id, text]` lists."""
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
    """Return a token's text. A token with part of a character is decoded as latin-1, byte by byte."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
