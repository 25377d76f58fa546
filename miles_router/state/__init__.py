"""What outlives the process: rows of bytes by owner, in one SQLite file for each slot.

    store = StateStore(Path("/data/router-state"), "process")
    await store.commit("session-1", [Change("turn", 0, b"...")])      # returns when it is durable
    await store.load("session-1")                                     # [StateRow("turn", 0, b"...")]

It knows bytes alone, and no layer's meaning of them. Which slot an owner has is said in one place, `slot_of`.
"""
