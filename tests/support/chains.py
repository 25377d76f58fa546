"""Which goes an answer is made of, by the account kept at the proxies, and whether it says exactly what they said."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.support.generations import Generation
from tests.support.recording_proxy import RecordingProxy


@dataclass
class Piece:
    """What one go at a worker gave to the answer: output positions `start .. end - 1`."""

    go: Generation
    start: int
    end: int

    @property
    def versions(self) -> list[str]:
        """The engine's own account; of a stream that broke off, what its events said."""
        told = self.go.position_versions() if self.go.finish is not None else self.go.told
        return told[: self.end - self.start]


def chain(
    proxies: Iterable[RecordingProxy], request_id: str, answer: dict[str, Any], *, index: int = 0, of: int = 1
) -> list[Piece]:
    """The goes of one of a request's `of` generations, in order; one that gave nothing has an empty piece."""
    ids = answer["output_ids"]
    goes = sorted(
        (go for proxy in proxies for go in proxy.begun if go.request_id == request_id), key=lambda go: go.arrived
    )
    asked: dict[int, list[Generation]] = {}
    for go in goes:
        asked.setdefault(id(go.body), []).append(go)
    opening = asked.pop(id(goes[0].body))
    assert len(opening) == of, "the first request asks for all generations"
    pieces = [Piece(opening[index], 0, 0)]
    texts = opening[0].body.get("text")
    spelled = (texts, texts[index * len(texts) // of] if isinstance(texts, list) else texts)
    known = answer["meta_info"].get("prompt_tokens", 0)
    for others in asked.values():
        if _ends(pieces[-1], ids):
            break
        go = others[index] if of > 1 and len(others) == of else others[0]
        start = 0 if len(others) == of > 1 or go.given is None else len(go.given) - known
        anothers = go.given is None and (pieces[-1].start > 0 or go.body.get("text") not in spelled)
        if not anothers and _continues(go, ids, start, opening[index]):
            pieces.append(Piece(go, start, start))
    while len(pieces) > 1 and not pieces[-1].go.sampled and pieces[-1].start < len(ids):
        pieces.pop()  # that of a sample of the same prompt, which has begun anew and has got nothing
    for piece, following in pairwise(pieces):
        piece.end = max(following.start, piece.start)
    pieces[-1].end = len(ids)
    return pieces


def _ends(piece: Piece, ids: Sequence[int]) -> bool:
    """Whether an answer is complete with this piece; what follows is another's, that began alike."""
    finish = piece.go.finish or {"type": "abort"}
    return finish["type"] != "abort" and piece.start + len(piece.go.sampled) >= len(ids)


def _continues(go: Generation, ids: Sequence[int], start: int, opening: Generation) -> bool:
    if start < 0 or (go.given is not None and start and list(go.given[len(go.given) - start :]) != list(ids[:start])):
        return False
    if not start and go.given != opening.given:
        return False
    if opening.given is not None and go.given is not None and list(go.given[: len(opening.given)]) != opening.given:
        return False
    rest = ids[start:]
    both = min(len(rest), len(go.sampled))
    return list(rest[:both]) == list(go.sampled[:both])


def check(answer: dict[str, Any], pieces: Sequence[Piece], *, prompt: Sequence[int] | None = None) -> int:
    """The answer is the concatenation of its pieces, and says so. Gives the number of positions compared."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    for piece in pieces:
        length = piece.end - piece.start
        assert ids[piece.start : piece.end] == piece.go.sampled[:length], "the ids are those that were sampled"
        last = piece is pieces[-1]
        if piece.go.finish is not None and not last and length:
            assert length == len(piece.go.sampled), "nothing that was sampled is dropped"
        if piece.start:
            assert piece.go.given is not None
            assert len(piece.go.given) == meta["prompt_tokens"] + piece.start
            assert prompt is None or piece.go.given[: len(prompt)] == list(prompt)
    if meta.get("output_token_logprobs") is not None:
        came = [(logprob, token) for logprob, token, _ in meta["output_token_logprobs"]]
        said = [pair for p in pieces for pair in zip(p.go.logprobs[: p.end - p.start], p.go.logprob_ids, strict=False)]
        assert came == said, "every logprob is the worker's"
        assert [token for _, token in came] == ids
    assert spread(meta["weight_versions"]) == [version for piece in pieces for version in piece.versions]
    assert meta["completion_tokens"] == len(ids)
    return len(ids)


def spread(spans: Sequence[dict[str, Any]]) -> list[str]:
    """The version of each position; the spans must follow each other without a gap, from 0 on."""
    at = 0
    versions: list[str] = []
    for span in spans:
        assert span["start"] == at, spans
        at = span["end"]
        versions += [span["version"]] * (span["end"] - span["start"])
    assert len(versions) == at
    return versions


def check_experts(answer: dict[str, Any], pieces: Sequence[Piece], *, row: int) -> int:
    """The rows of routed experts, `row` bytes each, are those that the workers gave, one for each token but the last.
    Gives their number."""
    rows, meta = b"", answer["meta_info"]
    for piece in pieces:
        given = base64.b64decode(piece.go.experts)
        if given:
            start = piece.go.body.get("routed_experts_start_len") or 0
            assert start * row == len(rows), "each go brings the rows that are missing"
        rows += given
    assert base64.b64decode(meta["routed_experts"]) == rows
    assert len(rows) == row * (meta["prompt_tokens"] + len(answer["output_ids"]) - 1)
    return len(rows) // row
