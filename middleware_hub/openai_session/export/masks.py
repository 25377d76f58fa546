"""Loss masks that keep only some of a sample's sampled tokens.

    last_turn        keeps the tokens of the last turn
    newest_weights   keeps the tokens that the weights of the last token sampled
    no_reasoning     keeps the tokens behind the reasoning of each answer

Several masks together keep the tokens that every one of them keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.engines.parsers.local import MARKS, USUAL_MARKS
from miles_router.errors import BadRequest
from miles_router.trajectory import Trajectory

#: Decodes token ids to text.
Decode = Callable[[Sequence[int]], str]
Kept = npt.NDArray[np.uint8]

OPENER, CLOSER = USUAL_MARKS
#: The marks that end reasoning, of all model families.
CLOSERS = (CLOSER, *(end for _, end in MARKS.values()))


def of_last_turn(line: Sequence[Turn], trajectory: Trajectory, decode: Decode) -> Kept:
    """Keep the last turn's tokens."""
    kept = np.zeros(len(trajectory), np.uint8)
    kept[line[-1].prompt_tokens :] = 1
    return kept


def of_newest_weights(line: Sequence[Turn], trajectory: Trajectory, decode: Decode) -> Kept:
    """Keep the tokens of the weight version that sampled the last token.

    Raises:
        UnusableSample: that version is unknown.
    """
    runs, sampled = trajectory.weight_versions, np.flatnonzero(trajectory.loss_mask)
    kept = np.zeros(len(trajectory), np.uint8)
    if len(sampled) and (not runs or runs[-1].end <= sampled[-1]):
        raise UnusableSample(
            "newest_weights_are_known", f"turn {line[-1].number}: its last token has no weight version"
        )
    for run in runs:
        if run.version == runs[-1].version:
            kept[run.start : run.end] = 1
    return kept


def without_reasoning(line: Sequence[Turn], trajectory: Trajectory, decode: Decode) -> Kept:
    """Keep all tokens except reasoning and the mark that ends it.

    Raises:
        UnusableSample: an answer's reasoning does not occur in the text of its tokens.
    """
    kept = np.ones(len(trajectory), np.uint8)
    for turn in line:
        kept[turn.prompt_tokens : turn.prompt_tokens + _reasoning_tokens(turn, decode)] = 0
    return kept


Mask = Callable[[Sequence[Turn], Trajectory, Decode], Kept]
MASKS: Mapping[str, Mask] = {
    "last_turn": of_last_turn,
    "newest_weights": of_newest_weights,
    "no_reasoning": without_reasoning,
}
#: The name for no mask: every sampled token is in the loss.
ALL = "all"


def checked_masks(given: object) -> tuple[str, ...]:
    """Return the masks that a request or an option names.

    Raises:
        BadRequest: the value is neither a known name nor a list of known names.
    """
    names = [given] if isinstance(given, str) else given
    known = (ALL, *MASKS)
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name in known for name in names):
        raise BadRequest(f"mask must be one of {', '.join(known)}, or a list of them")
    return tuple(name for name in names if name != ALL)


def _reasoning_tokens(turn: Turn, decode: Decode) -> int:
    """Return how many of a turn's first sampled tokens are reasoning, including the mark that ends it."""
    ids = [token for piece in turn.sampled for token in piece.tokens.tolist()]
    text = decode(ids)
    end = _reasoning_end(turn, text)
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decode(ids[:middle]).startswith(text[:end]) else (middle + 1, high)
    return low


def _reasoning_end(turn: Turn, text: str) -> int:
    """Return how many characters of an answer's text are reasoning, including the mark that ends it."""
    found = turn.answer.get("reasoning_content") or turn.answer.get("reasoning")
    if not found:  # an engine without a reasoning parser leaves reasoning in the text
        opened = text.lstrip().startswith(OPENER)
        at = text.find(CLOSER) if opened else -1
        return at + len(CLOSER) if at >= 0 else len(text) * opened
    reasoning = str(found).strip()
    at = text.find(reasoning)
    if at < 0:
        reason = f"turn {turn.number}: the reasoning of its answer is not in the text of its tokens"
        raise UnusableSample("reasoning_is_found", reason)
    at += len(reasoning)
    behind = text[at:].lstrip()
    closer = next((each for each in CLOSERS if behind.startswith(each)), None)
    return at if closer is None else len(text) - len(behind) + len(closer)
