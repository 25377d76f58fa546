"""Generations that are sampled in several attempts: each attempt continues from exactly the tokens sampled so far.

A pause, a move or the loss of a worker ends an attempt. `/generate` (`partial_rollouts`) and the turns of sessions
share this package.
"""
