"""Sessions in the state store (`--state-dir`): their blobs, and when these are written and read."""
