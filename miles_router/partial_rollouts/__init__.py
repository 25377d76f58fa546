"""Generations that outlive a pause, or the loss of their worker: cut, kept, carried on, and answered as one.

What a pause cut off is sent again after continue, to any worker, as `input_ids` = prompt + what was sampled, with the
rest of the budget. The client sees one answer, or one stream. What cannot be carried on exactly is returned as the
engine gave it: `finish_reason` `abort`.
"""

from miles_router.partial_rollouts.layer import PartialRollouts

__all__ = ["PartialRollouts"]
