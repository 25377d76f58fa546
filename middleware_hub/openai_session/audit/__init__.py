"""Recorded turns held against what the engines say of the very tokens now."""
