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
#: The names of the two sides. They are part of the proof, so a side's own proof cannot be sent back to it.
ACCEPTS, CONNECTS = b"leader", b"shard"


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, *, side: bytes, other: bytes
) -> None:
    """Return once both sides have proved that they know the secret.

    Args:
        side: the name of this side.
        other: the name of the other side.

    Raises:
        ConnectionAbortedError: the other side closed without sending anything.
        OSError: the other side does not know the secret, is too slow, or disconnects.
    """
    try:
        await tasks.within(PATIENCE, _prove(reader, writer, secret.encode(), side, other), name="prove")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise ConnectionAbortedError("the other side disconnected without sending anything") from None
        raise ConnectionRefusedError("the other side has not proved that it knows the secret") from None
    except TimeoutError:
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
