"""Generations that are sampled in several attempts: each goes on behind exactly the tokens that it has, where a pause,
a move or the loss of a worker has cut it. `/generate` (`partial_rollouts`) and the turns of sessions share it."""
