"""Two ends of a connection between machines show each other that they know the router's secret, which is not sent."""

from __future__ import annotations

import asyncio
import hmac
import secrets

from miles_router import tasks

#: Bytes of a random text, and of its proof.
NONCE, PROOF = 32, 32
#: Seconds in which the other side must have shown it.
PATIENCE = 10.0
#: So that nobody is shown his own proof.
ACCEPTS, CONNECTS = b"leader", b"shard"


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, *, side: bytes, other: bytes
) -> None:
    """Return once both have.

    Args:
        side, other: which of the two this one is, and the other.

    Raises:
        ConnectionAbortedError: the other side has gone without a word.
        OSError: it does not know the secret, or ends.
    """
    try:
        await tasks.within(PATIENCE, _prove(reader, writer, secret.encode(), side, other), name="prove")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise ConnectionAbortedError("the other side has said nothing") from None
        raise ConnectionRefusedError("the other side has not shown that it knows the secret") from None
    except TimeoutError:
        raise ConnectionRefusedError("the other side has not shown that it knows the secret") from None


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, side: bytes, other: bytes
) -> None:
    ours = secrets.token_bytes(NONCE)
    writer.write(ours)
    theirs = await reader.readexactly(NONCE)
    writer.write(hmac.digest(secret, side + ours + theirs, "sha256"))
    shown = await reader.readexactly(PROOF)
    if not hmac.compare_digest(shown, hmac.digest(secret, other + theirs + ours, "sha256")):
        raise ConnectionRefusedError("the other side does not know the secret")
