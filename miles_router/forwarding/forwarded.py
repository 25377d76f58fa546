"""A worker's reply together with the lease on that worker."""

from __future__ import annotations

from miles_router.asgi.headers import first_header
from miles_router.engines.footprint import sampled_tokens
from miles_router.fleet.lease import Lease
from miles_router.fleet.workers import Worker
from miles_router.forwarding.parts import MergedStream
from miles_router.forwarding.reply import Reply
from miles_router.forwarding.translated import EVENTS, HeldReply, RewrittenStream
from miles_router.forwarding.used_names import NameUse

#: From this status on the engine refused the request and has nothing of it in its cache.
REFUSED = 400
#: The reply types of all ways to send a request.
AnyReply = Reply | HeldReply | RewrittenStream | MergedStream


class Forwarded:
    """A reply and the lease on its worker; `close` ends both."""

    __slots__ = ("_names", "lease", "reply", "worker")

    def __init__(self, lease: Lease, reply: AnyReply, names: NameUse | None) -> None:
        self.lease = lease
        self.worker: Worker = lease.worker
        self.reply = reply
        self._names = names

    def close(self) -> None:
        """Close the reply, release the lease, and record that its generation names are free. Idempotent."""
        lease, answered = self.lease, self.reply.status < REFUSED
        if self._names is not None:
            streams = (first_header(self.reply.headers, b"content-type") or b"").startswith(EVENTS)
            # The engine may have refused because it still has the name. It aborts a stream's name 2 s after the end.
            self._names.end(released=answered and self.reply.exhausted and not streams)
        self.reply.close()
        lease.release(
            answered=answered, sampled=sampled_tokens(self.reply.end) if answered and lease.measures_pace else 0
        )
