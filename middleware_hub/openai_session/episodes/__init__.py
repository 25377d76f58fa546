"""Contracts of episodes: what they allow, what is used, and why episodes end."""
