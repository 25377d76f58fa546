"""Contracts of episodes: their limits, the use of these limits, and the reasons why episodes end."""
