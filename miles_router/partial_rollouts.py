"""Generations that outlive a pause, or the loss of their worker: cut, kept, carried on, and answered as one.

The innermost layer of the stack while `--partial-rollout resume` or `--resume-on-worker-loss` is set, for `/generate`.
What a pause cut off is sent again after continue, to any worker, as `input_ids` = prompt + what was sampled, with the
rest of the budget. The client sees one answer, or one stream. What cannot be carried on exactly is returned as the
engine gave it: `finish_reason` `abort`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.errors import ClientDisconnected, RouterError, UpstreamBroken
from miles_router.events import LAST_EVENT, EventReader, event, payload
from miles_router.exchange import Exchange, Message, Receive, Scope, Send, replay, with_body
from miles_router.headers import first
from miles_router.inflight import InFlight
from miles_router.joining import CONCATENATED, EXPERTS, UNFINISHED, VERSIONS, cut, ending, forming, join_base64, straddling
from miles_router.middleware import ASGIApp
from miles_router.parts import Part, split
from miles_router.router import Router
from miles_router.tasks import together
from miles_router.watch import Watch

logger = logging.getLogger(__name__)

PATH = "/generate"
OK = 200
MAX_ANSWER = 1 << 30
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's `SamplingParams`
#: Sampling that depends on the output so far, which an engine that is given it as prompt no longer counts as output.
STATEFUL = ("regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "custom_params")
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
#: Fields about the prompt, which the first part has answered.
OF_THE_PROMPT = ("text", "input_tokens", "logprob_start_len")
#: What a stream says at its end.
OF_THE_LAST_EVENT = (VERSIONS, EXPERTS)
#: Tokens on either side of a cut that are decoded to see the character it may have halved.
WINDOW = 16


class Enough(Exception):
    """Raised into a stream that is not wanted any further; its worker stops generating."""


class CannotResume(RouterError):
    """A generation that cannot be carried on exactly; it is returned as it is."""


class PartialRollouts:
    """The layer. `resume_cut`: carry on what a pause cut; `resume_lost`: carry on streams whose worker was lost."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        in_flight: InFlight,
        resume_cut: bool = True,
        resume_lost: bool = False,
    ) -> None:
        self.app = app
        self.in_flight = in_flight
        self.router = router
        self.resume_cut = resume_cut
        self.resume_lost = resume_lost
        self.incremental: bool | None = None  # unknown yet
        self.end_ids: set[int] = set()  # tokens that answers were seen to end with
        self.resumed = 0
        self.returned = 0
        router.statistics["partial_rollouts"] = lambda: {"resumed": self.resumed, "returned": self.returned}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; anything but a well-formed `/generate` passes."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("POST", "PUT"):
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        try:
            parsed = exchange.loads(body)
            parts = split(parsed)
            stream = bool(parsed.get("stream"))
        except (RouterError, AttributeError, KeyError, TypeError, ValueError, IndexError):
            await self.app(scope, replay(body, receive), send)  # the engine says what is wrong with it
            return
        self.in_flight.enter(exchange, body)
        try:
            await (_Stream if stream else _Whole)(self, scope, receive, send, exchange, parts).run(body)
        finally:
            self.in_flight.leave(exchange)


class _Run:
    """One request on its way."""

    def __init__(
        self,
        layer: PartialRollouts,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        parts: list[Part],
    ) -> None:
        self.layer = layer
        self.router = layer.router
        self.gate = layer.router.gate
        self.scope = scope
        self.receive = receive
        self.send = send
        self.exchange = exchange
        self.parts = parts
        self.pauses = self.gate.pauses

    def was_cut(self, answer: Mapping[str, Any]) -> bool:
        """Whether a pause ended this generation: it was aborted, by nobody's wish, while the fleet was paused."""
        self.exchange.rids.add(str(answer["meta_info"].get("id")))
        finish = answer["meta_info"].get("finish_reason") or {}
        if finish.get("type") != "abort" or self.exchange.aborted or not self.layer.resume_cut:
            return False
        if finish.get("status_code") is not None or finish.get("err_type") is not None:
            return False  # the engine's own failure
        return self.gate.closed or self.gate.pauses != self.pauses

    async def continuation(self, part: Part) -> bytes:
        """The request that carries `part` on.

        Raises:
            CannotResume: not exactly.
        """
        sampled = part.answer["output_ids"] if part.answer is not None else []
        if not sampled:  # it had only queued
            return orjson.dumps(dict(part.request))
        stateful = [name for name in STATEFUL if part.params.get(name)]
        stateful += [name for name, neutral in PENALTIES.items() if part.params.get(name, neutral) != neutral]
        if stateful:
            raise CannotResume(f"sampling with {stateful[0]} depends on the output so far")
        if not part.prompt:
            part.prompt = await self._prompt_ids(part)
        params = {**part.params}
        budget = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        if budget is not None:  # null: as much as fits
            params["max_new_tokens"] = budget - len(sampled)
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(sampled))
        request = {name: value for name, value in part.request.items() if name not in OF_THE_PROMPT}
        request |= {"input_ids": [*part.prompt, *sampled], "sampling_params": params}
        if request.get("return_routed_experts"):
            request["routed_experts_start_len"] = part.experts_from
        return orjson.dumps(request)

    async def _prompt_ids(self, part: Part) -> list[int]:
        ids = part.request.get("input_ids")
        if ids is not None:
            return list(ids)
        tokens = (await self._worker("/v1/tokenize", {"prompt": part.request["text"]}))["tokens"]
        counted = part.answer["meta_info"].get("prompt_tokens") if part.answer is not None else len(tokens)
        if len(tokens) != counted:
            raise CannotResume("the worker's tokenizer does not give the prompt it had")
        return list(tokens)

    async def _worker(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask a worker something that it answers at once."""
        headers = [(b"content-type", b"application/json")]
        data = b"" if body is None else orjson.dumps(body)
        method = "GET" if body is None else "POST"
        async with self.router.forward(method, path, headers=headers, body=data) as forwarded:
            data = await forwarded.reply.read_all(MAX_ANSWER)
        if forwarded.reply.status != OK:
            raise CannotResume(f"{path} answered {forwarded.reply.status}")
        return orjson.loads(data)

    async def ask(self, body: bytes, send: Send) -> None:
        """Send a request through the layers inside."""
        self.pauses = self.gate.pauses
        await self.layer.app(with_body(self.scope, body), replay(body, self.receive), send)

    async def may_go_on(self) -> bool:
        """Wait until the fleet goes on; False if the request was aborted meanwhile."""
        if self.gate.closed and not self.exchange.aborted:
            with Watch(self.receive, 0):
                await self.gate.wait(self.exchange)
        return not self.exchange.aborted

    async def ended(self, part: Part) -> bool:
        """Whether the cut fell on the very token that ends the generation; it is over then."""
        answer, params = part.answer, part.params
        if answer is None:
            return False
        ends = set() if params.get("ignore_eos") else {*self.layer.end_ids, *(params.get("stop_token_ids") or ())}
        finish = ending(answer, part.stops, ends, params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS))
        if finish is None or (part.experts_lost and finish["type"] == "length"):
            return False
        text, matched = answer["text"], finish.get("matched")
        if not params.get("no_stop_trim") and matched is not None:
            last = (
                matched if isinstance(matched, str) else (await self._detokenize(part, [answer["output_ids"][-1:]]))[0]
            )
            text = text[: text.rindex(last)] if last and last in text else text
        part.answer = {**answer, "text": text, "meta_info": {**answer["meta_info"], "finish_reason": finish}}
        part.done = True
        return True

    async def incremental(self) -> bool:
        """Whether workers stream only what is new (`--incremental-streaming-output`)."""
        if self.layer.incremental is None:
            info = await self._worker("/server_info")
            self.layer.incremental = bool(info.get("incremental_streaming_output"))
        return self.layer.incremental

    def learn_end(self, part: Part, answer: Mapping[str, Any]) -> None:
        """Which tokens the model ends with, nobody tells; its answers do."""
        matched = (answer["meta_info"].get("finish_reason") or {}).get("matched")
        if isinstance(matched, int) and matched not in (part.params.get("stop_token_ids") or ()):
            self.layer.end_ids.add(matched)

    async def complete_character(self, part: Part, *, finished: bool) -> None:
        """Put right the last character before the cut, which the cut may have halved, once the rest of it is there."""
        head = part.answer
        if head is None or part.current is None or not head["text"].endswith(UNFINISHED) or not part.prompt:
            return
        before = [*part.prompt, *head["output_ids"]][-WINDOW:]
        half, more = await self._detokenize(part, [before, [*before, *part.current["output_ids"][:WINDOW]]])
        if not finished and len(more) <= len(half) and more.endswith(UNFINISHED):
            return
        size = len(head["text"]) - len(head["text"].rstrip(UNFINISHED))
        part.answer = {**head, "text": head["text"][:-size] + more[len(half) - size : len(half)]}
        part.halved = False

    async def reveal(self, part: Part) -> None:
        """What a worker that was lost had still held back of the text: characters and stop strings in the making."""
        answer = part.answer
        if answer is None or answer["meta_info"].get("finish_reason") is not None or not answer["output_ids"]:
            return
        if not part.prompt:
            part.prompt = await self._prompt_ids(part)
        before = part.prompt[-WINDOW:]
        half, more = await self._detokenize(part, [before, [*before, *answer["output_ids"]]])
        part.answer = {**answer, "text": more[len(half) :]}
        part.halved = part.answer["text"].endswith(UNFINISHED)

    async def mended(self, part: Part, *, finished: bool) -> tuple[dict[str, Any], bool]:
        """All that has come, and whether a stop string across the cut ends it: an engine that has the first part as
        its prompt does not see that."""
        assert part.answer is not None
        if part.halved:
            await self.complete_character(part, finished=finished)
        joined = part.so_far()
        assert joined is not None
        found = straddling(joined["text"], len(part.answer["text"]), part.stops) if part.stops else None
        if found is None:
            return joined, False
        at, stop = found
        tokens = await self._tokens_up_to(part, joined, stop, at)
        text = joined["text"][: at + len(stop)] if part.params.get("no_stop_trim") else joined["text"][:at]
        finish = {"type": "stop", "matched": stop}
        if part.request.get("return_routed_experts") and not finished:
            rows = await self._experts(part, joined["output_ids"][:tokens])
            held = part.answer["meta_info"].get(EXPERTS) or ""
            whole = cut({**joined, "meta_info": {**joined["meta_info"], EXPERTS: None}}, tokens, text, finish)
            whole["meta_info"][EXPERTS] = join_base64(held, rows)
            return whole, True
        start = part.request.get("routed_experts_start_len") or 0
        return cut(joined, tokens, text, finish, experts_start=start), True

    async def _experts(self, part: Part, sampled: Sequence[int]) -> str:
        """The rows that are not held yet, of a generation that ends before its worker says so."""
        request = {
            "input_ids": [*part.prompt, *sampled],
            "sampling_params": {"max_new_tokens": 0},
            "return_routed_experts": True,
            "routed_experts_start_len": part.experts_from,
        }
        return str((await self._worker(PATH, request))["meta_info"].get(EXPERTS) or "")

    async def _tokens_up_to(self, part: Part, joined: Mapping[str, Any], stop: str, at: int) -> int:
        """How many tokens it takes to spell the stop string at `at`."""
        assert part.answer is not None
        begin, end = len(part.answer["output_ids"]), len(joined["output_ids"])
        lengths = range(begin + 1, min(end, begin + 4 * len(stop) + 4) + 1)
        texts = await self._detokenize(part, [joined["output_ids"][:length] for length in lengths])
        reached = (length for length, text in zip(lengths, texts, strict=True) if stop in text[at:])
        return next(reached, end)

    async def _detokenize(self, part: Part, ids: Sequence[Sequence[int]]) -> list[str]:
        skip = part.params.get("skip_special_tokens", True)
        answer = await self._worker("/v1/detokenize", {"tokens": list(ids), "skip_special_tokens": skip})
        return list(answer["text"])

    def give_up(self, part: Part, error: RouterError) -> None:
        """Say that a part is returned as it is."""
        self.layer.returned += 1
        fields = {"request_id": self.exchange.request_id, "reason": str(error)}
        logger.warning("generation_not_resumed", extra={"fields": fields})
        part.done = True


class _Whole(_Run):
    """A request whose answer comes in one piece."""

    async def run(self, body: bytes) -> None:
        start, data = await self._answered(body)
        status, answers = start["status"], _answers(data)
        if status != OK or answers is None or len(answers) != len(self.parts):
            await self._send_on(start, data)
            return
        changed = False
        for part, answer in zip(self.parts, answers, strict=True):
            part.current = answer
            self.learn_end(part, answer)
            changed = changed or self.was_cut(answer)
        if not changed:
            await self._send_on(start, data)
            return
        await together([self._carry_on(part) for part in self.parts], name="carry on")
        merged = [part.so_far() for part in self.parts]
        whole = orjson.dumps(merged if self.parts[0].streamed_index or data.lstrip()[:1] == b"[" else merged[0])
        await self._send_on(start, whole)

    async def _carry_on(self, part: Part) -> None:
        assert part.current is not None
        while self.was_cut(part.so_far() or {}):
            part.next_go()
            assert part.answer is not None
            try:
                if await self.ended(part) or not await self.may_go_on():
                    return
                start, data = await self._answered(await self.continuation(part))
                answers = _answers(data)
                if start["status"] != OK or not answers:
                    raise CannotResume(f"the worker answered {start['status']}")
                part.current = answers[0]
                joined, stopped = await self.mended(part, finished=True)
                self.learn_end(part, answers[0])
            except ClientDisconnected:
                raise
            except RouterError as error:
                self.give_up(part, error)
                return
            self.layer.resumed += 1
            if stopped:
                part.answer, part.current = joined, None
                return

    async def _answered(self, body: bytes) -> tuple[Message, bytes]:
        """One whole answer; under `resume_lost` one that was cut by the loss of its worker is asked for again."""
        lost = 0
        while True:
            collected = _Collector()
            try:
                await self.ask(body, collected.send)
            except UpstreamBroken:
                lost += 1
                if not self.layer.resume_lost or lost > self.router.config.max_retries:
                    raise
                continue
            assert collected.start is not None
            return collected.start, b"".join(collected.parts)

    async def _send_on(self, start: Message, data: bytes) -> None:
        headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(data)).encode("ascii")))
        await self.send({**start, "headers": headers})
        await self.send({"type": "http.response.body", "body": data})


class _Collector:
    """Keeps a reply."""

    def __init__(self) -> None:
        self.start: Message | None = None
        self.parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.parts.append(message.get("body", b""))


class _Stream(_Run):
    """A request whose answers come event by event."""

    async def run(self, body: bytes) -> None:
        go = _Go(self, self.parts, opening=True)
        try:
            await self.ask(body, go.send)
        except UpstreamBroken:
            if not self.layer.resume_lost or not go.streaming:
                raise
        if not go.streaming:
            return
        await together([self._carry_on(part) for part in self.parts if not part.done], name="carry on")
        await self.send({"type": "http.response.body", "body": LAST_EVENT, "more_body": False})

    async def _carry_on(self, part: Part) -> None:
        lost = 0  # in a row, without a token: what ends every worker it meets must not meet them all
        while not part.done:
            part.next_go()
            try:
                if await self._over(part):
                    break
                part.incremental = part.incremental or await self.incremental()
                go = _Go(self, [part], opening=False)
                try:
                    await self.ask(await self.continuation(part), go.send)
                except Enough:
                    pass
                except UpstreamBroken:
                    lost = 0 if part.current is not None and part.current["output_ids"] else lost + 1
                    if not self.layer.resume_lost or lost >= self.router.config.max_retries:
                        raise
            except ClientDisconnected:
                raise
            except RouterError as error:
                self.give_up(part, error)
                break
            self.layer.resumed += 1
        else:
            return
        if part.answer is None or part.answer["meta_info"].get("finish_reason") is None:
            raise UpstreamBroken("the worker was lost and the generation not carried on")  # it must not look complete
        await self.emit(part, part.answer)

    async def _over(self, part: Part) -> bool:
        await self.reveal(part)
        return await self.ended(part) or not await self.may_go_on()

    async def emit(self, part: Part, answer: Mapping[str, Any], *, until: int | None = None) -> None:
        """Give one event to the client, with the text `until` there; in an incremental stream only what is new."""
        text = answer["text"][:until]
        shown = {**answer, "text": text}
        if part.incremental:
            meta = {**answer["meta_info"]}
            for name in CONCATENATED:
                if meta.get(name) is not None:
                    meta[name] = meta[name][part.shown_ids :]
            shown |= {"text": text[part.shown_text :], "output_ids": answer["output_ids"][part.shown_ids :]}
            shown["meta_info"] = meta
        part.shown_ids, part.shown_text = len(answer["output_ids"]), max(part.shown_text, len(text))
        if part.streamed_index:
            shown["index"] = part.index
        await self.send({"type": "http.response.body", "body": event(shown), "more_body": True})


class _Go:
    """One stream of a worker's, on its way to the client."""

    def __init__(self, run: _Stream, parts: list[Part], *, opening: bool) -> None:
        self.run = run
        self.parts = parts
        self.opening = opening
        self.streaming = False
        self._events = EventReader()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = first(message["headers"], b"content-type") or b""
            self.streaming = message["status"] == OK and kind.startswith(b"text/event-stream")
            if not self.opening:
                if not self.streaming:
                    raise CannotResume(f"the worker answered {message['status']}")
                return
            await self.run.send(message)
        elif not self.streaming:
            await self.run.send(message)
        else:
            for each in self._events.feed(message.get("body", b"")):
                await self._event(each)

    async def _event(self, raw: bytes) -> None:
        answer = payload(raw)
        if answer is None:
            if raw != LAST_EVENT:
                await self._foreign(raw)
            return
        part = self.parts[answer.get("index", 0)] if self.opening else self.parts[0]
        part.absorb(answer)
        assert part.current is not None
        if self.run.was_cut(part.current):
            return  # what it brought is shown with the next event
        finished = answer["meta_info"].get("finish_reason") is not None
        part.done = finished
        if finished:
            self.run.learn_end(part, answer)
        if part.answer is not None:
            await self._carried_on(part, finished=finished)
        elif self.opening:
            part.shown_ids, part.shown_text = len(part.current["output_ids"]), len(part.current["text"])
            await self.run.send({"type": "http.response.body", "body": raw, "more_body": True})
        else:
            await self.run.emit(part, part.current)

    async def _foreign(self, raw: bytes) -> None:
        """An event that is no answer, an error say: the client's, unless it answers a request of ours."""
        if not self.opening:
            raise CannotResume("the worker refused to carry it on")
        for part in self.parts:
            part.done = True
        await self.run.send({"type": "http.response.body", "body": raw, "more_body": True})

    async def _carried_on(self, part: Part, *, finished: bool) -> None:
        assert part.answer is not None
        joined, stopped = await self.run.mended(part, finished=finished)
        if finished or stopped:
            await self.run.emit(part, joined)
        else:
            boundary = len(part.answer["text"])
            until = forming(joined["text"], boundary, part.stops) if part.stops else None
            if part.halved:
                until = len(part.answer["text"].rstrip(UNFINISHED))
            meta = {name: value for name, value in joined["meta_info"].items() if name not in OF_THE_LAST_EVENT}
            await self.run.emit(part, {**joined, "meta_info": meta}, until=until)
        if stopped and not finished:
            part.done = True
            raise Enough


def _answers(data: bytes) -> list[dict[str, Any]] | None:
    """The answers in a reply, or None if it holds something else."""
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    answers = parsed if isinstance(parsed, list) else [parsed]
    return answers if all(isinstance(each, dict) and "output_ids" in each for each in answers) else None
