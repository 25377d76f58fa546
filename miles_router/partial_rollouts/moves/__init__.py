"""Move running generations from workers with many requests to workers with few.

The length of answers is unknown when requests arrive, so one worker can have a longer tail of generations than another.
The router has a worker abort a generation; the worker answers with its sampled tokens, and another worker continues
from them, as after a pause under `resume`. The client did not ask for this abort and never sees it.
"""

from miles_router.partial_rollouts.moves.mover import Mover

__all__ = ["Mover"]
