"""The life of a turn: accept the request, relay it to the engine, resume a cut answer, record it, repeat the reply."""
