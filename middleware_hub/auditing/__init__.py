"""Audits for all layers: recorded tokens are compared with what the engines compute for them now.

spans     which sampled tokens of a line can be compared
asking    asks the engines for logprobs
samples   compares the lines of an episode
audits    the episodes of a router's layers that can be audited
routes    the HTTP routes
tool/     the command `miles-router audit`, which asks these routes
"""
