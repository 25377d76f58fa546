"""A turn under an id: answered once however often it is asked for, and asked for again only if it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from middleware_hub.openai_session.turns.plan import repeat_key
from middleware_hub.openai_session.turns.reply import ReplySender, run_or_repeat
from miles_router.asgi.exchange import Message
from miles_router.engines.events import LAST_EVENT
from miles_router.tasks import spawn
from tests.support.sessions import SYSTEM, Scene, user

MESSAGES = [SYSTEM, user("Add.")]
HEADERS = [(b"content-type", b"application/json"), (b"x-request-id", b"first"), (b"x-worker", b"w")]


def start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(HEADERS)}


def part(body: bytes = b"answer", *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _stays() -> Message:
    """The `receive` of a client that waits."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _settled() -> None:
    """Nothing is stored."""


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


#: What one run of a turn does.
Run = Callable[[ReplySender], Awaitable[None]]


class Episode:
    """A session whose turns have ids; `runs` counts how often one ran."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.runs = 0
        self.bytes: list[int] = []

    def record(self, reply: ReplySender, turn_id: str) -> None:
        asked = self.scene.ask(MESSAGES, turn_id=turn_id)
        self.scene.record(asked, self.scene.generated(asked, "ok"))
        reply.recorded = reply.repeatable = True

    async def ask(self, run: Run, turn_id: str = "t", client: Client | None = None) -> Client:
        client = client or Client()
        reply, key = ReplySender(client.send, _settled), repeat_key(turn_id, "/v1/chat/completions", b"{}")
        async with run_or_repeat(self.scene.session, key, _stays, reply, self.bytes.append) as is_first:
            if is_first:
                self.runs += 1
                await run(reply)
        return client

    def answering(self, *messages: Message, turn_id: str = "t", held: bool = True) -> Run:
        async def run(reply: ReplySender) -> None:
            if held:
                self.record(reply, turn_id)
            for message in messages:
                await reply.send(message)

        return run


async def test_a_turn_that_was_answered_gives_its_answer_again() -> None:
    turns = Episode()
    run = turns.answering(start(), part(b"an", more=True), part(b"swer"))
    first, again, third = [await turns.ask(run) for _ in range(3)]
    assert (first.body, again.body, third.body, turns.runs) == (b"answer",) * 3 + (1,)
    assert again.messages[0]["headers"] == [pair for pair in HEADERS if pair[0] != b"x-request-id"]
    assert again.messages[0]["status"] == 200
    assert len(turns.scene.session.turns) == 1
    assert turns.bytes == [6]


async def test_what_a_layer_outside_adds_to_the_headers_is_not_kept() -> None:
    turns = Episode()
    await turns.ask(turns.answering(start(), part()))
    client = await turns.ask(turns.answering())
    client.messages[0]["headers"].append((b"x-more", b"1"))
    assert (b"x-more", b"1") not in (await turns.ask(turns.answering())).messages[0]["headers"]


async def test_other_ids_and_other_sessions_are_other_turns() -> None:
    turns, other = Episode(), Episode()
    await turns.ask(turns.answering(start(), part(b"a")))
    assert (await turns.ask(turns.answering(start(), part(b"b"), turn_id="u"), "u")).body == b"b"
    assert (await other.ask(other.answering(start(), part(b"c")))).body == b"c"


FAILURES: dict[str, tuple[list[Message], bool]] = {
    "refused": ([start(400), part()], False),
    "overloaded": ([start(503), part()], False),
    "cut": ([start(), part(more=True)], False),
    "nothing": ([], False),
    "not recorded": ([start(), part(b'data: {"error": {}}\n\n' + LAST_EVENT)], False),
    "recorded, and never seen whole": ([start(), part(more=True)], True),
}


@pytest.mark.parametrize(("messages", "held"), FAILURES.values(), ids=FAILURES)
async def test_a_turn_that_failed_runs_again(messages: list[Message], held: bool) -> None:
    turns = Episode()
    failed = await turns.ask(turns.answering(*messages, held=held))
    assert failed.messages == messages
    assert turns.scene.session.replies == {}
    assert turns.bytes == []
    assert (await turns.ask(turns.answering(start(), part(b"second")))).body == b"second"
    assert (await turns.ask(turns.answering())).body == b"second"
    assert turns.runs == 2


async def test_a_turn_that_raised_runs_again() -> None:
    turns = Episode()

    async def fail(reply: ReplySender) -> None:
        raise RuntimeError("engine")

    with pytest.raises(RuntimeError, match="engine"):
        await turns.ask(fail)
    assert turns.scene.session.replies == {}
    assert (await turns.ask(turns.answering(start(), part()))).body == b"answer"


async def test_an_earlier_turn_of_that_id_does_not_make_a_failure_an_answer() -> None:
    turns = Episode()
    await turns.ask(turns.answering(start(), part(more=True)))
    await turns.ask(turns.answering(start(), part(b"error"), held=False))
    assert (await turns.ask(turns.answering(start(), part(b"answer")))).body == b"answer"
    assert turns.runs == 3


async def test_a_client_that_leaves_behind_the_last_event_has_had_its_answer() -> None:
    turns = Episode()

    async def run(reply: ReplySender) -> None:
        await reply.send(start())
        turns.record(reply, "t")
        await reply.send_part(b"data: {}\n\n")
        await reply.finish(LAST_EVENT)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await turns.ask(run)
    assert (await turns.ask(turns.answering())).body.endswith(LAST_EVENT)
    assert turns.runs == 1


class Held:
    """A turn under way, until it is let go."""

    def __init__(self, turns: Episode, *messages: Message, held: bool = True) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self._run = turns.answering(*messages, held=held)

    async def run(self, reply: ReplySender) -> None:
        self.began.set()
        await self.go.wait()
        await self._run(reply)


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_turn_that_is_asked_for_meanwhile_waits_for_the_same_answer() -> None:
    turns = Episode()
    first = Held(turns, start(), part())
    tasks = [spawn(turns.ask(first.run), name="t")]
    await first.began.wait()
    tasks += [spawn(turns.ask(turns.answering(start(), part(b"other"))), name="t") for _ in range(3)]
    await settle()
    assert not any(task.done() for task in tasks)
    first.go.set()
    assert [client.body for client in await asyncio.gather(*tasks)] == [b"answer"] * 4
    assert (turns.runs, turns.bytes) == (1, [6])


async def test_of_those_that_wait_for_a_turn_that_fails_one_runs_it_again() -> None:
    turns = Episode()
    first = Held(turns, start(500), part(b"error"), held=False)
    failing = spawn(turns.ask(first.run), name="t")
    await first.began.wait()
    waiting = [spawn(turns.ask(turns.answering(start(), part())), name="t") for _ in range(3)]
    await settle()
    first.go.set()
    assert (await failing).body == b"error"
    assert [client.body for client in await asyncio.gather(*waiting)] == [b"answer"] * 3
    assert turns.runs == 2


async def test_a_first_client_that_leaves_hands_the_turn_to_the_next() -> None:
    turns = Episode()
    first = Held(turns, start(), part(b"never"))
    leaving = spawn(turns.ask(first.run), name="t")
    await first.began.wait()
    waiting = spawn(turns.ask(turns.answering(start(), part())), name="t")
    await settle()
    leaving.cancel()
    assert (await waiting).body == b"answer"
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_waiting_client_that_leaves_disturbs_nobody() -> None:
    turns = Episode()
    first = Held(turns, start(), part())
    running = spawn(turns.ask(first.run), name="t")
    await first.began.wait()
    leaving, staying = (spawn(turns.ask(turns.answering()), name="t") for _ in range(2))
    await settle()
    leaving.cancel()
    await settle()
    assert leaving.cancelled()
    first.go.set()
    assert [client.body for client in await asyncio.gather(running, staying)] == [b"answer"] * 2
    assert turns.runs == 1


async def test_a_session_deleted_meanwhile_still_answers_all_who_wait() -> None:
    turns = Episode()
    first = Held(turns, start(), part(), held=False)
    running = spawn(turns.ask(first.run), name="t")
    await first.began.wait()
    waiting = spawn(turns.ask(turns.answering()), name="t")
    await settle()
    turns.scene.store.delete(turns.scene.session)
    first.go.set()
    assert [client.body for client in await asyncio.gather(running, waiting)] == [b"answer"] * 2
    assert turns.runs == 1


async def test_a_session_deleted_during_a_turn_that_fails_is_no_error() -> None:
    turns = Episode()
    first = Held(turns, start(500), part(), held=False)
    running = spawn(turns.ask(first.run), name="t")
    await first.began.wait()
    turns.scene.store.delete(turns.scene.session)
    first.go.set()
    assert (await running).messages[0]["status"] == 500


async def test_only_the_answer_is_kept_of_a_turn() -> None:
    turns = Episode()
    await turns.ask(turns.answering(start(), part()))
    (kept,) = turns.scene.session.replies.values()
    recorded: Any = kept.result()
    assert vars(recorded) == {"headers": [HEADERS[0], HEADERS[2]], "body": b"answer"}


async def test_a_refusal_in_a_deleted_session_is_not_given_again_as_an_answer() -> None:
    turns = Episode()
    first = Held(turns, start(500), part(b"error"), held=False)
    running = spawn(turns.ask(first.run), name="t")
    await first.began.wait()
    waiting = spawn(turns.ask(turns.answering(start(404), part(b"gone"), held=False)), name="t")
    await settle()
    turns.scene.store.delete(turns.scene.session)
    first.go.set()
    assert (await running).messages[0]["status"] == 500
    assert [message.get("status") for message in (await waiting).messages] == [404, None]
    assert turns.runs == 2, "who waited asked for itself"
