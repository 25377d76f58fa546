"""The states of a client connection and of its requests, and the tables of their transitions: {state: {event: state}}.

Flow control is apart from them, because it is the same in each state, and so is what waits for the present reply:
pipelined requests, and the error that refuses the bytes behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class ConnectionState(str, Enum):
    """The use that a connection makes of its client's bytes."""

    OPEN = "open"  # it parses them, and answers one request after another
    STOPPING = "stopping"  # it parses them: the server stops, and the request that may be arriving is the last one
    FINISHING = "finishing"  # it ignores them: the last request has arrived or one was refused, and replies are due
    HALF_CLOSED = "half-closed"  # there are none: the client has closed its sending side, and replies are due
    LINGERING = "lingering"  # it ignores them: the last reply and a FIN were written, but the client may still send
    CLOSED = "closed"  # there are none: the router has closed the connection, or the client has disconnected


class ConnectionEvent(str, Enum):
    """A cause for a connection to change its state."""

    LAST_REQUEST = "last request"  # a request has arrived, or was chosen, behind which the connection closes
    REFUSAL = "refusal"  # the bytes are not a request, or come too slowly
    STOP = "stop"  # the server stops, and no request is being answered
    CLIENT_FIN = "client's FIN"
    OWN_FIN = "own FIN"
    CLOSE = "close"


class BodyState(str, Enum):
    """The arrival of a request's body. The states come in this order; the first two may be left out."""

    AWAITS_CONTINUE = "awaits continue"  # nothing: the client waits for `100 Continue`, and no reply has begun
    ARRIVING = "arriving"
    WHOLE = "whole"
    READ = "read"  # the app has received all of it


class ReplyState(str, Enum):
    """The progress of a reply."""

    WAITING = "waiting"  # nothing
    BEGUN = "begun"  # its head was, or soon will be, written
    ENDED = "ended"
    LOST = "lost"  # the client has disconnected, or its request was refused: further messages of the app are ignored


class ReplyEvent(str, Enum):
    """A message of the app, or the loss of its client."""

    START = "start"
    PART = "part of the body"
    END = "end"
    LOSS = "loss"


# The members by short names. Until Python 3.12, `ReplyState.BEGUN` costs five times as much as `BEGUN`.
OPEN, STOPPING, FINISHING, HALF_CLOSED, LINGERING, CLOSED = ConnectionState
LAST_REQUEST, REFUSAL, STOP, CLIENT_FIN, OWN_FIN, CLOSE = ConnectionEvent
AWAITS_CONTINUE, ARRIVING, WHOLE, READ = BodyState
WAITING, BEGUN, ENDED, LOST = ReplyState
START, PART, END, LOSS = ReplyEvent

#: The states in which the client's bytes are parsed.
READING = (OPEN, STOPPING)
#: The states of a reply that is still due.
UNFINISHED = (WAITING, BEGUN)

_FROM_EACH = {OWN_FIN: LINGERING, CLOSE: CLOSED}
_WHILE_READING = {
    LAST_REQUEST: FINISHING,
    REFUSAL: FINISHING,
    STOP: STOPPING,
    CLIENT_FIN: HALF_CLOSED,
    **_FROM_EACH,
}
CONNECTION: Mapping[ConnectionState, Mapping[ConnectionEvent, ConnectionState]] = {
    OPEN: _WHILE_READING,
    STOPPING: _WHILE_READING,
    # A parser that is at work finishes its bytes, which may have requests behind the last one.
    FINISHING: {LAST_REQUEST: FINISHING, CLIENT_FIN: HALF_CLOSED, **_FROM_EACH},
    HALF_CLOSED: _FROM_EACH,
    LINGERING: {CLOSE: CLOSED},
    CLOSED: {CLOSE: CLOSED},
}
REPLY: Mapping[ReplyState, Mapping[ReplyEvent, ReplyState]] = {
    WAITING: {START: BEGUN, LOSS: LOST},
    BEGUN: {PART: BEGUN, END: ENDED, LOSS: LOST},
    ENDED: {},
    LOST: dict.fromkeys(ReplyEvent, LOST),
}


class InvalidTransition(RuntimeError):
    """An error: an event that the table does not have for the present state. It is a bug of the caller."""

    def __init__(self, state: ConnectionState | ReplyState, event: ConnectionEvent | ReplyEvent) -> None:
        super().__init__(f"impossible in the state {state.value!r}: {event.value}")
