"""What one machine shows another with a request that it forwards: that it knows the router's secret, which is not sent.

A stamp is made for one request, of which it binds everything that the other machine decides by: what for, from whom and
to whom, method, target, headers and body. It is believed once, and only for a few beats of the control plane's, which
all machines hear; so clocks need not agree. A machine that was started again is another addressee.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

from miles_router.asgi.exchange import Receive, Scope
from miles_router.asgi.headers import RawHeaders
from miles_router.cluster.nodes.machines import HEADER
from miles_router.cluster.nodes.seen import Seen
from miles_router.errors import NodeUnproven, OwnerUnavailable

#: What for: the other machine answers a client's request, and asks for its key; or it is asked for its part of what all
#: answer together, by one where the client's key was seen.
FORWARD, ASK = b"forward", b"ask"
#: Beats that a stamp may be behind or ahead of who looks at it.
BEHIND, AHEAD = 2, 1
#: Headers that a connection makes anew.
UNBOUND = frozenset({HEADER, b"host", b"content-length"})
#: Bytes of a stamp, at most.
LONGEST = 512
NONCE = 8


class Address(NamedTuple):
    """A machine, and the life of whoever starts its processes."""

    node: int
    life: str


class Stamps:
    """Makes and reads them.

    Args:
        here: this machine.
        life_of: the life of another one; None while it is not there.
        beat: gives the last one that was heard.
    """

    def __init__(
        self, secret: str, here: Address, life_of: Callable[[int], str | None], beat: Callable[[], int], seen: Seen
    ) -> None:
        self._key = hmac.digest(secret.encode("ascii"), b"requests between machines", "sha256")
        self._here = here
        self._life_of = life_of
        self._beat = beat
        self._seen = seen

    @property
    def beat(self) -> int:
        """The last one that was heard."""
        return self._beat()

    def made(self, purpose: bytes, node: int, method: str, target: bytes, headers: RawHeaders, body: bytes) -> bytes:
        """For a request to another machine."""
        beat, nonce, digest = self._beat(), secrets.token_hex(NONCE).encode(), hashlib.sha256(body).hexdigest().encode()
        said = b"%b %d %d %d %b %b" % (purpose, self._here.node, node, beat, nonce, digest)
        life = self._life_of(node) or ""
        return said + b" " + self._mac(said, life, method, target, headers).hex().encode()

    def read(self, stamp: bytes, scope: Scope) -> tuple[bytes, bytes]:
        """What a request is for, and the digest of its body.

        Raises:
            NodeUnproven: no machine has made this for this request, or it was shown before.
            OwnerUnavailable: it is too old.
        """
        said, _, shown = stamp.rpartition(b" ")
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        mac = self._mac(said, self._here.life, scope["method"], target, scope["headers"])
        if len(stamp) > LONGEST or not hmac.compare_digest(shown, mac.hex().encode()):
            raise NodeUnproven("no machine of this router has sent this request as it is")
        purpose, _, addressee, beat, _, digest = said.split(b" ")
        if int(addressee) != self._here.node:
            raise NodeUnproven("it was sent to another machine")
        now = self._beat()
        if not now - BEHIND <= int(beat) <= now + AHEAD:
            raise OwnerUnavailable("a request of another machine has come too late; ask again")
        try:
            if not self._seen.takes(int(beat), int.from_bytes(mac[:8], "big")):
                raise NodeUnproven("it was sent before")
        except OverflowError:
            raise OwnerUnavailable("too many requests of other machines at once; ask again") from None
        return purpose, digest

    def _mac(self, said: bytes, life: str, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts = [said, life.encode(), method.encode(), target]
        for name, value in headers:
            if name not in UNBOUND:
                parts += (name, value)
        return hmac.digest(self._key, b"".join(b"%d:%b" % (len(each), each) for each in parts), "sha256")


def checked(receive: Receive, digest: bytes) -> Receive:
    """A `receive` whose body is what was stamped. It raises NodeUnproven where that ends and is another one."""
    hashing, ended = hashlib.sha256(), False

    async def read() -> dict[str, object]:
        nonlocal ended
        message = await receive()
        if message["type"] == "http.request" and not ended:
            hashing.update(message.get("body", b""))
            ended = not message.get("more_body", False)
            if ended and not hmac.compare_digest(hashing.hexdigest().encode(), digest):
                raise NodeUnproven("the body is not what another machine has sent")
        return message  # type: ignore[return-value]

    return read
