"""The parts of OpenAISessionMiddleware, in chapters:

sessions    the tree of turns, the messages in it, and where all sessions are kept
continuing  from a held turn and what an agent appends to the ids that the engine is given
faces       the APIs that agents speak, a file each
turns       a turn on its way: asked for, relayed, recorded, repeated
export      what a trainer reads: records and samples
"""
