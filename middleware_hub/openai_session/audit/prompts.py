"""What turns were given, held against what the checkpoint's template writes of their messages now.

A wrong chat template shows in no logprob: the engine is as sure of its answers to a prompt that the trainer would never
write. So the messages are rendered anew, and the ids compared.

    no_messages         the prompt was a text or ids (`/v1/completions`)
    tools_not_held      the tools stand no longer as they were sent
    not_rendered        the template refuses the messages, or cannot continue what was before
    too_long            for a text that this router encodes
    own_input_ids, ...  the request asked for what no messages say
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from middleware_hub.openai_session.continuing.continuation import Continuation, Extension, HeldEnd, NotAppendOnly
from middleware_hub.openai_session.continuing.templates import CannotRender
from middleware_hub.openai_session.sessions.prompting import Context, read_key, shows_tools
from middleware_hub.openai_session.sessions.turn import UNRENDERED, Turn
from middleware_hub.tokenizing.async_encoder import TextTooLong
from miles_router.engines import paths
from miles_router.trajectory.pieces import Tokens

#: Tokens of each side that a difference is shown with, in front of its place and from there on.
BEFORE, BEHIND = 8, 24


class NotRendered(Exception):
    """A prompt that cannot be compared, for this reason in a word."""


class PromptCheck:
    """Renders prompts of one model anew. `decode`: token ids to text."""

    def __init__(self, continuation: Continuation, decode: Any) -> None:
        self._continuation = continuation
        self._decode = decode

    async def difference(self, turn: Turn, root: Turn) -> Mapping[str, Any] | None:
        """Where what a turn was given and what is rendered now part, with both texts around that place; None if they
        are the same. `root` is the first turn of its line.

        Raises:
            NotRendered: that cannot be told.
        """
        expected = await self._rendered(turn, root)
        dropped, given = turn.dropped, turn.given.tokens
        if (expected.drop, len(expected.ids)) == (dropped, len(given)) and np.array_equal(expected.ids, given):
            return None
        shared = min(len(expected.ids), len(given))
        unlike = np.flatnonzero(expected.ids[:shared] != given[:shared])
        place = int(unlike[0]) if len(unlike) else shared
        return {
            "turn": turn.number,
            "position": turn.prompt_tokens - len(given) + place,
            "held": {**self._shown(given, place), "dropped": dropped},
            "rendered": {**self._shown(expected.ids, place), "dropped": expected.drop},
        }

    def _shown(self, ids: Tokens, place: int) -> dict[str, Any]:
        first = max(0, place - BEFORE)
        window = ids[first : place + BEHIND].tolist()
        return {"tokens": len(ids), "ids": window[place - first :], "text": self._decode(window)}

    async def _rendered(self, turn: Turn, root: Turn) -> Extension:
        if turn.path == paths.COMPLETIONS:
            raise NotRendered("no_messages")
        if turn.facts.get(UNRENDERED) is not None:
            raise NotRendered(str(turn.facts[UNRENDERED]))
        tools, template_kwargs = _context(turn, root)
        try:
            if turn.parent is None:
                return Extension(0, await self._continuation.beginning(turn.appended, tools, template_kwargs))
            context = Context(tools, template_kwargs)
            return await self._continuation.after(HeldEnd.of(turn.parent), turn.appended, context)
        except TextTooLong:
            raise NotRendered("too_long") from None
        except (CannotRender, NotAppendOnly):
            raise NotRendered("not_rendered") from None


def _context(turn: Turn, root: Turn) -> tuple[Sequence[Any] | None, Mapping[str, Any]]:
    """Tools as they were sent, and template settings. The key of a context does not tell the order of names, which a
    template writes."""
    _, template_kwargs = read_key(turn.context)
    if not shows_tools(turn.context):
        return None, template_kwargs
    if not root.tools or root.context != turn.context:
        raise NotRendered("tools_not_held")
    return root.sent_tools, template_kwargs
