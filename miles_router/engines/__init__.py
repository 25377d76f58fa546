"""The engine's wire, in one place: requests read, answers read, streams added up, bytes scanned. Pure.

Engines are named here alone.
"""
