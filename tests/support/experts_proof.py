"""Routed experts against the account kept at the workers' proxies.

What a trajectory's rows must be is put together here from nothing but what the proxies saw: each go's own rows behind
those that had come before it, at the row that the go was asked to begin with. Row i is about token i.
"""

from __future__ import annotations

import asyncio
import base64
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import aiohttp
import numpy as np
import numpy.typing as npt

from miles_router import Router
from miles_router.asgi.exchange import Message, Receive, Scope, Send
from miles_router.middlewares.contract import ASGIApp
from miles_router.settings.config import MiddlewareSpec
from tests.support.chains import Piece, chain, check
from tests.support.generations import CHAT, GENERATE, Generation
from tests.support.oracle import common_length
from tests.support.recording_proxy import RecordingProxy
from tests.support.rollouts import generate, request_body
from tests.support.session_proof import Sample, line_of
from tests.support.waiting import PATIENCE

LAYERS, EXPERTS, TOP_K = 4, 8, 2  # of the real MoE model
DELIVER = "/routed_experts"

#: Expert ids, [rows, LAYERS, TOP_K].
Rows = npt.NDArray[Any]


def rows_of(encoded: str) -> Rows:
    """Rows as SGLang sends them. Each is checked to be a choice that the model can make."""
    rows = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4").reshape(-1, LAYERS, TOP_K)
    assert ((rows >= 0) & (rows < EXPERTS)).all()
    assert (rows[..., 0] != rows[..., 1]).all()
    return rows


def joined(parts: Iterable[Rows]) -> Rows:
    return np.concatenate([np.zeros((0, LAYERS, TOP_K), np.int32), *parts])


# What clients see


@dataclass
class Reply:
    """What the router said to a client."""

    path: str
    request: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


class Front:
    """A middleware, listed first: every reply as its client gets it."""

    replies: ClassVar[WeakKeyDictionary[Router, list[Reply]]] = WeakKeyDictionary()

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self._replies = Front.replies.setdefault(router, [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = Reply(scope["path"])
        self._replies.append(reply)

        async def keep(message: Message) -> None:
            reply.body += message.get("body", b"")
            await send(message)

        await self.app(scope, receive, keep)


FRONT = MiddlewareSpec("tests.support.experts_proof.Front", {})
CAPTURE = MiddlewareSpec("middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware", {})
KNOWING = replace(CAPTURE, options={"moe_shape": f"{LAYERS}x{EXPERTS}x{TOP_K}"})


def told_clients(router: Router) -> int:
    """No client of rollouts or agents was told experts. Says how many replies that are."""
    replies = [reply for reply in Front.replies[router] if reply.path == GENERATE or reply.path.endswith(CHAT)]
    assert all(reply.body and b"routed_experts" not in reply.body for reply in replies)
    return len(replies)


@dataclass
class Delivered:
    """An answer of `POST /routed_experts`."""

    rows: Rows
    rid: str | None


async def delivered(http: aiohttp.ClientSession, **asked: Any) -> Delivered:
    async with http.post(DELIVER, json=asked) as reply:
        body = await reply.read()
        assert reply.status == 200, body
        shape = [int(each) for each in reply.headers["X-Shape"].split(",")]
        assert reply.headers["X-Dtype"] == "uint8"
        return Delivered(np.frombuffer(body, np.uint8).reshape(shape), reply.headers.get("X-Rid"))


# Text rollouts


@dataclass
class Turn:
    """One request of a text rollout and its answers."""

    request_id: str
    prompt: str
    body: dict[str, Any]
    answers: list[dict[str, Any]]
    whole: bool  # its prompt is all that the turn before gave, and more


@dataclass
class TextRollouts:
    """`await TextRollouts(url).run()`: all at once, every second one streamed, every third with siblings, half of them
    calm: none of their texts is cut or stopped. No two begin with the same token. `long`: so many more tokens in every
    answer, and what is streamed is calm."""

    url: str
    count: int = 16
    length: int = 4
    long: int = 0
    turns: list[Turn] = field(default_factory=list)

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=10 * PATIENCE)
        async with aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(self._rollout(http, number) for number in range(self.count)))

    async def _rollout(self, http: aiohttp.ClientSession, number: int) -> None:
        dice = random.Random(number)
        calm = number % 4 in (1, 2) or (self.long > 0 and number % 2 == 0)
        text, whole = f"{chr(ord('A') + number)}: tell me of {number} things.\n", True
        for turn in range(self.length):
            body = self._body(dice, text, number, calm=calm)
            request_id = f"rollout-{number}.{turn}"
            answers = await generate(http, body, request_id)
            self.turns.append(Turn(request_id, text, body, answers, whole))
            answer = dice.choice(answers)
            whole, text = answer["meta_info"]["finish_reason"]["type"] == "length", text + answer["text"]
            if not calm and dice.random() < 0.3:
                whole, text = False, text[: -dice.randint(1, 6)]
            text += dice.choice((" and then", f"<|im_end|>\n{turn}", "", "\n\n", "é 世界"))

    def _body(self, dice: random.Random, text: str, number: int, *, calm: bool) -> dict[str, Any]:
        body = request_body(dice, text)
        params: dict[str, Any] = body["sampling_params"]
        body["stream"] = number % 2 == 0
        params["n"] = 2 if number % 3 == 0 else 1
        params["max_new_tokens"] += self.long
        if calm:
            params["ignore_eos"] = True
            params.pop("stop", None)
        return body


@dataclass
class Line:
    """A generation as the proxies know it: its tokens, and the rows that its goes brought from row `start` on."""

    turn: Turn
    rid: str
    text: str
    given: list[int]
    tokens: list[int]
    start: int
    own: Rows
    goes: list[Generation]
    #: All its rows. Several where several generations had brought those before `start`, not all alike.
    possible: list[Rows] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return len(self.turn.answers) == 1

    @property
    def arrived(self) -> float:
        return self.goes[0].arrived

    @property
    def answered(self) -> float:
        return self.goes[-1].answered


@dataclass
class Book:
    """All generations of some rollouts, by id."""

    lines: dict[str, Line] = field(default_factory=dict)
    behind_the_longest: int = 0  # generations that were asked for rows from the first one on that had not come before

    def transferred(self, proxies: Iterable[RecordingProxy]) -> int:
        """Rows that went through the proxies."""
        return sum(len(rows_of(go.experts)) for proxy in proxies for go in proxy.begun)

    @property
    def rows(self) -> int:
        """Those of all generations, as if each had brought all of its own."""
        return sum(len(line.tokens) - 1 for line in self.lines.values())


def book(proxies: Sequence[RecordingProxy], turns: Sequence[Turn]) -> Book:
    """What the proxies know of these turns."""
    made = Book()
    lines = [
        _line(turn, answer, chain(proxies, turn.request_id, answer, index=index, of=len(turn.answers)))
        for turn in turns
        for index, answer in enumerate(turn.answers)
    ]
    for line in sorted(lines, key=lambda line: line.arrived):
        _enter(made, line)
    return made


def _line(turn: Turn, answer: dict[str, Any], pieces: Sequence[Piece]) -> Line:
    check(answer, pieces)
    given = pieces[0].go.given
    assert given is not None
    start = at = _start(pieces[0].go)
    parts = []
    for piece in pieces:
        rows = rows_of(piece.go.experts)
        if len(rows):
            assert _start(piece.go) == at, "each go brings the rows that are missing"
            at += len(rows)
            parts.append(rows)
    tokens = [*given, *answer["output_ids"]]
    assert at == len(tokens) - 1
    text = turn.prompt + answer["text"]
    goes = [piece.go for piece in pieces]
    return Line(turn, answer["meta_info"]["id"], text, given, tokens, start, joined(parts), goes)


def _start(go: Generation) -> int:
    assert go.body["return_routed_experts"] is True
    start = go.body["routed_experts_start_len"]
    assert type(start) is int
    return start


def _enter(into: Book, line: Line) -> None:
    before = [other for other in into.lines.values() if other.answered <= line.arrived]
    longest = max((min(common_length(other.tokens, line.given), len(other.tokens) - 1) for other in before), default=0)
    assert line.start <= longest, "what is not asked for has come before"
    if line.turn.whole:
        assert line.start == longest, "what has come before is not asked for"
    into.behind_the_longest += line.start == longest
    begun = [
        rows[: line.start]
        for other in before
        if len(other.tokens) > line.start and other.tokens[: line.start] == line.tokens[: line.start]
        for rows in other.possible
    ]
    begun = begun if line.start else [joined(())]
    line.possible = [joined((rows, line.own)) for rows in {rows.tobytes(): rows for rows in begun}.values()]
    assert line.possible
    into.lines[line.rid] = line


async def check_lines(http: aiohttp.ClientSession, made: Book) -> int:
    """Every generation's rows, by its id and by its text, are those that the proxies saw. Says how many rows."""
    compared = 0
    by_text: dict[str, list[str]] = {}
    for line in made.lines.values():
        by_text.setdefault(line.text, []).append(line.rid)
        async with http.post("/retrieve_from_text", json={"rid": line.rid}) as reply:
            assert (await reply.json())["tokens"] == line.tokens
        found = await delivered(http, rid=line.rid)
        assert found.rid == line.rid
        assert len(found.rows) == len(line.tokens) - 1
        assert any(np.array_equal(found.rows, rows) for rows in line.possible), line.rid
        compared += len(found.rows)
    for text, rids in by_text.items():
        found = await delivered(http, text=text)
        assert found.rid in rids
        line = made.lines[found.rid]
        assert any(np.array_equal(found.rows, rows) for rows in line.possible), text
    return compared


# Agents


def sample_rows(sample: Sample, passed: Mapping[str, Generation]) -> Rows:
    """The rows that a session's sample must have."""
    rows, tokens = joined(()), list[int]()
    for turn in line_of(sample, passed):
        each = turn.generation
        start = each.body["routed_experts_start_len"]
        assert start == max(0, min(common_length(tokens, each.prompt), len(tokens) - 1)), "the first that is missing"
        rows, tokens = joined((rows[:start], rows_of(each.experts))), [*each.prompt, *each.sampled]
        assert len(rows) == len(tokens) - 1
    assert sample["tokens"] == tokens
    return rows


# One uninterrupted request


async def uninterrupted(http: aiohttp.ClientSession, worker: str, tokens: Sequence[int], *, fresh: bool) -> Rows:
    """What a worker says of these very ids in one go; `fresh`: computed anew, with nothing in its prefix cache."""
    asked = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0}, "return_routed_experts": True}
    asked |= {"extra_key": secrets.token_hex(8)} if fresh else {}  # a prefix cache of its own
    async with http.post(f"{worker}{GENERATE}", json=asked) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
    assert not (fresh and answer["meta_info"]["cached_tokens"])
    rows = rows_of(answer["meta_info"]["routed_experts"])
    assert len(rows) == len(tokens) - 1
    return rows


@dataclass
class Share:
    """How many of some rows are equal to others."""

    equal: int = 0
    of: int = 0

    def add(self, some: Rows, others: Rows) -> None:
        assert some.shape == others.shape
        self.equal += int((some == others).all(axis=(1, 2)).sum())
        self.of += len(some)

    def __float__(self) -> float:
        return self.equal / self.of

    def __str__(self) -> str:
        return f"{self.equal} of {self.of} ({float(self):.2%})"
