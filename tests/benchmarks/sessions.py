"""What a session costs the router: CPU time of each turn as the history grows, and memory of what is held.

    python -m tests.benchmarks.sessions [--quick] [--api messages|responses] [--sessions 32] [--turns 50]

Sessions whose history grows to some 32,000 tokens: each turn adds a tool's result and an answer. The layer runs in this
process around an engine that answers at once, whose own time is taken off. Beside it, on the same histories:

    read     parsing the request and writing it again, which every router pays that changes a request
    render   what a router without sessions does for exact ids: render the whole history and encode it
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import orjson
from transformers import AutoTokenizer

from middleware_hub.openai_session_middleware import OpenAISessionMiddleware
from miles_router.app import create_app
from miles_router.serving.server import collect_garbage_less
from miles_router.settings.config import RouterConfig
from miles_router.trajectory import Trajectory
from tests.benchmarks.procstat import resident_bytes
from tests.benchmarks.report import environment, number, table
from tests.support.tokenizers import tokenizer_directory

TARGET_TOKENS = 32_000
SAMPLED_SHARE = 0.4
WORDS = ("the", "of", "sum", "tool", "result", "value", "item", "page", "error", "line", "query", "answer", "42", "id")
STOP = 151645  # <|im_end|>


@dataclass
class Curve:
    """Times by turn, over all sessions (seconds of CPU)."""

    session: dict[int, list[float]] = field(default_factory=dict)
    read: dict[int, list[float]] = field(default_factory=dict)
    render: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)


def chat_request(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "m", "messages": messages, "max_tokens": 500}


def messages_request(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same as Anthropic's clients write it."""
    system, *others = messages
    blocks = [{"role": each["role"], "content": [{"type": "text", "text": each["content"]}]} for each in others]
    return {"model": "m", "system": system["content"], "messages": blocks, "max_tokens": 500}


def responses_request(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same as OpenAI's newer clients write it."""
    system, *others = messages
    kinds = {"user": "input_text", "assistant": "output_text"}
    items = [
        {"type": "message", "role": each["role"], "content": [{"type": kinds[each["role"]], "text": each["content"]}]}
        for each in others
    ]
    return {"model": "m", "instructions": system["content"], "input": items, "max_output_tokens": 500}


#: By API: where agents ask, how they write a conversation, and what the answer says.
APIS: Mapping[str, tuple[str, Callable[[list[dict[str, Any]]], dict[str, Any]], Callable[[Any], str]]] = {
    "chat": ("/v1/chat/completions", chat_request, lambda answer: str(answer["choices"][0]["message"]["content"])),
    "messages": ("/v1/messages", messages_request, lambda answer: str(answer["content"][0]["text"])),
    "responses": ("/v1/responses", responses_request, lambda answer: str(answer["output"][0]["content"][0]["text"])),
}


@functools.cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_directory("qwen3"))


class Engine:
    """Answers at once with tokens that it made up before; keeps the CPU time it takes."""

    def __init__(self, tokens: int, seed: int) -> None:
        source = random.Random(seed)
        words = " ".join(source.choice(WORDS) for _ in range(tokens))
        ids: list[int] = _tokenizer().encode(words)[: tokens - 1]
        self.triples = [[-source.random(), token, None] for token in [*ids, STOP]]
        #: What the ids say: a session looks whether its message is all of it.
        self.text = _tokenizer().decode(ids)
        self.seconds = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = time.process_time()
        body = self.answer(orjson.loads((await receive())["body"]))  # which is gone before the clock stops
        self.seconds += time.process_time() - begun
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def answer(self, asked: Mapping[str, Any]) -> bytes:
        answer = self._answer()
        if asked.get("return_prompt_token_ids"):
            answer["choices"][0]["prompt_token_ids"] = asked.get("input_ids") or [1] * 200
        return orjson.dumps(answer)

    def _answer(self) -> dict[str, Any]:
        meta = {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": STOP},
            "completion_tokens": len(self.triples),
            "output_token_logprobs": self.triples,
            "weight_version": "1",
            "weight_versions": [{"version": "1", "start": 0, "end": len(self.triples)}],
            "cached_tokens": 0,
        }
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": "stop",
            "matched_stop": STOP,
            "meta_info": meta,
        }
        return {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


async def call(app: Any, path: str, body: bytes) -> tuple[bytes, float]:
    """One request through an ASGI app: the reply's body, and the CPU time it took."""
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        parts.append(message.get("body", b""))

    begun = time.process_time()
    await app(scope, receive, send)
    return b"".join(parts), time.process_time() - begun


def timed(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


async def episode(
    layer: OpenAISessionMiddleware, engine: Engine, tokenizer: Any, turns: int, curve: Curve, *, api: str
) -> None:
    path, request, text_of = APIS[api]
    given = TARGET_TOKENS / turns * (1 - SAMPLED_SHARE)
    source = random.Random(len(layer.store))
    session = layer.store.create()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent."}]
    for turn in range(turns):
        words = [source.choice(WORDS) for _ in range(int(given))]
        messages.append({"role": "user", "content": " ".join(words)})
        body = orjson.dumps(request(messages))
        engine.seconds = 0.0
        reply, seconds = await call(layer, f"/sessions/{session.id}{path}", body)
        curve.session.setdefault(turn, []).append(seconds - engine.seconds)
        curve.tokens.setdefault(turn, []).append(session.turns[-1].tokens)
        curve.read.setdefault(turn, []).append(timed(lambda: orjson.dumps(orjson.loads(body))))  # noqa: B023
        if len(layer.store) <= 2:
            rendered = lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=True)  # noqa: E731
            curve.render.setdefault(turn, []).append(timed(rendered))
        messages.append({"role": "assistant", "content": text_of(orjson.loads(reply))})


async def measured(sessions: int, turns: int, api: str) -> tuple[Curve, dict[str, float]]:
    """Every session in turn, and what the process grew by."""
    directory = tokenizer_directory("qwen3")
    router = create_app(RouterConfig(hf_checkpoint=directory)).router
    engine = Engine(int(TARGET_TOKENS / turns * SAMPLED_SHARE), seed=1)
    layer = OpenAISessionMiddleware(engine, router=router, max_turns=10_000)
    curve = Curve()
    await episode(layer, engine, router.tokenizer, 3, Curve(), api=api)  # what is loaded and cached at the first turn
    collect_garbage_less()  # as the server does
    before = resident_bytes()
    for at in range(sessions):
        await episode(layer, engine, router.tokenizer, turns, curve, api=api)
        print(f"\r{at + 1}/{sessions} sessions", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    held = list(layer.store)[1:]
    tokens = sum(len(turn.given) + sum(map(len, turn.sampled)) for session in held for turn in session.turns)
    arrays = sum(Trajectory((turn.given, *turn.sampled)).nbytes for session in held for turn in session.turns)
    text = sum(len(orjson.dumps([*turn.appended, turn.answer])) for session in held for turn in session.turns)
    memory = {"tokens": tokens, "grown": resident_bytes() - before, "arrays": arrays, "text": text}
    return curve, {name: float(value) for name, value in memory.items()}


def shown(curve: Curve, memory: Mapping[str, float], *, markdown: bool) -> str:
    last = max(curve.session)
    places = sorted({0, 1, *(round(last * part / 5) for part in range(1, 6))})
    rows = [
        [
            number(turn + 1, 0), number(median(curve.tokens[turn]), 0),
            *(number(median(times[turn]) * 1e3, 2) for times in (curve.session, curve.read, curve.render)),
        ]
        for turn in places
    ]  # fmt: skip
    times = table(["turn", "tokens", "session ms", "read ms", "render ms"], rows, markdown)
    tokens = memory["tokens"]
    held = [
        number(tokens, 0), number(memory["arrays"] / tokens, 1), number(memory["text"] / tokens, 1),
        number(memory["grown"] / tokens, 1),
    ]  # fmt: skip
    return (
        times
        + "\n"
        + table(["tokens held", "array bytes/token", "text bytes/token", "grown bytes/token"], [held], markdown)
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four sessions of ten turns: a smoke test")
    parser.add_argument("--api", choices=APIS, default="chat", help="what the agents speak (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=32, help="sessions (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=50, help="turns of each (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as GitHub markdown")
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.turns = 4, 10
    return options


def main() -> int:
    options = arguments()
    for name, value in environment().items():
        print(f"{name}: {value}")
    curve, memory = asyncio.run(measured(options.sessions, options.turns, options.api))
    print(shown(curve, memory, markdown=options.markdown))
    slowest = np.median(curve.session[max(curve.session)]) / np.median(curve.render[max(curve.render)])
    print(f"the last turn costs {slowest:.3f} of rendering and encoding its history")
    return 0


if __name__ == "__main__":
    sys.exit(main())
