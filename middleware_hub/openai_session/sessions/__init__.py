"""Sessions: the tree of turns and messages of each session, the agent's requests, and the store of all sessions."""
