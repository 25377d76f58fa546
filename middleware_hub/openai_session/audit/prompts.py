"""Compares the prompt ids of recorded turns with what the checkpoint's chat template writes for their messages now.

A wrong chat template shows in no logprob: the engine is just as confident about answers to a prompt that the trainer
would never write. So the messages are rendered again, and the ids compared.

Reasons why a prompt is not compared:

    no_messages         the prompt was a text or ids (`/v1/completions`)
    tools_not_held      the session no longer has the tools as they were sent
    not_rendered        the template refuses the messages, or cannot continue the turn before
    too_long            a text is longer than this router encodes
    own_input_ids, ...  the request used a feature that messages cannot express
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from middleware_hub.openai_session.continuing.continuation import Continuation, Extension, HeldEnd, NotAppendOnly
from middleware_hub.openai_session.continuing.templates import CannotRender
from middleware_hub.openai_session.sessions.turn import UNRENDERED, Context, Turn, read_key, shows_tools
from middleware_hub.tokenizing.async_encoder import TextTooLong
from miles_router.engines import paths
from miles_router.trajectory.pieces import Tokens

#: The tokens shown around a difference: in front of its position, and from there on.
BEFORE, BEHIND = 8, 24


class NotRendered(Exception):
    """A prompt that cannot be compared; the message is one of the reasons above."""


class PromptCheck:
    """A checker of one model's prompts.

    Args:
        decode: converts a list of token ids to text.
    """

    def __init__(self, continuation: Continuation, decode: Any) -> None:
        self._continuation = continuation
        self._decode = decode

    async def difference(self, turn: Turn, root: Turn) -> Mapping[str, Any] | None:
        """Return the first difference between a turn's prompt and its new rendering, with both texts around it, or
        None.

        Args:
            root: the first turn of the line.

        Raises:
            NotRendered: the prompt cannot be compared.
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
    """Return the tools as they were sent, and the template settings. Tools come from the root turn: the key of a
    context sorts names, and a template writes them in the order as sent.

    Raises:
        NotRendered: the root turn does not have them.
    """
    _, template_kwargs = read_key(turn.context)
    if not shows_tools(turn.context):
        return None, template_kwargs
    if not root.tools or root.context != turn.context:
        raise NotRendered("tools_not_held")
    return root.sent_tools, template_kwargs
