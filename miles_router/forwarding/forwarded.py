"""A reply that has begun, and the lease that pays for it."""

from __future__ import annotations

from miles_router.asgi.headers import first_header
from miles_router.engines.footprint import sampled_tokens
from miles_router.fleet.lease import Lease
from miles_router.fleet.workers import Worker
from miles_router.forwarding.parts import MergedStream
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import EVENTS, HeldReply, RewrittenStream
from miles_router.forwarding.used_names import NameUse

#: From this status on an engine has refused, and holds nothing of what it was asked.
REFUSED = 400
#: What a request comes to, however it was asked.
AnyReply = Reply | HeldReply | RewrittenStream | MergedStream


class Forwarded:
    """A reply together with the lease that pays for it."""

    __slots__ = ("_names", "lease", "reply")

    def __init__(self, lease: Lease, reply: AnyReply, names: NameUse | None) -> None:
        self.lease = lease
        self.reply = reply
        self._names = names

    @property
    def worker(self) -> Worker:
        """Who answers."""
        return self.lease.worker

    def close(self) -> None:
        """Give up both; harmless when repeated."""
        lease, answered = self.lease, self.reply.status < REFUSED
        if self._names is not None:
            streams = (first_header(self.reply.headers, b"content-type") or b"").startswith(EVENTS)
            # A refusal may say that the engine has the name.
            self._names.end(forgotten=answered and self.reply.exhausted and not streams)
        self.reply.close()
        lease.release(answered=answered, sampled=sampled_tokens(self.reply.end) if answered and lease.tells else 0)
