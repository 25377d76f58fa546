"""What a streamed turn costs the router for each token, by what stands underneath: the engine's chat endpoint, whose
chunks are parsed already, or `/generate`, whose text is parsed here.

    python -m tests.benchmarks.turn_streams [--tokens 500 2000 8000]

Both streams are made of the same scripted answer: reasoning, words, and a tool call at its end. Measured is CPU time of
this process for what happens to their events between the worker and the agent: chat as sessions do it, `/generate` as
they would (`GrowingAnswer`, `GrowingText`, the deltas that are new), cumulative as engines stream by default, and
incremental (`--incremental-streaming-output`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.session import AgentRequest, Session
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.events import Event, write_event
from miles_router.engines.growing import GrowingAnswer
from miles_router.engines.openai.chat import ChatEndpoint, tools_by_name
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.rest import missing_deltas
from miles_router.engines.parsers.growing import GrowingText
from miles_router.engines.parsers.local import FAMILIES
from tests.support.session_trial import ADD, ASK_ADD, qwen3

HEAD = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m"}
FIELDS: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [ADD], "stream": True}


def answer(tokens: int) -> list[str]:
    """The tokens of an answer, each with its text."""
    words = "I think of it, and of what it may be, for long. " * tokens
    tokenizer = qwen3()
    thought = tokenizer.encode("<think>\n" + words)[: tokens // 2]
    said = tokenizer.encode("</think>\n\n" + words)[: tokens // 2 - 40]
    return [tokenizer.decode([token]) for token in [*thought, *said, *tokenizer.encode(f"\n{ASK_ADD}")]]


def chat_events(pieces: list[str]) -> Iterator[bytes]:
    """The chunks of the engine's chat endpoint, about: one for each token, with its logprob."""
    thinking = True
    for piece in pieces:
        entry = {"token": piece, "bytes": list(piece.encode()), "logprob": -0.5, "top_logprobs": []}
        thinking = thinking and piece != "</think>"
        delta = {"reasoning_content" if thinking else "content": piece}
        yield write_event({**HEAD, "choices": [_choice(delta, {"content": [entry]})]})
    yield write_event({**HEAD, "choices": [{**_choice({}), "finish_reason": "stop"}]})
    ids = [list(range(len(pieces)))]
    yield write_event({**HEAD, "choices": [], "sglext": {"input_ids": [1, 2, 3], "output_ids": ids}})


def _choice(delta: Any, logprobs: Any = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None}


def generate_events(pieces: list[str], *, incremental: bool) -> Iterator[bytes]:
    for end in range(1, len(pieces) + 1):
        begin = end - 1 if incremental else 0
        ids = list(range(begin, end))
        meta = {
            "id": "r",
            "finish_reason": None if end < len(pieces) else {"type": "stop", "matched": 1},
            "prompt_tokens": 3,
            "completion_tokens": end,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        yield write_event({"text": "".join(pieces[begin:end]), "output_ids": ids, "meta_info": meta})


def by_chat(events: list[bytes]) -> None:
    """As a session relays a stream of chat."""
    parents = (ParentMatch(None, (), b""),)
    request = AgentRequest(Session("s", now=0.0, clock=0.0), ChatEndpoint.path, FIELDS, parents, 0.0)
    stream = TurnStream(request, FIELDS, ChatEndpoint(), ReplyWriter(), lambda: "1")
    for raw in events:
        stream.feed(Event.read(raw))
    stream.choices()


def by_generate(events: list[bytes]) -> None:
    """As it would relay a stream of `/generate`."""
    family, growing, shown = FAMILIES["qwen3"], GrowingAnswer(), GrowingMessage()
    names: dict[int, str] = {}
    text = GrowingText(
        family.thinking,
        True,
        family.calls,
        tools_by_name([ADD]),
        lambda _, place: names.setdefault(place, f"call_{place}"),
    )
    for raw in events:
        so_far = growing.add(Event.read(raw).parse())
        for delta in missing_deltas(shown.message(), *text.message(so_far["text"])):
            shown.add(delta)
            write_event({**HEAD, "choices": [_choice(delta)]})


def measured(work: Any, events: list[bytes], tokens: int) -> str:
    """Microseconds for each token, and how many megabytes the worker sent."""
    begin = time.process_time()
    work(events)
    spent = (time.process_time() - begin) / tokens * 1e6
    return f"{spent:,.0f} µs, {sum(map(len, events)) / 1e6:,.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 8000])
    print("| tokens | chat | `/generate`, incremental | `/generate`, cumulative |")
    print("| ---: | ---: | ---: | ---: |")
    for tokens in parser.parse_args().tokens:
        pieces = answer(tokens)
        count = len(pieces)
        row = [measured(by_chat, list(chat_events(pieces)), count)]
        row += [
            measured(by_generate, list(generate_events(pieces, incremental=each)), count)
            for each in ((True, False) if tokens <= 4000 else (True,))
        ]
        print(f"| {count:,} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
