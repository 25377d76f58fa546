"""Sessions: the tree of turns, the messages in it, and where all sessions are kept."""
