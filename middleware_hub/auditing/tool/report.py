"""Write a verdict as a text report. It quotes prompts, so it is for the user's terminal and not for logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from middleware_hub.auditing.tool.verdict import QUANTILES, SESSION, TEXT, Spread, Verdict

#: Rows shown per group, the largest distances first.
SHOWN = 8
HEADING = ("", "tokens", *(f"{quantile:g}" for quantile in QUANTILES))
TITLES = {
    "version": "by weight version",
    "worker": "by the worker that sampled",
    "recomputed_by": "by the worker that recomputed",
    "kind": "by kind of episode",
    "position": "by position",
    "sample": "by sample",
}


def plain(text: str) -> str:
    """Return a text from the router with control characters escaped, so that a terminal does not act on them."""
    return text if text.isprintable() else repr(text)


def lines(verdict: Verdict) -> Iterator[str]:
    """Yield the lines of the report; the last one is the verdict."""
    found = verdict.found
    yield f"{found.samples} samples of {found.kinds[SESSION]} sessions and {found.kinds[TEXT]} text rollouts"
    if verdict.total is not None:
        yield ""
        yield "|recorded - recomputed| in nats, by quantile"
        yield from _table(verdict)
    yield from _others(verdict)
    yield ""
    yield from _verdict(verdict)


def _table(verdict: Verdict) -> Iterator[str]:
    assert verdict.total is not None
    rows: list[tuple[str, ...]] = [HEADING, _row("all", verdict.total)]
    for by, title in TITLES.items():
        parts = verdict.parts[by]
        if by == "position":
            shown = list(parts.items())
        else:
            shown = sorted(parts.items(), key=lambda part: part[1].at, reverse=True)[:SHOWN]
        rows.append((title, *[""] * (len(HEADING) - 1)))
        rows += [_row(f"  {plain(name)}", each) for name, each in shown]
        if len(parts) > len(shown):
            rows.append((f"  and {len(parts) - len(shown)} more, with smaller distances", *[""] * (len(HEADING) - 1)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADING))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()


def _row(name: str, spread: Spread) -> tuple[str, ...]:
    return (name, str(spread.tokens), *(nats(value) for value in spread.quantiles.values()))


def nats(distance: float) -> str:
    """Return a distance with two significant digits, so that small float32 errors do not look like 0."""
    return f"{distance:.2g}"


def _others(verdict: Verdict) -> Iterator[str]:
    found = verdict.found
    if found.not_comparable:
        yield ""
        yield "tokens that cannot be compared"
        yield from (f"  {plain(reason)}: {count}" for reason, count in found.not_comparable.most_common())
    yield from (f"  an engine refused: {refusal!r}" for refusal in dict.fromkeys(found.refusals))
    yield ""
    yield f"prompts rendered again: {found.prompts['compared']}, different: {found.prompts['differ']}"
    yield from (
        f"  not rendered, {plain(reason)}: {count}" for reason, count in found.prompts_not_compared.most_common()
    )
    for difference in found.differences:
        yield from _difference(difference)


def _difference(difference: Mapping[str, Any]) -> Iterator[str]:
    yield f"  session {plain(difference['session_id'])}, turn {difference['turn']}, position {difference['position']}"
    for side in ("held", "rendered"):
        yield f"    {side + ':':<9} {difference[side]['text']!r}"


def _verdict(verdict: Verdict) -> Iterator[str]:
    limits, total = verdict.limits, verdict.total
    for part in verdict.too_far:
        yield f"TOO FAR: {plain(part)}"
    if verdict.slip is not None:
        way = "the next" if verdict.slip > 0 else "the previous"
        yield f"Recorded logprobs fit the engines' logprobs of {way} position: they are shifted by one."
    if verdict.found.prompts["differ"]:
        yield "DIFFERENT PROMPTS: the engines use another chat template than the router's checkpoint."
    if verdict.good is None:
        yield "NOTHING COMPARABLE: no recorded token could be compared with the weights that are loaded now."
    elif verdict.good and total is not None:
        at = f"{limits.quantile:g} of {total.tokens} tokens lie within {nats(total.at)} nats"
        yield f"GOOD: {at}, and {limits.threshold:g} are allowed."
