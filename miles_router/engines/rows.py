"""Rows aligned with tokens on an engine's wire: by which fields they are asked for, and where answers tell them. Pure.

SGLang 0.5.23 (`io_struct.GenerateReqInput`, `openai/protocol.py`): `/generate` has them in `meta_info` of an answer and
of the last event of a generation; chat and completions in `meta_info` of each choice that was asked for it, else, and
behind the last chunk of a stream, once in the extension `sglext`. They are base64 of int32, row-major.

Chosen positions (`indexer_topk`) it tells whole, from the first row on, and at `/generate` alone; its builds for
training take `return_indexer_topk` in chat too, and tell them in `meta_info` of the choices.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from miles_router.engines.answers import MALFORMED, UnreadableAnswer, goes_on, is_abort, says_abort
from miles_router.engines.events import Event
from miles_router.engines.scan import Field
from miles_router.engines.writing import extended
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, RowKind


@dataclass(frozen=True)
class RowFields:
    """One kind of rows on the wire.

    Attributes:
        wanted: of a request: whether the engine is to tell them.
        start: of a request: the first row that it is to tell; None where it always tells all.
        rows: of an answer: the rows.
        remedy: what makes an engine tell them.
        in_chat_streams: whether streams of chat tell them.
    """

    kind: RowKind
    wanted: str
    start: str | None
    rows: Field
    remedy: str
    in_chat_streams: bool = True

    def request(self, start: int) -> dict[str, Any]:
        """The fields of a request for rows from `start` on, or from before it where that cannot be said."""
        return {self.wanted: True, **({} if self.start is None else {self.start: start})}

    def start_of(self, request: Mapping[str, Any]) -> int:
        """The first row that a request asks for."""
        return 0 if self.start is None else request.get(self.start) or 0

    def of(self, meta: Mapping[str, Any]) -> str | None:
        """The rows in an answer's `meta_info` or extension; None where it tells none."""
        rows = meta.get(self.rows.name)
        return rows if isinstance(rows, str) else None


EXPERT_FIELDS = RowFields(
    ROUTED_EXPERTS,
    wanted="return_routed_experts",
    start="routed_experts_start_len",
    rows=Field("routed_experts"),
    remedy="start it with --enable-return-routed-experts",
)
INDEXER_FIELDS = RowFields(
    INDEXER_TOPK,
    wanted="return_indexer_topk",
    start=None,
    rows=Field("indexer_topk"),
    remedy="start it with --enable-return-indexer-topk; in chat, its builds for training alone tell them",
    in_chat_streams=False,
)
#: The fields of every kind.
ROW_FIELDS: Mapping[RowKind, RowFields] = {fields.kind: fields for fields in (EXPERT_FIELDS, INDEXER_FIELDS)}


def decoded(encoded: str) -> bytes:
    """The rows that base64 spells.

    Raises:
        UnreadableAnswer: it is none.
    """
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise UnreadableAnswer("incomplete", f"rows are no base64: {error}") from error


def cut_rows(encoded: str, rows: int, start: int, stop: int) -> str:
    """Rows `[start, stop)` of `rows`.

    Raises:
        UnreadableAnswer: they are no such number of rows.
    """
    data = decoded(encoded)
    row, more = divmod(len(data), max(1, rows))
    if not 0 <= start <= stop <= rows or more:
        raise UnreadableAnswer("incomplete", f"{len(data)} bytes are no {rows} rows with {start} to {stop}")
    return base64.b64encode(data[start * row : stop * row]).decode("ascii")


def new_rows(fields: RowFields, encoded: str, rows: int, start: int) -> str:
    """Those from row `start` on, of an engine that was asked for them: where it takes no `start`, it told all `rows`.
    Raises as `cut_rows`."""
    return cut_rows(encoded, rows, start, rows) if fields.start is None and start and encoded else encoded


@dataclass(frozen=True)
class RowRequest:
    """A request for rows from `start` on; `by_client`: the client asked for them itself."""

    body: bytes
    start: int
    by_client: bool = False

    @classmethod
    def write(
        cls, body: bytes, fields: RowFields, start: int, *, parse: Callable[[bytes], Any], client_may: bool
    ) -> RowRequest:
        """Ask for rows from `start` on, or all where the engine takes no `start`. What a client asked for itself stays
        as it is where clients may.

        Args:
            parse: parses JSON; called only for a body that names one of the fields.
        """
        start = 0 if fields.start is None else start
        if not any(b'"%b"' % name.encode() in body for name in fields.request(start)):
            return cls(extended(body, fields.request(start)), start)
        parsed = parse(body)
        if not isinstance(parsed, Mapping):
            return cls(body, start)  # the engine says what is wrong with it
        if client_may and parsed.get(fields.wanted):
            own = parsed.get(fields.start) if fields.start is not None else None
            return cls(body, own if isinstance(own, int) else 0, by_client=True)
        return cls(orjson.dumps({**parsed, **fields.request(start)}), start)


class RowAnswer(NamedTuple):
    """What one answer says of itself.

    Attributes:
        place: among the answers to the request.
        meta: its `meta_info`, or the extension that stands for it; rows are in it.
        ended: whether the generation has ended, so that its rows must be there.
        aborted: whether it was cut off.
    """

    place: int
    meta: Mapping[str, Any]
    ended: bool
    aborted: bool = False

    @classmethod
    def read(cls, answer: Any, place: int | None = None) -> RowAnswer:
        """An answer, a choice or an event with `meta_info`; without `place`, its own `index` says where it belongs.

        Raises:
            UnreadableAnswer: it is none of the engine's.
        """
        try:
            meta = answer["meta_info"]
            finish = meta.get("finish_reason")
            return cls(answer.get("index", 0) if place is None else place, meta, finish is not None, is_abort(finish))
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error


class RowReader(Protocol):
    """Reads one reply of one API, whole or event by event."""

    def answers(self, parsed: Any) -> list[RowAnswer]:
        """All answers in the JSON of a whole reply.

        Raises:
            UnreadableAnswer: it is none of the engine's.
        """
        ...

    def event(self, event: Event, *, has_rows: bool) -> RowAnswer | None:
        """The answer that an event tells rows of, or the end of; None for all other events.

        Args:
            has_rows: whether there are rows in the event.

        Raises:
            UnreadableAnswer: it is none of the engine's.
        """
        ...


class GenerateRows:
    """Rows in a reply of `/generate`."""

    def answers(self, parsed: Any) -> list[RowAnswer]:
        """Each answer's `meta_info`."""
        every = parsed if isinstance(parsed, list) else [parsed]
        return [RowAnswer.read(answer, place) for place, answer in enumerate(every)]

    def event(self, event: Event, *, has_rows: bool) -> RowAnswer | None:
        """The last event of a generation has the rows. Those before it say again all that has come: they are not
        parsed."""
        if event.is_last or (not has_rows and goes_on(event.data)):
            return None
        return RowAnswer.read(event.parse())


class ChatRows:
    """Rows in a reply of chat or completions."""

    def __init__(self) -> None:
        self._aborted = False
        self._due = True  # of a stream: neither rows nor an error have come

    def answers(self, parsed: Any) -> list[RowAnswer]:
        """Each choice's `meta_info`; where none has one, the extension, which is about the first choice."""
        try:
            choices = parsed["choices"]
            if all(choice.get("meta_info") is None for choice in choices):
                aborted = is_abort(choices[0].get("finish_reason"))
                return [RowAnswer(0, parsed.get("sglext") or {}, ended=True, aborted=aborted)]
            return [RowAnswer.read(choice, choice["index"]) for choice in choices]
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error

    def event(self, event: Event, *, has_rows: bool) -> RowAnswer | None:
        """The extension has the rows. A stream that ends without them, and told of no error, has an answer without."""
        if event.is_last:
            return RowAnswer(0, {}, ended=True, aborted=self._aborted) if self._due else None
        if has_rows:
            parsed = event.parse()
            extension = parsed.get("sglext") if isinstance(parsed, dict) else None
            if not isinstance(extension, dict):
                raise UnreadableAnswer("incomplete", "rows that are not in the extension")
            self._due = False
            return RowAnswer(0, extension, ended=True)
        self._aborted = self._aborted or says_abort(event.data)
        self._due = self._due and not event.is_error
        return None
