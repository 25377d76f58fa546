"""Placement: choose the unit for each request, and remember the home unit of each session."""
