"""Sessions: the tree of turns, the messages in it, turns under way, and where all sessions are kept."""
