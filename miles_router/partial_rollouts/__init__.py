"""Resume generations that a pause, or the loss of their worker, has cut: the client sees one answer, or one stream.

After the pause a cut generation is sent again, to any worker, with `input_ids` = prompt + sampled tokens, and the rest
of its token budget. A generation that cannot be resumed exactly is returned as the engine sent it, with
`finish_reason` `abort`.
"""

from miles_router.partial_rollouts.layer import PartialRollouts

__all__ = ["PartialRollouts"]
