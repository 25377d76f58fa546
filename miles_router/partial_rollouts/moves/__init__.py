"""Running generations that another worker takes over, where one has more than it should and another fewer.

How long answers will be is unknown when their requests come, so that one worker's tail may be longer than another's.
The worker is told to abort the generation and answers with what it has sampled, and the other carries it on: what a
pause makes of it under `resume`, but for the cause. Nobody asked for this abort: its client never sees it.
"""

from miles_router.partial_rollouts.moves.mover import Mover

__all__ = ["Mover"]
