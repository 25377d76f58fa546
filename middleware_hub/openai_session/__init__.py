"""The parts of OpenAISessionMiddleware, in chapters:

sessions    the tree of turns, the messages in it, turns under way, and where all sessions are kept
continuing  from a held turn and what an agent appends to the ids that the engine is given
faces       the APIs that agents speak, a file each
turns       a turn on its way: taken in, relayed, recorded, given again
export      what a trainer reads: records and samples
dialects    what training frameworks expect beside that, a file each
"""
