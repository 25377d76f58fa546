"""What of sessions outlives the process (`--state-dir`): the rows of each, and when they are written and read."""
