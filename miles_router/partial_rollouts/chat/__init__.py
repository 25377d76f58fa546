"""Turns of chat that outlive a pause, or the loss of their worker.

What was sampled goes back as ids, and the engine samples the rest raw, with parsers off (`engines/openai/legs.py`).
So the rest is a generation like any other: its parts are joined in the form of `/generate`, and the message is made of
the whole text.
"""

from __future__ import annotations

from miles_router.asgi.exchange import Exchange, Receive, Scope, Send
from miles_router.middlewares.chat import ChatTurn
from miles_router.partial_rollouts.chat.answer import ResumableChat
from miles_router.partial_rollouts.chat.stream import ResumableChatStream
from miles_router.partial_rollouts.leg import ResumeContext


async def resumable_chat(context: ResumeContext, scope: Scope, receive: Receive, send: Send, turn: ChatTurn) -> None:
    """Run one request of a turn."""
    exchange = Exchange.of(scope)
    body = await exchange.read(receive)
    fields = exchange.loads(body)
    resumable = ResumableChatStream if fields.get("stream") else ResumableChat
    await resumable(context, scope, receive, send, turn, fields).run(body)
