"""What an agent makes of chat answers, as the official client reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk


class Streamed(NamedTuple):
    """What a stream said."""

    message: Any
    finish: str | None
    usage: Any


def plain(message: Any) -> Any:
    """A message without the names of its calls, which are made up."""
    calls = [{**call, "id": None} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls}


def read_stream(chunks: Sequence[Any]) -> Streamed:
    """A stream, every chunk of which the client takes."""
    state, usage = ChatCompletionStreamState(), None
    for chunk in chunks:
        assert usage is None, "it comes last"
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        usage = chunk.get("usage") if not chunk["choices"] else None
    (choice,) = state.current_completion_snapshot.choices
    message = choice.message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
    return Streamed(plain(message), choice.finish_reason, usage)
