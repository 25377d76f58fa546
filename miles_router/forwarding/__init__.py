"""One request to one worker: connections, framing, retries, and the innermost app."""
