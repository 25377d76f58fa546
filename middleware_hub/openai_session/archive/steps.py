"""Convert a session to blobs of the journal, and back.

Blob 0 is the head. Each commit that adds more than a new head appends one step; a load replays the steps in order:

    header (`with_header`)   turns, untraced requests, replies by `X-Turn-Id`, responses stored and deleted, rewards
    things                   messages (JSON), contexts, tools (compressed), settings of responses (JSON)
    arrays of each turn      given ids (int32); for each sampled piece its ids (int32) and logprobs (float32)
    bodies of replies

A thing is written once for each session. Turns refer to a thing by its index in the order of writing. Rows of experts
are large blobs, one for each turn and kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import orjson

from middleware_hub.openai_session.agent_apis.responses.envelope import NOTE, Envelope, Responses
from middleware_hub.openai_session.archive.head import session_of, written_head
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.session import Session, Tally
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.rows import (
    NOT_WRITTEN,
    RowChannel,
    RowsByKind,
    TrajectoryRows,
    can_be_written,
    number_of_rows,
    read_rows,
    written_rows,
)
from miles_router.middlewares.state import Blobs, header_of, header_texts, raw_headers, with_header
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import frozen
from miles_router.trajectory.rows import KINDS, AlignedRows, RowKind
from miles_router.trajectory.sampling_mask import SamplingMask

HEAD = 0
IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
#: Fields of a turn that are written as JSON without conversion.
PLAIN = (*("path", "answer", "dropped", "finish_reason", "ended_itself", "choice", "segment", "facts", "side_call"),)
#: Fields of an envelope that are written as JSON without conversion.
ENVELOPE = ("id", "created_at", "own", "seals", "usage", "cut_call")


@dataclass(slots=True)
class Saved:
    """The contents of the journal for one session: counts of its parts, the last head, and the places of things."""

    steps: int = 0
    things: int = 0
    turns: int = 0
    tokens: int = 0
    untraced: int = 0
    replies: int = 0
    rewards: int = 0
    head: bytes = b""
    used_at: float = 0.0  # the value in `head`
    responses: frozenset[str] = frozenset()
    #: Indices of things that may recur: messages by `id()`, because the session keeps the objects alive; contexts and
    #: tools by their bytes; settings by digest.
    places: dict[int | bytes, int] = field(default_factory=dict)


class Unsaved:
    """The changes of a session that the journal lacks: the blobs to append, and the journal's content afterwards."""

    def __init__(self, session: Session, saved: Saved, *, with_rows: bool) -> None:
        self._session, self._saved, self._with_rows = session, saved, with_rows
        self._places: dict[int | bytes, int] = {}
        self._things: list[bytes] = []
        self._parts: list[bytes] = []
        self._tokens = saved.tokens
        #: Rows of experts of new turns, by number of the large blob.
        self.large: dict[int, bytes] = {}
        responses = session.notes.get(NOTE)
        self._responses = responses if isinstance(responses, Responses) else Responses()
        turns = session.turns[saved.turns :]
        envelopes = [envelope for turn in turns if (envelope := self._envelope(turn)) is not None]
        self._deleted = saved.responses - self._responses.stored
        self._stored = {envelope.id for envelope in envelopes}
        step = {
            "turns": [self._turn(turn) for turn in turns],
            "untraced": session.untraced[saved.untraced :],
            "replies": [self._reply(*each) for each in islice(session.repeats.items(), saved.replies, None)],
            "responses": [self._response(each) for each in envelopes],
            "deleted": [*self._deleted],
            "rewards": session.rewards.log[saved.rewards :],
        }
        #: Blobs to append; empty if the journal is complete.
        self.blobs: dict[int, bytes] = {}
        if any(step.values()):
            step["things"] = [*map(len, self._things)]
            self.blobs[saved.steps + 1] = with_header(step, (*self._things, *self._parts))
        if self.blobs or written_head(session, self._tokens, saved.used_at) != saved.head:
            self._used_at = session.used_at
            self.blobs[HEAD] = written_head(session, self._tokens, session.used_at)
        self._counts = len(session.turns), len(session.untraced), len(session.repeats), len(session.rewards.log)

    def _envelope(self, turn: Turn) -> Envelope | None:
        envelope = self._responses.find(turn.facts.get("response_id"))
        return envelope if envelope is not None and envelope.turn is turn else None

    def _place(self, key: int | bytes, write: Callable[[], bytes]) -> int:
        place = self._saved.places.get(key, self._places.get(key))
        if place is None:
            place = self._places[key] = self._saved.things + len(self._things)
            self._things.append(write())
        return place

    def _message(self, message: Message) -> int:
        return self._place(id(message), lambda: orjson.dumps(message, default=dict))

    def _turn(self, turn: Turn) -> dict[str, Any]:
        self._tokens += len(turn.given) + sum(map(len, turn.sampled))
        same = None if turn.request == turn.number else turn.request
        if same is None:
            self._parts.append(turn.given.tokens.astype(IDS, copy=False).tobytes())
        sampled = []
        for piece in turn.sampled:
            assert piece.logprobs is not None
            mask = b"" if piece.sampling_mask is None else piece.sampling_mask.to_bytes()
            self._parts.append(piece.tokens.astype(IDS, copy=False).tobytes())
            self._parts += [piece.logprobs.astype(LOGPROBS, copy=False).tobytes(), mask]
            sampled.append([len(piece), piece.version, piece.trained, len(mask)])
        return {
            **{name: getattr(turn, name) for name in PLAIN},
            "parent": None if turn.parent is None else turn.parent.number,
            "messages": [*map(self._message, turn.appended)],
            "context": self._place(turn.context, lambda: turn.context),
            "tools": self._place(turn.tools, lambda: turn.tools) if turn.tools else None,
            "given": len(turn.given) if same is None else 0,
            "given_of": same,
            "sampled": sampled,
            "rows": {kind.name: self._rows(turn, kind, taken) for kind, taken in turn.rows.items()},
        }

    def _rows(self, turn: Turn, kind: RowKind, taken: TrajectoryRows) -> str | None:
        """Write a turn's rows of a kind. Return None if they are written, else the reason why there are none."""
        rows = taken.rows
        if rows is None:
            return taken.reason or NOT_WRITTEN
        parent = _owner_number(rows.parent, kind, self._session.turns)
        if not (self._with_rows and can_be_written(rows, parent)):
            return NOT_WRITTEN
        self.large[number_of_rows(kind, turn.number)] = written_rows(rows, parent)
        return None

    def _reply(self, key: RepeatKey, reply: RecordedReply) -> dict[str, Any]:
        turn_id, path, digest = key
        self._parts.append(reply.body)
        headers = header_texts(reply.headers)
        return {"turn_id": turn_id, "path": path, "digest": digest.hex(), "headers": headers, "body": len(reply.body)}

    def _response(self, envelope: Envelope) -> dict[str, Any]:
        settings = orjson.dumps(envelope.settings.fields, default=dict)
        place = self._place(blake2b(settings, digest_size=16).digest(), lambda: settings)
        return {**{name: getattr(envelope, name) for name in ENVELOPE}, "settings": place}

    def after_append(self) -> Saved:
        """Return a summary of the journal's content, valid once the blobs are durable."""
        saved = self._saved
        saved.turns, saved.untraced, saved.replies, saved.rewards = self._counts
        saved.tokens, saved.things = self._tokens, saved.things + len(self._things)
        saved.steps += saved.steps + 1 in self.blobs
        if HEAD in self.blobs:
            saved.head, saved.used_at = self.blobs[HEAD], self._used_at
        if self._stored or self._deleted:
            saved.responses = (saved.responses | self._stored) - self._deleted
        saved.places.update(self._places)
        return saved


def _sampled(parts: _Cursor, count: int, version: str | None, trained: bool, mask_bytes: int = 0) -> Piece:
    tokens, logprobs = parts.array(IDS, count), parts.array(LOGPROBS, count)
    mask = SamplingMask.from_bytes(parts.bytes(mask_bytes), count) if mask_bytes else None
    return Piece(tokens, logprobs, version, trained=trained, sampling_mask=mask)


def _owner_number(rows: AlignedRows | None, kind: RowKind, turns: Iterable[Turn]) -> int | None:
    """Return the number of the turn that owns these rows, or None."""
    if rows is None:
        return None
    return next((each.number for each in turns if each.rows.get(kind, (None,))[0] is rows), None)


def read_session(
    session_id: str,
    blobs: Blobs,
    large: MutableMapping[int, bytes],
    channels: Mapping[RowKind, RowChannel],
    *,
    now: float,
    clock: float,
    equal: Equality = MEANING,
) -> tuple[Session, Saved]:
    """Rebuild a session from its blobs; also return what the journal contains of it.

    Args:
        large: rows of experts by blob number. Read rows are removed; unused if no layer keeps rows.

    Raises:
        KeyError, IndexError, TypeError, ValueError: blobs are missing or invalid.
    """
    head = orjson.loads(blobs[HEAD])
    session = session_of(session_id, head, now=now, clock=clock, equal=equal)
    replay = _Replay(session, large, channels)
    for number in range(1, len(blobs)):
        replay.step(blobs[number])
    if head["turns"] != len(session.turns):
        raise ValueError(f"the head counts {head['turns']} turns, but the steps contain {len(session.turns)}")
    session.tally = Tally.restored(head["tally"], head["turns"])
    replay.restore_responses()
    return session, replay.saved(head, blobs)


class _Replay:
    """A session that is being rebuilt from its steps."""

    def __init__(
        self, session: Session, large: MutableMapping[int, bytes], channels: Mapping[RowKind, RowChannel]
    ) -> None:
        self._session, self._large, self._channels = session, large, channels
        self._things: list[bytes] = []
        self._places: dict[int | bytes, int] = {}
        self._responses: dict[str, dict[str, Any]] = {}
        self._message = cache(self._parsed_message)

    def step(self, blob: bytes) -> None:
        """Apply one step."""
        header, begin = header_of(blob)
        parts = _Cursor(blob, begin)
        self._things += [parts.bytes(length) for length in header["things"]]
        for turn in header["turns"]:
            self._session.history.restore(self._turn(turn, parts))
        self._session.untraced += header["untraced"]
        self._session.rewards.set(header["rewards"])
        for reply in header["replies"]:
            key = reply["turn_id"], reply["path"], bytes.fromhex(reply["digest"])
            recorded = RecordedReply(raw_headers(reply["headers"]), parts.bytes(reply["body"]))
            known = asyncio.get_running_loop().create_future()
            known.set_result(recorded)
            self._session.replies[key], self._session.repeats[key] = known, recorded
        self._responses |= {response["id"]: response for response in header["responses"]}
        for response_id in header["deleted"]:
            self._responses.pop(response_id, None)
        parts.end()

    def _parsed_message(self, place: int) -> Message:
        message: Message = orjson.loads(self._things[place])
        self._places[id(message)] = place
        return message

    def _bytes(self, place: int) -> bytes:
        thing = self._things[place]
        self._places[thing] = place
        return thing

    def _turn(self, header: Mapping[str, Any], parts: _Cursor) -> Turn:
        turns, of = self._session.turns, header["given_of"]
        given = Piece(parts.array(IDS, header["given"])) if of is None else turns[of].given
        sampled = [_sampled(parts, *each) for each in header["sampled"]]
        return Turn(
            **{name: header[name] for name in PLAIN},
            parent=None if header["parent"] is None else turns[header["parent"]],
            appended=tuple(map(self._message, header["messages"])),
            context=self._bytes(header["context"]),
            tools=b"" if header["tools"] is None else self._bytes(header["tools"]),
            given=given,
            sampled=tuple(sampled),
            number=len(turns),
            request=len(turns) if of is None else turns[of].request,
            rows=self._rows(header["rows"], header["facts"].get("rid")),
        )

    def _rows(self, reasons: Mapping[str, str | None], rid: str | None) -> RowsByKind:
        turns: Sequence[Turn] = self._session.turns
        found: dict[RowKind, TrajectoryRows] = {}
        for kind in [kind for kind in KINDS if kind.name in reasons]:
            if (reason := reasons[kind.name]) is not None:
                found[kind] = TrajectoryRows(None, reason)
            else:
                data = self._large.pop(number_of_rows(kind, len(turns)), None)
                before = lambda number, kind=kind: turns[number].rows[kind]  # noqa: E731
                found[kind] = read_rows(data, kind, before, self._channels, rid)
        return found

    def restore_responses(self) -> None:
        """Restore stored responses. Of other responses, only their id and turn are known."""
        for turn in self._of_responses():
            responses, response_id = Responses.of(self._session), turn.facts["response_id"]
            about = self._responses.get(response_id)
            if about is None:
                responses.index_answer(response_id, turn)
                continue
            settings = responses.settings(orjson.loads(self._things[about["settings"]]))
            responses.keep(Envelope(settings=settings, **{name: about[name] for name in ENVELOPE}), turn, stored=True)

    def _of_responses(self) -> Iterator[Turn]:
        return (turn for turn in self._session.turns if turn.facts.get("response_id") is not None)

    def saved(self, head: Mapping[str, Any], blobs: Blobs) -> Saved:
        """Return a summary of the journal's content, after all steps are applied."""
        session = self._session
        for about in self._responses.values():
            settings = self._things[about["settings"]]
            self._places[blake2b(settings, digest_size=16).digest()] = about["settings"]
        return Saved(
            steps=len(blobs) - 1,
            things=len(self._things),
            turns=len(session.turns),
            tokens=head["tokens"],
            untraced=len(session.untraced),
            replies=len(session.repeats),
            rewards=len(session.rewards.log),
            head=written_head(session, head["tokens"], head["used_at"]),
            used_at=head["used_at"],
            responses=frozenset(self._responses),
            places=self._places,
        )


class _Cursor:
    """A reader of the parts behind a header. Each part that it returns is a copy."""

    def __init__(self, data: bytes, begin: int) -> None:
        self._data, self._at = data, begin

    def bytes(self, length: int) -> bytes:
        """Return the next `length` bytes.

        Raises:
            ValueError: the data ends before.
        """
        if not 0 <= length <= len(self._data) - self._at:
            raise ValueError(f"a part of {length} bytes does not fit in the data")
        self._at += length
        return self._data[self._at - length : self._at]

    def array(self, kind: np.dtype[Any], count: int) -> Any:
        """Return the next array.

        Raises:
            ValueError: the data ends before.
        """
        array = np.frombuffer(self.bytes(count * kind.itemsize), kind).astype(kind.newbyteorder("="))
        return frozen(array)

    def end(self) -> None:
        """Require that all data was read.

        Raises:
            ValueError: some data is left.
        """
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left behind the last part")
