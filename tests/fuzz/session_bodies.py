"""Bodies that agents and trainers send: the routes of all three middlewares, over a whole router in this process.

An input is a list of requests with a line of `%%` between them. The first line of each is its method and path, lines
that begin with `> ` are headers, and the rest is its body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import uvloop

from miles_router.app import create_app
from miles_router.asgi.exchange import Message, Scope
from miles_router.settings.config import MiddlewareSpec, RouterConfig
from miles_router.testing import SimulatedWorker
from tests.fuzz.client_requests import defects
from tests.fuzz.target import Target, expand
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE
from tests.support.running_router import QUIET
from tests.support.session_trial import SESSIONS
from tests.support.waiting import until

SEPARATOR = b"\n%%\n"
START = re.compile(rb"(GET|POST|PUT|DELETE) (/[A-Za-z0-9/_.~:-]*)")
HEADER = re.compile(rb"[!-~]+")
#: How many answers, or alternatives, a request wants. A worker does its best to give millions, and nothing else.
COPIES = re.compile(rb'("(?:n|best_of|logprobs|top_logprobs|top_logprobs_num)"\s*:\s*)-?\d[\d.eE+-]+')
NAMES = ("a", "b")
MOST_REQUESTS = 8
#: Seconds for one answer: a generation has at most `CONTEXT` tokens.
LIMIT = 20.0
CONTEXT = 512
#: What everybody reads, whatever somebody has written.
READING = ("/sessions", "/trajectory/stats", "/router/info", "/metrics")
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
TEXT = '{"type": "text", "text": "Hi"}'
TOOL = '{"name": "f", "description": "d", "input_schema": {"type": "object"}}'
MESSAGE = '{"role": "user", "content": "Hi"}'
BODIES: dict[str, Sequence[str]] = {
    "/sessions": (
        '{"session_id": "a"}',
        '{"session_id": "a", "metadata": {"instance_id": "g"}}',
        '{"session_id": "b", "metadata": {"k": [1, null]}}',
        "{}",
        "",
    ),
    CHAT: (
        f'{{"model": "m", "max_tokens": 4, "messages": [{MESSAGE}]}}',
        f'{{"model": "m", "max_tokens": 4, "stream": true, "n": 2, "messages": [{MESSAGE}]}}',
        f'{{"model": "m", "max_tokens": 4, "logprobs": true, "top_logprobs": 2, "messages": [{MESSAGE}, {MESSAGE}]}}',
        '{"model": "m", "max_tokens": 4, "messages": [{"role": "assistant", "content": null, "tool_calls": []}]}',
        f'{{"messages": [{MESSAGE}], "max_tokens": 4, "tools": [{{"type": "function", "function": {{"name": "f"}}}}]}}',
    ),
    MESSAGES: (
        f'{{"model": "m", "max_tokens": 4, "messages": [{MESSAGE}]}}',
        f'{{"model": "m", "max_tokens": 4, "stream": true, "system": [{TEXT}], "messages": [{MESSAGE}]}}',
        f'{{"model": "m", "max_tokens": 4, "tools": [{TOOL}], "tool_choice": {{"type": "any"}}, '
        f'"messages": [{MESSAGE}, '
        f'{{"role": "assistant", "content": [{TEXT}, {{"type": "thinking", "thinking": "h", "signature": "s"}}, '
        '{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]}, {"role": "user", "content": '
        f'[{{"type": "tool_result", "tool_use_id": "c", "content": [{TEXT}]}}]}}]}}',
        f'{{"model": "m", "max_tokens": 4, "thinking": {{"type": "adaptive"}}, "messages": [{MESSAGE}, '
        f'{{"role": "system", "content": "x"}}, {{"role": "assistant", "content": "y"}}], "stop_sequences": ["z"]}}',
    ),
    COUNT: (f'{{"model": "m", "messages": [{MESSAGE}]}}',),
    "/v1/completions": ('{"prompt": "Hi", "max_tokens": 4}', '{"prompt": [1, 2], "max_tokens": 4, "stream": true}'),
    "/samples": ("{}", '{"branches": "all", "format": "safetensors"}', '{"reward": 1.0, "label": "x"}'),
    "/session/finalize": ('{"session_id": "a", "instance_id": "g", "reward": 1}', '{"trajectory_id": "b"}'),
    "/session/discard": ('{"session_id": "a"}', '{"trajectory_id": "c"}'),
    "/trajectory/read": ('{"session_id": "a"}', '{"instance_id": "g", "max_groups": 1, "drain": true}', "{}"),
    "/generate": (
        '{"text": "Hi there", "sampling_params": {"max_new_tokens": 4}}',
        '{"text": ["Hi", "Ho"], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": true}',
        '{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "stream": true, "rid": "r"}',
        '{"input_ids": [[1], [2]], "sampling_params": [{"max_new_tokens": 4}, {"max_new_tokens": 2}]}',
    ),
    "/retrieve_from_text": ('{"text": "Hi there"}', '{"texts": ["Hi", "Ho"]}', '{"rid": "r"}', '{"rids": ["r"]}'),
    "/routed_experts": (
        '{"rid": "r"}',
        '{"session_id": "a", "leaf": 0}',
        '{"text": "Hi there"}',
        '{"start": 1, "rid": "r"}',
    ),
}
ODD: tuple[bytes, ...] = (
    b"null",
    b"[]",
    b"{}",
    b"[[]]",
    b"-1",
    b"1.5",
    b"1e400",
    b"2147483648",
    b"-9223372036854775809",
    b'""',
    b"true",
)
ODD += (b'"\\ud800"', b"NaN", b'"\\u0000"', b'{"a": {}}', b"<<300*[>>1<<300*]>>", b"<<2000*[>>", b'["x"]', b"[null]")
ODD += (b'{"role": "tool"}', b'"<<70000*x>>"', b'"user"', b'"system"', b"[1e9]", b'{"type": "text", "text": 1}')
ODD += (b'{"type": "tool_use"}', b'[{"type": "tool_reference", "tool_name": "f"}]', b'[{"type": "redacted_thinking"}]')
FIELDS = (
    b"session_id metadata messages role content tool_calls n stop input_ids text sampling_params rid "
    b"instance_id reward label branches max_groups logprobs tools stream stream_options leaf start "
    b"return_logprob prompt echo logit_bias system input input_schema tool_use_id thinking signature "
    b"defer_loading tool_name type"
).split()


@dataclass
class Answer:
    """What one request was answered."""

    status: int = 0
    body: bytes = b""
    whole: bool = False

    @property
    def refusal(self) -> str:
        """The type of an error of the router's own; "" for anything else."""
        try:
            error = json.loads(self.body)["error"]
            if "details" in error:  # in the words of another API
                return str(error["details"]["error_code"])
            return str(error["type"]) if set(error) == {"type", "message", "request_id"} else ""
        except (ValueError, KeyError, TypeError):
            return ""


@dataclass
class House:
    """A router with the three middlewares and one simulated worker."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def open(self) -> None:
        worker = SimulatedWorker(tokenizer=checkpoint(), moe=MOE, weight_version="1", context_len=CONTEXT, log_limit=4)
        await self.stack.enter_async_context(worker)
        layers = [MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE), MiddlewareSpec(EXPERTS, {"moe_shape": SHAPE})]
        self.app = create_app(
            RouterConfig(
                worker_urls=(worker.url,),
                middlewares=tuple(layers),
                hf_checkpoint=checkpoint(),
                health_check_interval=QUIET,
            )
        )
        await self.stack.enter_async_context(self.app.running())
        pool = self.app.router.pool
        await until(lambda: all(each.weight_version for each in pool), "the worker's weight version")

    async def ask(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> Answer:
        """One request, past the socket."""
        answer, given = Answer(), False
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"router.test"), (b"content-type", b"application/json"), *headers],
            "server": ("127.0.0.1", 1),
            "client": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
            "state": {},
            "extensions": {},
        }

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
            else:
                answer.body += message.get("body", b"")
                answer.whole = not message.get("more_body", False)

        await asyncio.wait_for(self.app(scope, receive, send), LIMIT)
        return answer

    def counts(self) -> dict[str, float]:
        """What is held, and how much was ever recorded."""
        held: dict[str, float] = {}
        names = {"openai_sessions": ("sessions", "bytes", "turns"), "radix_tree": ("entries", "tokens")}
        for layer, wanted in {**names, "routed_experts": ("generations", "bytes")}.items():
            numbers = self.app.router.statistics[layer]()
            held |= {f"{layer}.{name}": float(str(numbers[name])) for name in wanted}
        return held


class SessionBodies(Target):
    """Any bodies, in any order, on the routes of sessions, samples, texts and rows.

    - Every answer is whole and below 500, and no defect is logged, whoever has sent what before.
    - What the router refuses with a 4xx has changed nothing that is held.
    - What everybody reads can still be read: lists, statistics, metrics.
    - Once all sessions are deleted none is counted, no byte of theirs, and nothing is in flight.
    """

    name = "session-bodies"
    runs = 200
    tokens = (*ODD, *(b'"%b": ' % name for name in FIELDS), SEPARATOR, b"> X-Session-Id: a\n", b"> X-Turn-Id: 1\n")

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        logging.getLogger("aiohttp.server").disabled = True  # the worker's own defects are not looked for
        self._house = House()
        self._loop.run_until_complete(self._house.open())

    def close(self) -> None:
        logging.getLogger("aiohttp.server").disabled = False
        self._loop.run_until_complete(self._house.stack.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def generate(self, dice: random.Random) -> bytes:
        requests = []
        if dice.random() < 0.8:
            requests.append(_with_odd_value(dice, f"POST /sessions\n{dice.choice(BODIES['/sessions'][:2])}".encode()))
        if dice.random() < 0.6:
            requests.append(f"POST /sessions/a{CHAT}\n{BODIES[CHAT][0]}".encode())
        requests += [_request(dice) for _ in range(dice.randint(1, 3))]
        return SEPARATOR.join(requests)

    def check(self, data: bytes) -> Hashable:
        with defects() as logged:
            try:
                seen: Hashable = self._loop.run_until_complete(self._check(data))
            finally:
                self._loop.run_until_complete(self._clean())
            assert not logged, f"logged: {logged[0]}"
        return seen

    async def _check(self, data: bytes) -> Hashable:
        house, seen = self._house, []
        for method, path, headers, body in requests_in(data):
            before = house.counts()
            answer = await house.ask(method, path, headers, body)
            what = f"{method} {path} {body[:300]!r} was answered {answer.status} {answer.body[:300]!r}"
            assert answer.whole, f"{what}, which is not whole"
            assert answer.status < 500 or not answer.refusal, what
            if 400 <= answer.status < 500 and answer.refusal:
                after = house.counts()
                assert after == before, f"{what}, and changed {before} to {after}"
            seen.append((path.replace("b", "a"), answer.status, answer.refusal, len(answer.body) > 2))
        for path in READING:
            answer = await house.ask("GET", path)
            assert answer.status == 200, f"{path}: {answer.status} {answer.body[:300]!r}"
        answer = await house.ask("POST", "/trajectory/read", body=b"{}")
        assert answer.status == 200, f"reading all: {answer.status} {answer.body[:300]!r}"
        return tuple(seen)

    async def _clean(self) -> None:
        """Delete all sessions."""
        house = self._house
        listed = json.loads((await house.ask("GET", "/sessions")).body)["sessions"]
        for session in listed:
            answer = await house.ask("DELETE", f"/sessions/{session['session_id']}")
            assert answer.status == 204, answer.body
        counts = house.counts()
        held = counts["openai_sessions.sessions"], counts["openai_sessions.bytes"]
        assert held == (0, 0), f"{held[0]} sessions and {held[1]} bytes are left of none"
        assert house.app.router.pool.in_flight == 0, "a lease is left"


def _request(dice: random.Random) -> bytes:
    path, name = dice.choice((*BODIES, CHAT, CHAT)), dice.choice(NAMES)
    body = dice.choice(BODIES[path])
    headers = ""
    if path == CHAT and dice.random() < 0.2:
        headers = f"> X-Session-Id: {name}\n> X-Turn-Id: 1\n"
    elif path in (CHAT, MESSAGES, COUNT, "/v1/completions", "/samples"):
        path = f"/sessions/{name}{path}"
    if dice.random() < 0.1:
        method, path, body = dice.choice((("GET", f"/sessions/{name}", ""), ("DELETE", f"/sessions/{name}", "")))
    else:
        method = "POST"
    return _with_odd_value(dice, f"{method} {path}\n{headers}{body}".encode())


def _with_odd_value(dice: random.Random, request: bytes) -> bytes:
    """Often with another value for one of its fields, or for all of its body."""
    values = list(re.finditer(rb'(?<=: )("[^"]*"|[\d.]+|\{[^{}]*\}|\[[^\[\]]*\]|true|null)(?=[,}])', request))
    if not values or dice.random() < 0.4:
        return request
    if dice.random() < 0.1:
        return request[: request.index(b"\n{") + 1] + dice.choice(ODD)
    value = dice.choice(values)
    return request[: value.start()] + dice.choice(ODD) + request[value.end() :]


def requests_in(data: bytes) -> Iterator[tuple[str, str, list[tuple[bytes, bytes]], bytes]]:
    """Method, path, headers and body of each request; what is none is left out."""
    for text in data.split(SEPARATOR)[:MOST_REQUESTS]:
        first, *lines = text.split(b"\n")
        start = START.fullmatch(first)
        if start is None or start[2].startswith(b"/v1/rollout"):
            continue
        count = next((at for at, line in enumerate(lines) if not line.startswith(b"> ")), len(lines))
        pairs = [line[2:].partition(b": ") for line in lines[:count]]
        headers = [
            (name.lower(), value)
            for name, _, value in pairs
            if re.fullmatch(rb"[\w-]+", name) and HEADER.fullmatch(value)
        ]
        body = COPIES.sub(rb"\g<1>3", expand(b"\n".join(lines[count:])))
        yield start[1].decode(), start[2].decode(), headers, body
