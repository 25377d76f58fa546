"""The simulated model: its vocabulary, and what it samples. No I/O."""
