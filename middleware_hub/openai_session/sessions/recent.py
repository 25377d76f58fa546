"""What is kept of the sessions that were used last, so that a turn costs what it adds and not what there was before.

An agent sends its whole history with every turn. Most of its request are the very bytes of the last one, and most of
the ids that the engine is given are those that it was given and has sampled with the last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from json import JSONDecoder
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import orjson

from middleware_hub.openai_session.sessions.agent_request import PromptIds
from middleware_hub.openai_session.sessions.messages import SentList, message_bytes
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.engines.client_json import is_too_deep, read_json
from miles_router.middlewares import Field
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens

#: Bytes that are kept of each kind.
MAX_BYTES = 256 * 1024 * 1024
#: Bytes of a request up to which it is compared with the last one; longer ones have bounds of their own.
LONGEST = 1 << 21
COMMA = ord(",")
_decode = JSONDecoder().raw_decode

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Something of each session; where there is no room for all, of those that were used last."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._most = most
        self._kept: OrderedDict[str, tuple[Value, int]] = OrderedDict()

    def get(self, session_id: str) -> Value | None:
        """What is kept of a session."""
        value, _ = self._kept.get(session_id, (None, 0))
        return value

    def keep(self, session_id: str, value: Value, nbytes: int) -> None:
        """In place of what was kept of it before."""
        self.forget(session_id)
        self._kept[session_id] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self._most:
            _, (_, nbytes) = self._kept.popitem(last=False)
            self.nbytes -= nbytes

    def forget(self, session_id: str) -> None:
        """Keep nothing of it."""
        _, nbytes = self._kept.pop(session_id, (None, 0))
        self.nbytes -= nbytes


class WrittenIds(Recent[tuple["ref[Turn]", bytes]]):
    """The ids of each session's last turn as a request has them: a list in JSON, without its end."""

    def prompt(self, session_id: str, prompt: PromptIds) -> tuple[bytes, ...]:
        """The ids of a prompt, as a list in JSON, in pieces: a long text is not copied more often than it must be."""
        turn, text = self.get(session_id) or (None, b"")
        if turn is None or turn() is not prompt.parent:
            text = _list(prompt.parent.trajectory().tokens)[:-1]
        for _ in range(prompt.dropped):
            text = text[: text.rindex(b",")]
        return text, *_more(prompt.given), b"]"

    def recorded(self, session_id: str, turn: Turn, prompt: Sequence[bytes]) -> None:
        """A turn was recorded whose prompt was written so."""
        *pieces, _ = prompt
        for piece in turn.sampled:
            pieces += _more(piece)
        text = b"".join(pieces)
        self.keep(session_id, (ref(turn), text), len(text))


def _list(ids: Tokens) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)


def _more(piece: Piece) -> tuple[bytes, ...]:
    """More ids for a list that has some."""
    return (b",", _list(piece.tokens)[1:-1]) if len(piece) else ()


class KnownRequest(NamedTuple):
    """A request whose list has this name. `behind` begins where the last item ends; where that is not known it is
    empty. `parsed` takes so many bytes."""

    name: str
    before: bytes
    behind: bytes
    parsed: dict[str, Any]
    parsed_bytes: int


class KnownRequests(Recent[KnownRequest]):
    """The last request of each session. One that adds items to its list, and changes nothing else, is that one and the
    items: what was known of it is not parsed again, and is the same objects."""

    def read(self, session_id: str, body: bytes, name: str) -> Any:
        """What `read_json` gives for a request whose list has this name. Raises as that."""
        known = self.get(session_id)
        if len(body) > LONGEST or (known is not None and known.name != name):
            known = None
        if known is not None and known.behind and (items := _added(known, body)):
            before = known.parsed[name]
            grown = {**known.parsed, name: SentList((*before, *items), before)}
            self._keep(session_id, body, len(known.behind), name, grown, known.parsed_bytes + message_bytes(items))
            return grown
        parsed = read_json(body)
        if isinstance(parsed, dict) and isinstance(parsed.get(name), list) and len(body) <= LONGEST:
            goes_on = known is None or not known.behind  # of one that did not, the next is looked at again
            behind = _behind_list(body, name, len(parsed[name])) if goes_on else b""
            parsed[name] = SentList(parsed[name])
            self._keep(session_id, body, len(behind), name, parsed, message_bytes(parsed))
        return parsed

    def _keep(
        self, session_id: str, body: bytes, behind: int, name: str, parsed: dict[str, Any], parsed_bytes: int
    ) -> None:
        end = len(body) - behind
        known = KnownRequest(name, body[:end], body[end:], parsed, parsed_bytes)
        self.keep(session_id, known, len(body) + parsed_bytes)


def _added(known: KnownRequest, body: bytes) -> list[Any] | None:
    """The items that a request adds to the list of a known one; None where that is not all that it does.

    What stands in front of the items, and what stands behind them, was read before, with the list open between them.
    """
    begin, end = len(known.before), len(body) - len(known.behind)
    if not _goes_on(body, known.before, known.behind):
        return None
    added = b"[[%b]]" % body[begin + 1 : end]  # as deep as they are in the request
    try:
        (items,) = parsed = orjson.loads(added)
    except ValueError:
        return None
    return None if is_too_deep(added, parsed) else items


def _goes_on(body: bytes, before: bytes, behind: bytes) -> bool:
    """Whether a text is these two and between them one that begins with a comma."""
    if len(body) <= len(before) + len(behind) or body[len(before)] != COMMA:
        return False
    return body.startswith(before) and body.endswith(behind)


def _behind_list(body: bytes, name: str, count: int) -> bytes:
    """What stands in a request behind the last item of its list, which has so many; nothing where that is not found.

    It is looked for in the first field of the list's name. Whether the bracket at its end is the list's own shows a
    further item in front of it: of a list within another field, or of one that a second field hides, the list has no
    more.
    """
    found = Field(name).find(body)
    if found is None:
        return b""
    try:
        text = body[found[1] :].decode()
        _, length = _decode(text)
        end = len(body[: found[1] + len(text[:length].encode()) - 1].rstrip())
        longer = orjson.loads(b"%b,0%b" % (body[:end], body[end:]))
    except ValueError:  # an empty list, what is read leniently, or numbers that one of the two does not read
        return b""
    return body[end:] if len(longer[name]) == count + 1 else b""
