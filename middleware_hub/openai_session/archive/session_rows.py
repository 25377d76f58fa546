"""A session as rows, and back: its head, its turns with their messages and contexts, what was passed by, the replies
that may be asked for again, and the responses that it stores.

    session   0          head: contract, budget used, metadata, end, label and reward
    turn      number     `turn_rows.py`
    message   digest     JSON
    context   digest     tools and template settings
    tools     digest     as they were sent, compressed
    untraced  number     JSON
    reply     digest     of a turn under an `X-Turn-Id`: header (JSON) and body
    response  id         of the Responses API: its envelope (JSON)
    rows      kind, turn `row_bytes.py` of the door, where `--state-rows` is on
    settings  digest     what requests for responses asked for beside messages
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from middleware_hub.openai_session.archive.turn_rows import digest_of, message_row, read_turn, written_turn
from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, restored_end
from middleware_hub.openai_session.episodes.reading import read_contract
from middleware_hub.openai_session.faces.responses.envelope import NOTE, Envelope, Responses
from middleware_hub.openai_session.sessions.equality import MEANING, Equality
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.session import Session, Tally, label_of, shown_group
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.episodes import ENDED, IDLE
from miles_router.middlewares.rows import (
    RowChannel,
    TrajectoryRows,
    can_be_written,
    key_of_rows,
    read_rows,
    written_rows,
)
from miles_router.middlewares.state import Change, StateRow, header_texts, raw_headers
from miles_router.trajectory.rows import AlignedRows, RowKind

HEAD, TURN, MESSAGE, CONTEXT, TOOLS, UNTRACED, REPLY, RESPONSE, SETTINGS, ROWS = (
    *("session", "turn", "message", "context", "tools", "untraced", "reply", "response", "settings", "rows"),
)
#: Of an envelope, what JSON has as it is.
ENVELOPE = ("id", "created_at", "own", "seals", "usage", "cut_call")


@dataclass
class Saved:
    """What is held of a session: how many turns, and which rows."""

    turns: int = 0
    tokens: int = 0
    untraced: int = 0
    head: bytes = b""
    keys: dict[str, frozenset[str]] = field(default_factory=lambda: defaultdict(frozenset))


class Unsaved:
    """What of a session is not held yet: the changes, and what is held once they are made."""

    def __init__(self, session: Session, saved: Saved, *, with_rows: bool) -> None:
        self.changes: list[Change] = []
        self._session = session
        self._keys = {kind: {*keys} for kind, keys in saved.keys.items()}
        responses = session.notes.get(NOTE)
        self._responses = responses if isinstance(responses, Responses) else None
        self._tokens, self._with_rows = saved.tokens, with_rows
        for turn in session.turns[saved.turns :]:
            self._turn(turn)
        for number in range(saved.untraced, len(session.untraced)):
            self.changes.append(Change(UNTRACED, number, orjson.dumps(session.untraced[number])))
        for key, reply in session.repeats.items():
            name = digest_of(repr(key).encode())
            if name not in self._keys.get(REPLY, ()):
                self._put(REPLY, name, _written_reply(key, reply))
        for gone in self._keys.get(RESPONSE, set()) - (self._responses.stored if self._responses else set()):
            self._keys[RESPONSE].discard(gone)
            self.changes.append(Change(RESPONSE, gone, None))
        self._head = written_head(session, self._tokens)
        if self.changes or self._head != saved.head:
            head = {**self._head_fields(), "used_at": session.used_at}
            self.changes.append(Change(HEAD, 0, orjson.dumps(head, default=dict)))
        self._counts = len(session.turns), len(session.untraced)

    def _head_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(self._head)
        return fields

    def _turn(self, turn: Turn) -> None:
        keys = [self._put(MESSAGE, *message_row(message)) for message in turn.appended]
        self._put(CONTEXT, digest_of(turn.context), turn.context)
        if turn.tools:
            self._put(TOOLS, digest_of(turn.tools), turn.tools)
        self.changes.append(Change(TURN, turn.number, written_turn(turn, keys)))
        self._tokens += len(turn.given) + sum(map(len, turn.sampled))
        for kind in turn.rows if self._with_rows else ():
            rows = turn.rows[kind].rows
            parent = _number_of(None if rows is None else rows.parent, kind, self._session.turns)
            if rows is not None and can_be_written(rows, parent):
                self.changes.append(Change(ROWS, key_of_rows(kind, turn.number), written_rows(rows, parent)))
        response_id = turn.facts.get("response_id")
        envelope = self._responses.find(response_id) if self._responses is not None else None
        if envelope is not None and envelope.turn is turn:
            settings = orjson.dumps(envelope.settings.fields, default=dict)
            about = {name: getattr(envelope, name) for name in ENVELOPE}
            about |= {"turn": turn.number, "settings": self._put(SETTINGS, digest_of(settings), settings)}
            self._put(RESPONSE, envelope.id, orjson.dumps(about, default=dict))
        elif response_id is not None:  # one commit that seemed to fail may have held what was deleted since
            self.changes.append(Change(RESPONSE, response_id, None))

    def _put(self, kind: str, key: str, value: bytes) -> str:
        held = self._keys.setdefault(kind, set())
        if key not in held:
            held.add(key)
            self.changes.append(Change(kind, key, value))
        return key

    def made(self) -> Saved:
        """All of it is held."""
        turns, untraced = self._counts
        keys = defaultdict[str, frozenset[str]](frozenset, {kind: frozenset(of) for kind, of in self._keys.items()})
        return Saved(turns, self._tokens, untraced, self._head, keys)


def _number_of(rows: AlignedRows | None, kind: RowKind, turns: Iterable[Turn]) -> int | None:
    """The turn whose rows these are."""
    if rows is None:
        return None
    return next((each.number for each in turns if each.rows.get(kind, (None,))[0] is rows), None)


def written_head(session: Session, tokens: int) -> bytes:
    """What is true of a session as a whole, but for when it was used last."""
    episode = session.episode
    group = session.group
    head = {
        "created_at": session.created_at,
        "metadata": session.metadata,
        "contract": episode.contract.given,
        "key": episode.key,
        "group": group,
        "end_reason": session.ending.reason,
        "closed": session.ending.stopped_by,
        "used": episode.ledger.used,
        "finalized": session.finalized_with,
        "made_by_a_turn": session.by_header,
        "turns": len(session.turns),
        "tokens": tokens,
        "bytes": session.nbytes,
        "model": session.model,
        "tally": session.tally.upto(session.history).described(),
        "segments": len(session.roots),
        "finish_reason": session.turns[-1].finish_reason if session.turns else None,
    }
    return orjson.dumps(head, default=dict)


def _written_reply(key: RepeatKey, reply: RecordedReply) -> bytes:
    turn_id, path, digest = key
    about = {"turn_id": turn_id, "path": path, "digest": digest.hex(), "headers": header_texts(reply.headers)}
    return b"%b\n%b" % (orjson.dumps(about), reply.body)


def _read_reply(data: bytes) -> tuple[RepeatKey, RecordedReply]:
    text, _, body = data.partition(b"\n")
    header = orjson.loads(text)
    headers = raw_headers(header["headers"])
    return (header["turn_id"], header["path"], bytes.fromhex(header["digest"])), RecordedReply(headers, body)


def summary_of(session_id: str, head: bytes) -> dict[str, Any]:
    """The line in `GET /sessions` of a session that is held and not in memory."""
    known = orjson.loads(head)
    return {
        "session_id": session_id,
        **{name: known[name] for name in ("turns", "tokens", "bytes")},
        "in_flight": 0,
        "created_at": known["created_at"],
        "last_used_at": known["used_at"],
    }


def line_of(session_id: str, head: bytes) -> dict[str, Any]:
    """What a list of episodes shows of it, as `EpisodeRow` names that.

    Raises:
        KeyError, ValueError: it is no head.
    """
    known = orjson.loads(head)
    tally, model = known["tally"], (known["contract"] or {}).get("model") or {}
    return {
        "id": session_id,
        "state": IDLE if known["end_reason"] is None else ENDED,
        "group": shown_group(known["group"]),
        "label": label_of(known["metadata"]),
        "model": model.get("name") or model.get("lora") or known["model"],
        "turns": known["turns"],
        "under_way": 0,
        "segments": known["segments"],
        "leaves": tally["leaves"],
        "reasons": tally["reasons"],
        "tokens": {"all": tally["tokens"], "sampled": tally["sampled"], "trained": None},
        "finish_reason": known["finish_reason"],
        "end_reason": known["end_reason"],
        "weight_versions": tally["versions"],
        "workers": tally["workers"],
        "started_at": known["created_at"],
        "last_used_at": known["used_at"],
        "waited_s": tally["waited_s"],
    }


def read_session(
    session_id: str,
    rows: Iterable[StateRow],
    channels: Mapping[RowKind, RowChannel],
    *,
    now: float,
    clock: float,
    equal: Equality = MEANING,
) -> tuple[Session, Saved]:
    """A session as it was when it was last saved, and what is held of it. It is new to whoever looks at idle ones.

    Raises:
        KeyError, IndexError, TypeError, ValueError: rows are missing, or are none.
    """
    kinds: dict[str, dict[Any, bytes]] = defaultdict(dict)
    for kind, key, value in rows:
        kinds[kind][key] = value
    head = orjson.loads(kinds[HEAD][0])
    contract = read_contract(head["contract"]) if head["contract"] else NO_CONTRACT
    began = clock - (now - head["created_at"])
    session = Session(
        session_id,
        now=head["created_at"],
        clock=began,
        metadata=head["metadata"],
        contract=contract,
        by_header=head["made_by_a_turn"],
        equal=equal,
    )
    session.used_at, session.idle_since, session.model = head["used_at"], clock, head["model"]
    session.finalized_with, session.nbytes = head["finalized"], head["bytes"]
    session.ending = restored_end(head["end_reason"], head["closed"], finalized=head["finalized"] is not None)
    episode = session.episode
    episode.key = head["key"]
    episode.ledger.tokens, episode.ledger.turns = head["used"]["tokens"], head["used"]["turns"]
    messages = {key: orjson.loads(value) for key, value in kinds[MESSAGE].items()}
    for number in range(head["turns"]):
        turn = read_turn(kinds[TURN][number], session.turns, messages, kinds[CONTEXT], kinds[TOOLS])
        rows_held = dict(turn.rows)
        for row_kind in [each for each, taken in turn.rows.items() if taken.reason is None]:
            held = kinds[ROWS].get(key_of_rows(row_kind, number))
            before = partial(_rows_of, session.turns, row_kind)
            rows_held[row_kind] = read_rows(held, row_kind, before, channels, turn.facts.get("rid"))
        session.history.restore(replace(turn, rows=rows_held) if rows_held else turn)
    session.tally = Tally.restored(head["tally"], head["turns"])
    session.untraced += [orjson.loads(kinds[UNTRACED][number]) for number in range(len(kinds[UNTRACED]))]
    _restore_replies(session, kinds[REPLY].values())
    _restore_responses(session, kinds)
    keys = {kind: frozenset(of) for kind, of in kinds.items() if kind not in (HEAD, TURN, UNTRACED, ROWS)}
    written = written_head(session, head["tokens"])
    saved = Saved(head["turns"], head["tokens"], len(session.untraced), written, defaultdict(frozenset, keys))
    return session, saved


def _rows_of(turns: Sequence[Turn], kind: RowKind, number: int) -> TrajectoryRows:
    return turns[number].rows[kind]


def _restore_replies(session: Session, rows: Iterable[bytes]) -> None:
    for key, reply in map(_read_reply, rows):
        known = asyncio.get_running_loop().create_future()
        known.set_result(reply)
        session.replies[key], session.repeats[key] = known, reply


def _restore_responses(session: Session, kinds: Mapping[str, Mapping[Any, bytes]]) -> None:
    for turn in _of_responses(session):
        responses, response_id = Responses.of(session), turn.facts["response_id"]
        data = kinds[RESPONSE].get(response_id)
        if data is None:
            responses.know(response_id, turn)
            continue
        about = orjson.loads(data)
        settings = responses.settings(orjson.loads(kinds[SETTINGS][about["settings"]]))
        responses.keep(Envelope(settings=settings, **{name: about[name] for name in ENVELOPE}), turn, stored=True)


def _of_responses(session: Session) -> Iterator[Turn]:
    return (turn for turn in session.turns if turn.facts.get("response_id") is not None)
