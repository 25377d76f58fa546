"""Write records with all fields that miles' record-based collection reads (radixark/miles, `SessionRecord`). The
request contains its whole history and the prompt ids; the response contains the sampled ids and their logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.export.masks import Decode
from middleware_hub.openai_session.export.records import Classified, record
from middleware_hub.openai_session.sessions.rewards import RewardEntry
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Classification, Turn, read_key
from miles_router.trajectory import Trajectory

#: Above this number of ids and messages, records are streamed instead of collected.
AT_ONCE = 200_000
FORMS = FULL, COMPACT = ("full", "compact")


def is_large(turns: Sequence[Turn]) -> bool:
    """Return whether full records of these turns are too large to collect in memory."""
    return sum(turn.tokens + turn.messages for turn in turns) > AT_ONCE


def full_parts(
    session_id: str, turns: Sequence[Classified], metadata: Mapping[str, Any], decode: Decode
) -> Iterator[bytes]:
    """Yield the answer to `GET /sessions/{id}`, one part for each turn. Turns are immutable, so this may run in a
    thread."""
    spelled: dict[int, str] = {}

    def token(number: int) -> str:
        if number not in spelled:
            spelled[number] = decode([number])
        return spelled[number]

    yield b'{"session_id":%b,"records":[' % orjson.dumps(session_id)
    for place, each in enumerate(turns):
        written = orjson.dumps(full_record(*each, token), default=dict, option=orjson.OPT_SERIALIZE_NUMPY)
        yield b"," + written if place else written
    yield b'],"metadata":%b}' % orjson.dumps(metadata, default=dict, option=orjson.OPT_SERIALIZE_NUMPY)


def line_metadata(session: Session) -> dict[str, Any]:
    """Return the token fields by which miles trims the turns of a session without branches; empty if there are
    branches."""
    leaves = session.leaves()
    if len(leaves) != 1:
        return {}
    dropped = max(turn.dropped for turn in session.turns)
    return {"accumulated_token_ids": leaves[0].trajectory().tokens, "max_trim_tokens": dropped}


def full_record(
    turn: Turn, found: Classification, rewards: Sequence[RewardEntry], token: Callable[[int], str]
) -> dict[str, Any]:
    """Return the compact record, with the whole request and response in place of its shortened ones.

    Args:
        token: returns the text of an id.
    """
    compact, line, whole = record(turn, found, rewards), turn.line(), turn.trajectory()
    history = [message for each in line for message in (*each.appended, each.answer)][:-1]
    tools, settings = read_key(turn.context)
    request: dict[str, Any] = {
        **compact["request"],
        "messages": history,
        "input_ids": whole.tokens[: turn.prompt_tokens],
    }
    sent = line[0].sent_tools or tools
    request |= {"tools": sent} if sent else {}
    request |= {"chat_template_kwargs": settings} if settings else {}
    return {**compact, "request": request, "response": _response(turn, whole, token)}


def _response(turn: Turn, whole: Trajectory, token: Callable[[int], str]) -> dict[str, Any]:
    prompt = turn.prompt_tokens
    sampled, logprobs = whole.tokens[prompt:].tolist(), whole.logprobs[prompt:].tolist()
    content = [
        {"token": token(number), "token_id": number, "logprob": logprob, "top_logprobs": []}
        for number, logprob in zip(sampled, logprobs, strict=True)
    ]
    choice = {
        "index": turn.choice,
        "message": turn.answer,
        "finish_reason": turn.finish_reason,
        "prompt_token_ids": whole.tokens[:prompt],
        "logprobs": {"content": content},
        "meta_info": _meta_info(turn, sampled, logprobs),
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": len(sampled), "total_tokens": prompt + len(sampled)}
    return {
        "id": turn.facts.get("rid"),
        "object": "chat.completion",
        "created": int(turn.facts.get("answered_at") or 0),
        "choices": [choice],
        "usage": usage,
    }


def _meta_info(turn: Turn, sampled: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the fields of SGLang's `meta_info` that are known."""
    asked, answered = turn.facts.get("asked_at"), turn.facts.get("answered_at")
    versions = [piece.version for piece in turn.sampled if piece.version is not None]
    facts = {
        "id": turn.facts.get("rid"),
        "cached_tokens": turn.facts.get("cached_tokens"),
        "weight_version": versions[-1] if versions else None,
        "e2e_latency": answered - asked if asked is not None and answered is not None else None,
    }
    return {
        **{name: value for name, value in facts.items() if value is not None},
        "finish_reason": {"type": turn.finish_reason},
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": len(sampled),
        "output_token_logprobs": [[*pair, None] for pair in zip(logprobs, sampled, strict=True)],
    }
