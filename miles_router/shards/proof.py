"""Mutual proof between two machines that both know the router's secret, without sending it."""

from __future__ import annotations

import asyncio
import hmac
import secrets

from miles_router import tasks

#: Bytes of a nonce, and of a proof.
NONCE, PROOF = 32, 32
#: Seconds in which the other side must send its proof.
PATIENCE = 10.0
#: The names of the side that accepts the connection and of the other one. They are part of the proof, so a side's own
#: proof cannot be sent back to it.
ACCEPTS, CONNECTS = b"leader", b"shard"


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, *, accepts: bool) -> None:
    """Return once both sides have proved that they know the secret.

    Args:
        accepts: whether this side has accepted the connection.

    Raises:
        ConnectionAbortedError: the other side closed without sending anything.
        OSError: the other side does not know the secret, is too slow, or disconnects.
    """
    side, other = (ACCEPTS, CONNECTS) if accepts else (CONNECTS, ACCEPTS)
    try:
        await tasks.within(PATIENCE, _prove(reader, writer, secret.encode(), side, other), name="prove")
    except (asyncio.IncompleteReadError, TimeoutError) as error:
        if isinstance(error, asyncio.IncompleteReadError) and not error.partial:
            raise ConnectionAbortedError("the other side disconnected without sending anything") from None
        raise ConnectionRefusedError("the other side has not proved that it knows the secret") from None


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
