"""Per-token rows (routed experts, indexer top-k) in requests and answers: the fields, a decoder and readers. No I/O.

SGLang 0.5.23 (`io_struct.GenerateReqInput`, `openai/protocol.py`). `/generate` returns rows in the `meta_info` of an
answer and of the last event of a generation. Chat and completions return them in the `meta_info` of each choice if the
request asks for it. Otherwise, and behind the last chunk of a stream, they come once in the extension `sglext`. Rows
are base64 of int32, row-major.

`indexer_topk` always comes in full, from the first row on, and only from `/generate`. SGLang builds for training accept
`return_indexer_topk` in chat too, and return it in the `meta_info` of the choices.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from miles_router.engines.answers import MALFORMED, UnreadableAnswer, contains_abort, is_abort, is_unfinished
from miles_router.engines.events import Event
from miles_router.engines.json_bytes import Field
from miles_router.engines.writing import extended
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, RowKind


@dataclass(frozen=True)
class RowFields:
    """The request and answer fields of one kind of rows.

    Attributes:
        wanted: the request field that asks for the rows.
        start: the request field for the first row to return; None if the engine always returns all rows.
        rows: the answer field that contains the rows.
        remedy: how to start the engine so that it returns the rows.
        in_chat_streams: whether chat streams contain the rows.
    """

    kind: RowKind
    wanted: str
    start: str | None
    rows: Field
    remedy: str
    in_chat_streams: bool = True

    def request(self, start: int) -> dict[str, Any]:
        """Return the request fields that ask for rows from `start` on, or for all rows if the engine has no such
        field."""
        return {self.wanted: True, **({} if self.start is None else {self.start: start})}

    def start_of(self, request: Mapping[str, Any]) -> int:
        """Return the first row that a request asks for."""
        return 0 if self.start is None else request.get(self.start) or 0

    def of(self, meta: Mapping[str, Any]) -> str | None:
        """Return the rows, in base64, from an answer's `meta_info` or extension; None if it has none."""
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
    remedy="start it with --enable-return-indexer-topk; in chat, only SGLang builds for training return them",
    in_chat_streams=False,
)
ROW_FIELDS: Mapping[RowKind, RowFields] = {fields.kind: fields for fields in (EXPERT_FIELDS, INDEXER_FIELDS)}


def decode_rows(encoded: str) -> bytes:
    """Decode rows from base64.

    Raises:
        UnreadableAnswer: the text is not base64.
    """
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise UnreadableAnswer("incomplete", f"the rows are not valid base64: {error}") from error


def cut_rows(encoded: str, rows: int, start: int, stop: int) -> str:
    """Return rows `[start, stop)` out of `rows` rows, in base64 like the input.

    Raises:
        UnreadableAnswer: the data does not divide into `rows` rows, or the range lies outside them.
    """
    data = decode_rows(encoded)
    row, more = divmod(len(data), max(1, rows))
    if not 0 <= start <= stop <= rows or more:
        raise UnreadableAnswer("incomplete", f"{len(data)} bytes do not have rows {start} to {stop} of {rows}")
    return base64.b64encode(data[start * row : stop * row]).decode("ascii")


def rows_from_start(fields: RowFields, encoded: str, rows: int, start: int) -> str:
    """Return the rows from token `start` on, in base64 like the input.

    An engine with a `start` field has already returned only these. Otherwise the engine returned all `rows` rows, and
    this function cuts them. Raises the errors of `cut_rows`.
    """
    return cut_rows(encoded, rows, start, rows) if fields.start is None and start and encoded else encoded


@dataclass(frozen=True)
class RowRequest:
    """A request body that asks for rows from `start` on. `by_client`: the client itself asked for them."""

    body: bytes
    start: int
    by_client: bool = False

    @classmethod
    def write(
        cls, body: bytes, fields: RowFields, start: int, *, parse: Callable[[bytes], Any], client_may: bool
    ) -> RowRequest:
        """Ask for rows from `start` on, or for all rows if the engine has no `start` field.

        Args:
            parse: parses JSON; called only for a body that contains one of the fields.
            client_may: keep a request for rows that the client made itself.
        """
        start = 0 if fields.start is None else start
        if not any(b'"%b"' % name.encode() in body for name in fields.request(start)):
            return cls(extended(body, fields.request(start)), start)
        parsed = parse(body)
        if not isinstance(parsed, Mapping):
            return cls(body, start)  # the engine reports what is wrong
        if client_may and parsed.get(fields.wanted):
            own = parsed.get(fields.start) if fields.start is not None else None
            return cls(body, own if isinstance(own, int) else 0, by_client=True)
        return cls(orjson.dumps({**parsed, **fields.request(start)}), start)


class RowAnswer(NamedTuple):
    """One answer, with the fields that matter for its rows.

    Attributes:
        place: its index among the answers to the request.
        meta: the object that contains the rows: its `meta_info`, or the extension.
        ended: whether the generation has ended, so that its rows must be present.
        aborted: whether the generation was aborted.
    """

    place: int
    meta: Mapping[str, Any]
    ended: bool
    aborted: bool = False

    @classmethod
    def read(cls, answer: Any, place: int | None = None) -> RowAnswer:
        """Read an answer, a choice or an event with `meta_info`. Without `place`, its own `index` is used.

        Raises:
            UnreadableAnswer: it does not have the engine's structure.
        """
        try:
            meta = answer["meta_info"]
            finish = meta.get("finish_reason")
            return cls(answer.get("index", 0) if place is None else place, meta, finish is not None, is_abort(finish))
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error


class RowReader(Protocol):
    """A reader of one reply of one API, whole or event by event."""

    def answers(self, parsed: Any) -> list[RowAnswer]:
        """Return all answers in the JSON of a whole reply.

        Raises:
            UnreadableAnswer: the JSON does not have the engine's structure.
        """
        ...

    def event(self, event: Event, *, has_rows: bool) -> RowAnswer | None:
        """Return the answer whose rows or end an event contains; None for all other events.

        Args:
            has_rows: whether the event contains rows.

        Raises:
            UnreadableAnswer: the event does not have the engine's structure.
        """
        ...


class GenerateRows:
    """A reader of rows in a reply of `/generate`."""

    def answers(self, parsed: Any) -> list[RowAnswer]:
        every = parsed if isinstance(parsed, list) else [parsed]
        return [RowAnswer.read(answer, place) for place, answer in enumerate(every)]

    def event(self, event: Event, *, has_rows: bool) -> RowAnswer | None:
        """Return the last event of a generation, which has the rows. Earlier events repeat earlier tokens and are not
        parsed."""
        if event.is_last or (not has_rows and is_unfinished(event.data)):
            return None
        return RowAnswer.read(event.parse())


class ChatRows:
    """A reader of rows in a reply of chat or completions."""

    def __init__(self) -> None:
        self._aborted = False
        self._due = True  # in a stream: neither rows nor an error have arrived

    def answers(self, parsed: Any) -> list[RowAnswer]:
        """Return each choice's `meta_info`; if no choice has one, the extension, which belongs to the first choice."""
        try:
            choices = parsed["choices"]
            if all(choice.get("meta_info") is None for choice in choices):
                aborted = is_abort(choices[0].get("finish_reason"))
                return [RowAnswer(0, parsed.get("sglext") or {}, ended=True, aborted=aborted)]
            return [RowAnswer.read(choice, choice["index"]) for choice in choices]
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error

    def event(self, event: Event, *, has_rows: bool) -> RowAnswer | None:
        """Return the extension, which has the rows. A stream that ends without rows and without an error yields an
        answer without rows."""
        if event.is_last:
            return RowAnswer(0, {}, ended=True, aborted=self._aborted) if self._due else None
        if has_rows:
            parsed = event.parse()
            extension = parsed.get("sglext") if isinstance(parsed, dict) else None
            if not isinstance(extension, dict):
                raise UnreadableAnswer("incomplete", "rows that are not in the extension")
            self._due = False
            return RowAnswer(0, extension, ended=True)
        self._aborted = self._aborted or contains_abort(event.data)
        self._due = self._due and not event.is_error
        return None
