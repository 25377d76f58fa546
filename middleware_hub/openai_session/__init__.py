"""The parts of OpenAISessionMiddleware, by folder:

sessions    the tree of turns, the messages in it, turns in progress, and the session store
continuing  the token ids for the next prompt, from a recorded turn and the messages behind it
agent_apis       the APIs that agents use
turns       one turn: read, sampled, relayed, recorded, repeated
episodes    contracts of episodes: their limits, the use of these limits, why episodes end
archive     sessions in the state store: written and restored
export      records and samples for trainers
audit       checks of recorded sessions
dashboard   sessions as episodes of the dashboard
dialects    routes and clients of training frameworks
"""
