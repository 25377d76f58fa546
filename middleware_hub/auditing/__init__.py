"""Recorded tokens held against what the engines say of them now, whichever layer holds them.

spans     which sampled tokens of a line can be compared
asking    asks the engines
samples   lines of an episode, compared
audits    what a router's layers hold that can be audited
routes    the same over HTTP
"""
