"""Audits of sessions: recorded turns are compared with what the engines compute for the same tokens now."""
