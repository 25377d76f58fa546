"""What a cut leaves at its edge: a halved character, a stop string that straddles it, an end that nobody declared.

An engine that is given the first part as its prompt sees none of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_router.partial_rollouts.continuation import learn_prompt
from miles_router.partial_rollouts.engine import CannotResume, Engine
from miles_router.partial_rollouts.joining import (
    AT_ONCE,
    EXPERTS,
    UNFINISHED,
    cut,
    ending,
    forming,
    join_base64,
    straddling,
)
from miles_router.partial_rollouts.parts import Part

#: Tokens on either side of a cut that are decoded to see the character it may have halved.
WINDOW = 16
HALVED = 3  # bytes of a character that may be there, and are shown as one U+FFFD each


async def ended(part: Part, engine: Engine) -> bool:
    """Whether the cut fell on the very token that ends the generation; it is over then, and `part.done`.

    Raises:
        CannotResume: it cannot be told. So with all of these.
    """
    answer, params = part.answer, part.params
    if answer is None or not answer["output_ids"]:
        return False
    ids, tail = answer["output_ids"], ""
    if part.stops:
        tail = (await engine.spell([ids[-_reach(part) :]]))[0]
        stable = tail.rstrip(UNFINISHED)
        part.forming = forming(stable, len(stable), part.stops, halved=stable != tail)
    ends: set[int] = set()
    if not params.get("ignore_eos"):
        await engine.is_end(ids[-1])
        ends = {*engine.end_tokens, *(params.get("stop_token_ids") or ())}
    found = ending(ids, tail, part.stops, ends, part.budget)
    if found is None:
        return False
    if part.experts_lost:
        await learn_prompt(part, engine)
        answer = _with_experts(answer, await engine.experts([*part.prompt, *ids], part.experts_from))
    part.answer = await _end_after(part, engine, answer, *found)
    part.done = True
    return True


async def _end_after(
    part: Part, engine: Engine, answer: Mapping[str, Any], tokens: int, finish: Mapping[str, Any]
) -> dict[str, Any]:
    """What an engine says of the end: a stop string is trimmed from the text, if it is to be seen there, and the token
    that stops is not shown."""
    matched, kept = finish.get("matched"), part.params.get("no_stop_trim")
    if isinstance(matched, str) and matched in answer["text"]:
        text = answer["text"][: answer["text"].index(matched) + (len(matched) if kept else 0)]
    else:
        text = await _text_of_first(part, engine, answer, tokens - (isinstance(matched, int) and not kept))
    return cut(answer, tokens, text, finish, experts_start=part.request.get("routed_experts_start_len") or 0)


async def _text_of_first(part: Part, engine: Engine, answer: Mapping[str, Any], tokens: int) -> str:
    """The text without what the ids behind the first `tokens` say."""
    text: str = answer["text"]
    ids = answer["output_ids"]
    if tokens == len(ids) or not text:
        return text
    await learn_prompt(part, engine)
    before = [*part.prompt, *ids[:tokens]][-WINDOW:]
    half, more = await _detokenize(part, engine, [before, [*before, *ids[tokens:]]])
    return text.removesuffix(more[len(half) :])


async def reveal(part: Part, engine: Engine) -> None:
    """What a worker that was lost had still held back of the text: characters and stop strings in the making."""
    answer = part.answer
    if answer is None or not part.held_back or not answer["output_ids"]:
        return
    await learn_prompt(part, engine)
    before = part.prompt[-WINDOW:]
    half, more = await _detokenize(part, engine, [before, [*before, *answer["output_ids"]]])
    text = more[len(half) :]
    if not text.startswith(answer["text"].rstrip(UNFINISHED)):
        raise CannotResume("the worker's tokenizer does not give the text it had")
    part.answer = {**answer, "text": text}
    part.halved, part.held_back = text.endswith(UNFINISHED), False


async def mend(part: Part, engine: Engine, *, finished: bool) -> tuple[dict[str, Any], bool]:
    """All that has come, and whether a stop string across the cut ends it. `finished`: the worker has ended this go."""
    assert part.answer is not None
    if part.halved:
        await _complete_character(part, engine, finished=finished)
    joined = part.so_far()
    assert joined is not None
    found = await _stopped(part, engine, joined) if part.forming else None
    if found is None:
        return joined, False
    tokens, finish = found
    if part.request.get("return_routed_experts") and not finished:
        # What is held of them is about the part before; the rest comes with an end, and there is none to come.
        rows = await engine.experts([*part.prompt, *joined["output_ids"][:tokens]], part.experts_from)
        held = joined["meta_info"].pop(EXPERTS, None)
        ended = await _end_after(part, engine, joined, tokens, finish)
        ended["meta_info"][EXPERTS] = held
        return _with_experts(ended, rows), True
    return await _end_after(part, engine, joined, tokens, finish), True


async def _stopped(part: Part, engine: Engine, joined: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """After how many tokens a stop string across the cut is complete, and the `finish_reason` that it makes."""
    assert part.answer is not None
    begin, reach = len(part.answer["output_ids"]), _reach(part)
    before, new = joined["output_ids"][:begin][-reach:], joined["output_ids"][begin : begin + reach]
    half, whole = await engine.spell([before, [*before, *new]])
    boundary = len(half.rstrip(UNFINISHED))
    halved = boundary < len(half)
    found = straddling(whole, boundary, part.stops, halved=halved)
    if found is None:
        part.forming = forming(whole.rstrip(UNFINISHED), boundary, part.stops, halved=halved)
        return None
    stop = found[1]
    texts = await engine.spell([[*before, *new[:count]] for count in range(1, len(new) + 1)])
    counts = (n for n, text in enumerate(texts, 1) if straddling(text, boundary, [stop], halved=halved))
    return begin + next(counts, len(new)), {"type": "stop", "matched": stop}


def _reach(part: Part) -> int:
    """Tokens that may spell a stop string: one for each byte at most, and some that spell nothing."""
    return 4 * max(map(len, part.stops), default=0) + AT_ONCE


def _with_experts(answer: dict[str, Any], rows: str) -> dict[str, Any]:
    """An answer with further rows; one without any, of a worker that gives none, stays without."""
    meta = {**answer["meta_info"], EXPERTS: join_base64(answer["meta_info"].get(EXPERTS) or "", rows)}
    if not meta[EXPERTS]:
        del meta[EXPERTS]
    return {**answer, "meta_info": meta}


async def _complete_character(part: Part, engine: Engine, *, finished: bool) -> None:
    """Put right the last character before the cut, which the cut may have halved, once the rest of it is there."""
    head = part.answer
    if head is None or part.current is None or not head["text"].endswith(UNFINISHED) or not part.prompt:
        return
    before = [*part.prompt, *head["output_ids"]][-WINDOW:]
    half, more = await _detokenize(part, engine, [before, [*before, *part.current["output_ids"][:WINDOW]]])
    if not finished and len(more) <= len(half) and more.endswith(UNFINISHED):
        return
    size = min(HALVED, len(head["text"]) - len(head["text"].rstrip(UNFINISHED)))
    part.answer = {**head, "text": head["text"][:-size] + more[len(half) - size : len(half)]}
    part.halved = False


async def _detokenize(part: Part, engine: Engine, ids: Sequence[Sequence[int]]) -> list[str]:
    return await engine.detokenize(ids, skip_special_tokens=part.params.get("skip_special_tokens") is not False)
